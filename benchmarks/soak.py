"""What becomes of requests while things break: every one of them is accounted for.

    python -m benchmarks.soak chaos   [--minutes 3] [--rate 40] [--engines 4] [--seed 1] [--hedge 0.9]
    python -m benchmarks.soak streams [--streams 1100] [--seconds 30]

`chaos`: a steady open loop through `kvgate serve` over simulated engines; every few seconds one is killed and started
again, while others cut, stall, refuse, reset and lose events; a tenth of the clients leave early. With `--hedge`
late requests get a second worker, beyond that share of their like and 0.2 s. `streams`: very
many streams at a time through one process, a chunk every 200 ms each. Prints a table and, with `--out`, writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import httpx
import uvloop

PATIENCE_S = 60.0
LOST = ("lost", "no_end")
"""Ends that no client should see: no answer at all, or a stream that looks whole and is not."""

FAULTS: tuple[dict[str, Any], ...] = (
    {"kind": "cut", "after": 3, "times": 3},
    {"kind": "reset", "times": 3},
    {"kind": "status", "code": 500, "times": 3},
    {"kind": "status", "code": 503, "times": 3},
    {"kind": "garble", "after": 2, "times": 3},
    {"kind": "stall", "after": 2, "times": 2},
    {"kind": "freeze", "times": 2},
    {"kind": "drop", "count": 20},
    {"kind": "clear", "silent": True},
    {"kind": "restart"},
)
CONFIG = """
timeouts: {first_byte_s: 5, idle_s: 5}
health: {open_s: 2, probe_s: 1, slow_start_s: 2}
telemetry: {log_level: warning}
"""
HEDGING = "retries: {{hedge_percentile: {}, hedge_floor_s: 0.2}}\n"


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """One command in a process of its own; what it says goes to a file."""

    def __init__(self, log: Path, *command: str) -> None:
        self._command = [sys.executable, "-m", *command]
        self._log = log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as out:
            self.popen = subprocess.Popen(self._command, stdout=out, stderr=out)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


async def until_ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as http, asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get(f"{url}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def one(port: int, body: dict[str, Any], *, leave_after_s: float | None = None) -> tuple[str, list[float]]:
    """How a request ended, and when each piece of its answer came."""
    raw = json.dumps(body, separators=(",", ":")).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(raw)
    pieces: list[float] = []
    data = b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head + raw)
        async with asyncio.timeout(leave_after_s or PATIENCE_S):
            while piece := await reader.read(65_536):
                pieces.append(time.monotonic())
                data = (data + piece)[-8_192:] if pieces[1:] else piece
                if not pieces[1:]:
                    status = data[9:12].decode("latin-1")
    except TimeoutError:
        return ("left" if leave_after_s else "lost"), pieces
    except ConnectionError:
        return "lost" if not pieces else "cut", pieces
    finally:
        writer.transport.abort()
    return _ending(status if pieces else "", data, stream=bool(body["stream"])), pieces


def _ending(status: str, data: bytes, *, stream: bool) -> str:
    if not status:
        return "lost"
    if status != "200":
        return f"error {status}" if b'"error"' in data or b'"code"' in data or b"{" in data else "lost"
    if stream:
        if not data.endswith(b"0\r\n\r\n"):
            return "cut"
        if b"data: [DONE]" in data[-200:]:
            return "finished"
        return "error event" if b'data: {"error"' in data else "no_end"
    return "finished" if data.endswith(b"}") else "cut"


async def chaos(minutes: float, rate: float, engines: int, seed: int, hedge: float, folder: Path) -> dict[str, object]:
    """The figures of one run."""
    rng = Random(seed)
    ports = [free_port() for _ in range(engines)]
    processes = [
        Process(folder / f"engine{port}.log", "gateway", "engine", "--port", str(port), "--speed", "4")
        for port in ports
    ]
    port, admin = free_port(), free_port()
    config = folder / "kvgate.yaml"
    config.write_text(CONFIG + (HEDGING.format(hedge) if hedge else ""))
    workers = [part for worker in ports for part in ("--worker", f"http://127.0.0.1:{worker}")]
    serve = ("serve", "--config", str(config), "--port", str(port), "--admin-port", str(admin), *workers)
    gateway = Process(folder / "serve.log", "gateway", *serve)
    done: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    running: set[asyncio.Task[None]] = set()
    over = False

    async def request(number: int) -> None:
        body: dict[str, Any] = {
            "model": "demo",
            "stream": number % 4 != 0,
            "max_tokens": rng.randrange(5, 60),
            "prompt": [400 + number % 40] * 256 + [rng.randrange(300, 4000) for _ in range(64)],
        }
        leave = rng.uniform(0.01, 0.5) if number % 10 == 0 else None
        done[(await one(port, body, leave_after_s=leave))[0]] += 1

    async def trouble() -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            while not over:
                await asyncio.sleep(rng.uniform(0.5, 1.5))
                victim = rng.randrange(engines)
                if rng.random() < 0.2:
                    faults["kill -9"] += 1
                    processes[victim].kill()
                    await asyncio.sleep(rng.uniform(0.2, 2))
                    processes[victim].start()
                    continue
                fault = rng.choice(FAULTS)
                faults[str(fault["kind"])] += 1
                with contextlib.suppress(httpx.TransportError):
                    await http.post(f"http://127.0.0.1:{ports[victim]}/sim/fault", json=fault)

    try:
        await until_ready(f"http://127.0.0.1:{port}")
        began = time.monotonic()
        making = asyncio.create_task(trouble())
        number, warm_mb = 0, 0.0
        while (elapsed := time.monotonic() - began) < minutes * 60:
            while number < elapsed * rate:
                number += 1
                task = asyncio.create_task(request(number))
                running.add(task)
                task.add_done_callback(running.discard)
            if not warm_mb and elapsed > minutes * 20:
                warm_mb = gateway.rss_mb()
            await asyncio.sleep(0.01)
        over = True
        await making
        await asyncio.gather(*running)
        left = await _settled(f"http://127.0.0.1:{admin}/metrics")
        second = await _by_label(f"http://127.0.0.1:{admin}/metrics", "hedges_total", "outcome") if hedge else None
        return {
            "requests": number,
            "accounted": done.total(),
            "ends": dict(sorted(done.items())),
            "lost": sum(done[end] for end in LOST),
            "faults": dict(sorted(faults.items())),
            **({"second workers": second} if second is not None else {}),
            **left,
            "rss_mb_after_a_third": round(warm_mb, 1),
            "rss_mb_at_the_end": round(gateway.rss_mb(), 1),
            "tracebacks": (folder / "serve.log").read_text().count("Traceback"),
        }
    finally:
        for process in (*processes, gateway):
            process.kill()


async def _settled(metrics: str) -> dict[str, float]:
    """Sums of the gauges that must be 0, once they are or do not change any more."""
    names = ("accounting_drift", "worker_inflight_requests", "worker_inflight_tokens")
    sums: dict[str, float] = {}
    async with httpx.AsyncClient(trust_env=False) as http:
        for _ in range(40):
            text = (await http.get(metrics)).text
            for name in (*names, "task_restarts_total"):
                values = re.findall(rf"^kvgate_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
                sums[name] = sum(abs(float(value)) for value in values)
            if not any(sums[name] for name in names):
                break
            await asyncio.sleep(0.25)
    return sums


async def _by_label(metrics: str, name: str, label: str) -> dict[str, float]:
    """A counter by one of its labels."""
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(metrics)).text
    found = re.findall(rf'^kvgate_{name}{{.*{label}="(\w+)".*}} (\S+)$', text, re.MULTILINE)
    return {value: float(count) for value, count in found}


async def streams(count: int, seconds: float, folder: Path) -> dict[str, object]:
    """`count` streams at a time: ends, and the gaps between pieces beside the 200 ms of the worker."""
    every_s = 0.2
    worker_port, port, admin = free_port(), free_port(), free_port()
    pace = ("--chunks", str(int(seconds / every_s)), "--every", str(every_s))
    worker = Process(folder / "worker.log", "benchmarks.relay_worker", "--port", str(worker_port), *pace)
    serve = ("serve", "--port", str(port), "--admin-port", str(admin), "--worker", f"http://127.0.0.1:{worker_port}")
    gateway = Process(folder / "serve.log", "gateway", *serve)
    try:
        await until_ready(f"http://127.0.0.1:{port}")
        before = gateway.rss_mb()
        done: Counter[str] = Counter()
        gaps: list[float] = []

        async def run(number: int) -> None:
            await asyncio.sleep(number * 2.0 / count)
            body = {"model": "fake", "stream": True, "prompt": f"stream {number}", "max_tokens": 150}
            end, pieces = await one(port, body)
            done[end] += 1
            # The first piece is the head's, the last ones the end's: between them are the worker's chunks.
            gaps.extend(b - a for a, b in itertools.pairwise(pieces))

        peak = 0.0
        running = asyncio.gather(*(run(number) for number in range(count)))
        while not running.done():
            await asyncio.sleep(1)
            peak = max(peak, gateway.rss_mb())
        left = await _settled(f"http://127.0.0.1:{admin}/metrics")
        cuts = statistics.quantiles(gaps, n=1000)
        return {
            "streams": count,
            "seconds": seconds,
            "ends": dict(done),
            "lost": count - done["finished"],
            "pieces": len(gaps),
            "gap_ms_p50": round(cuts[499] * 1e3, 1),
            "gap_ms_p99": round(cuts[989] * 1e3, 1),
            "gap_ms_p99.9": round(cuts[998] * 1e3, 1),
            **left,
            "rss_mb_before": round(before, 1),
            "rss_mb_peak": round(peak, 1),
            "rss_mb_after": round(gateway.rss_mb(), 1),
        }
    finally:
        worker.kill()
        gateway.kill()


def main() -> int:
    """Run one part; the exit code is 1 when a request was lost or something stayed counted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("mode", choices=("chaos", "streams"))
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--rate", type=float, default=40, help="requests a second")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hedge", type=float, default=0.0, help="retries.hedge_percentile; 0: off")
    parser.add_argument("--streams", type=int, default=1100)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.mode == "chaos":
            figures = uvloop.run(chaos(args.minutes, args.rate, args.engines, args.seed, args.hedge, Path(folder)))
        else:
            figures = uvloop.run(streams(args.streams, args.seconds, Path(folder)))
    width = max(len(name) for name in figures)
    print("\n".join(f"{name:<{width}}  {value}" for name, value in figures.items()))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    kept = ("accounting_drift", "worker_inflight_requests", "worker_inflight_tokens", "lost", "tracebacks")
    return int(any(figures.get(name) for name in kept))


if __name__ == "__main__":
    raise SystemExit(main())
