"""What a large fleet costs a gateway that does nothing else: start, memory, idle CPU.

    python -m benchmarks.fleet [--workers 200] [--processes 4] [--seconds 30] [--out FILE]

Simulated engines in a few processes, and one `kvgate serve` that finds them all in its configuration, probes them,
subscribes to their events and polls their load, at the default periods. Prints a table. The times of the start depend
on the machine and on what the engines share it with; CPU is what the kernel charged to the gateway alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import uvloop

from benchmarks.process_cpu import cpu_s
from benchmarks.soak import PATIENCE_S, Process, free_port
from gateway.sim.server import EngineSettings, SimulatedWorker, Speech
from gateway.sim.speech import DEMO_MODEL

_WARM_UP_S = 15.0
"""The first probes behind the start are over by then."""


async def engines(count: int) -> None:
    """Run that many simulated engines in this process; their URLs are one line of JSON."""
    speech = Speech.load(DEMO_MODEL)
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(count):
            worker = SimulatedWorker(EngineSettings(name=f"e{number}"), wall_clock=time.time, speech=speech)
            await worker.start()
            stack.push_async_callback(worker.stop)
            urls.append(worker.url)
        print(json.dumps(urls), flush=True)
        await asyncio.Event().wait()


async def measure(workers: int, processes: int, seconds: float, folder: Path) -> dict[str, float]:
    """The figures of one run."""
    with contextlib.ExitStack() as stack:
        urls = [url for part in _shares(workers, processes) for url in _engines(stack, part)]
        port, admin = free_port(), free_port()
        config = folder / "kvgate.json"
        config.write_text(
            json.dumps({"workers": [{"url": url} for url in urls], "telemetry": {"log_level": "warning"}})
        )
        began = time.monotonic()
        command = ("gateway", "serve", "--config", str(config), "--host", "127.0.0.1")
        gateway = Process(folder / "gateway.log", *command, "--port", str(port), "--admin-port", str(admin))
        stack.callback(gateway.kill)
        pid = gateway.popen.pid
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
            await _until(http, f"http://127.0.0.1:{port}/health", lambda _: True)
            listening_s = time.monotonic() - began
            answer = await _until(http, f"http://127.0.0.1:{admin}/admin/workers", lambda body: _ready(body) == workers)
            await _until(http, f"http://127.0.0.1:{port}/ready", lambda _: True)
            ready_s, start_cpu_s = time.monotonic() - began, cpu_s(pid)
            subscribed = sum(bool(worker["feed"] and worker["feed"]["phases"]) for worker in answer["workers"])
            await asyncio.sleep(_WARM_UP_S)
            before, switches, since = cpu_s(pid), _switches(pid), time.monotonic()
            await asyncio.sleep(seconds)
            passed_s = time.monotonic() - since
            idle_cpu_s, wakes = cpu_s(pid) - before, _switches(pid) - switches
        return {
            "workers": workers,
            "subscribed": subscribed,
            "listening after, s": listening_s,
            "all ready after, s": ready_s,
            "CPU until then, s": start_cpu_s,
            "memory, MB": gateway.rss_mb(),
            "open files": _entries(pid, "fd"),
            "threads": _entries(pid, "task"),
            "idle CPU, % of a core": 100 * idle_cpu_s / passed_s,
            "idle CPU a worker and second, us": 1e6 * idle_cpu_s / passed_s / workers,
            "wake-ups a second": wakes / passed_s,
        }


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (number < total % parts) for number in range(parts)]


def _engines(stack: contextlib.ExitStack, count: int) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.fleet", "--engines", str(count)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    assert process.stdout is not None
    urls: list[str] = json.loads(process.stdout.readline())
    return urls


async def _until(http: httpx.AsyncClient, url: str, fits: Any) -> Any:
    async with asyncio.timeout(PATIENCE_S * 5):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await http.get(url)
                if answer.status_code == 200 and fits(answer.json()):
                    return answer.json()
            await asyncio.sleep(0.2)


def _ready(body: Any) -> int:
    return sum(worker["state"] == "ready" for worker in body["workers"])


def _entries(pid: int, folder: str) -> int:
    return len(list(Path(f"/proc/{pid}/{folder}").iterdir()))


def _switches(pid: int) -> int:
    """Times any thread of the process went to sleep by itself."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for line in (thread / "status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                count += int(line.split()[1])
    return count


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=4, help="that run the engines")
    parser.add_argument("--seconds", type=float, default=30.0, help="of idling")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engines", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engines is not None:
        uvloop.run(engines(given.engines))
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = uvloop.run(measure(given.workers, given.processes, given.seconds, Path(folder)))
    for name, value in figures.items():
        print(f"{name:<36} {value:>10.1f}" if isinstance(value, float) else f"{name:<36} {value:>10}")
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
