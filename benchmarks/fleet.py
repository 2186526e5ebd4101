"""What a large fleet costs a gateway that does nothing else: start, memory, idle CPU.

    python -m benchmarks.fleet [--workers 200] [--processes 4] [--seconds 30] [--way config --way pods] [--out FILE]

Simulated engines in a few processes, each at an address of its own on loopback, and one `kvgate serve` that finds them
all, probes them, subscribes to their events and polls their load, at the default periods. Once for each way of finding
them: the configuration; A records; SRV records with a target for each worker, with the targets' addresses in the same
answer (as the name servers of Kubernetes give them) and without; pods of the usual size, the port in an annotation;
EndpointSlices of a hundred. Prints a table. The times of the start depend on the machine and on what the engines share
it with; CPU is what the kernel charged to the gateway alone.
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
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from benchmarks.process_cpu import cpu_s
from benchmarks.soak import PATIENCE_S, Process, free_port
from gateway.sim.kube_api import PODS, SLICES, endpoint, endpoint_slice, kube, pod
from gateway.sim.name_server import name_server
from gateway.sim.server import EngineSettings, SimulatedWorker, Speech
from gateway.sim.speech import DEMO_MODEL

_WARM_UP_S = 15.0
"""The first probes behind the start are over by then."""

_POD_BYTES = 6_000
"""What a real pod says beside what is looked for: volumes, environment, status, who manages which field."""

_SLICE_SIZE = 100
"""Endpoints in an EndpointSlice, as the controller of Kubernetes makes them."""

_QUIET = {"telemetry": {"log_level": "warning"}}
_NAME, _SERVICE = "fleet.test", "_http._tcp.fleet.test"


class Way(StrEnum):
    """How the gateway finds its workers."""

    CONFIG = "config"
    ADDRESSES = "addresses"
    SRV = "srv"
    SRV_BARE = "srv_bare"
    PODS = "pods"
    SLICES = "endpointslices"


async def engines(first: int, count: int, port: int) -> None:
    """Run that many simulated engines in this process; their URLs are one line of JSON."""
    speech = Speech.load(DEMO_MODEL)
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(first, first + count):
            host = f"127.1.{number // 250}.{number % 250 + 1}"
            settings = EngineSettings(name=f"e{number}", host=host, port=port)
            worker = SimulatedWorker(settings, wall_clock=time.time, speech=speech)
            await worker.start()
            stack.push_async_callback(worker.stop)
            urls.append(worker.url)
        print(json.dumps(urls), flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def named(way: Way, urls: Sequence[str]) -> AsyncIterator[dict[str, Any]]:
    """What the configuration says, and a name server or API server that says the rest until the context ends."""
    places = [urlsplit(url) for url in urls]
    match way:
        case Way.CONFIG:
            yield {"workers": [{"url": url} for url in urls]}
        case Way.ADDRESSES | Way.SRV | Way.SRV_BARE:
            async with name_server() as names:
                names.additional = way is Way.SRV
                names.records[_NAME, "A"] = [str(place.hostname) for place in places]
                names.records[_SERVICE, "SRV"] = [f"0 50 {at.port} e{n}.{_NAME}." for n, at in enumerate(places)]
                names.records |= {(f"e{n}.{_NAME}", "A"): [str(place.hostname)] for n, place in enumerate(places)}
                srv = {"name": _SERVICE, "type": "srv"}
                looked_up = {"name": _NAME, "port": places[0].port} if way is Way.ADDRESSES else srv
                yield {"discovery": {"dns": [looked_up | {"server": names.address}]}}
        case Way.PODS | Way.SLICES:
            async with kube() as api:
                for number, place in enumerate(places):
                    one = pod(f"vllm-{number}", place.hostname, port=str(place.port))
                    one["metadata"]["managedFields"] = [{"fieldsV1": "x" * _POD_BYTES}]
                    api.apply(PODS, one)
                for start in range(0, len(places), _SLICE_SIZE):
                    part = places[start : start + _SLICE_SIZE]
                    ends = [endpoint(f"vllm-{start + n}", str(place.hostname)) for n, place in enumerate(part)]
                    api.apply(SLICES, endpoint_slice(f"vllm-{start}", ends, port=places[0].port or 80))
                selector = "app=vllm" if way is Way.PODS else "kubernetes.io/service-name=vllm"
                cluster = {"api_server": api.url, "namespace": "llm", "selector": selector, "kind": way.value}
                yield {"discovery": {"kubernetes": cluster}}


async def measure(way: Way, urls: Sequence[str], seconds: float, folder: Path) -> dict[str, float]:
    """The figures of one gateway."""
    workers = len(urls)
    async with AsyncExitStack() as stack:
        port, admin = free_port(), free_port()
        config = folder / f"{way}.json"
        config.write_text(json.dumps(await stack.enter_async_context(named(way, urls)) | _QUIET))
        began = time.monotonic()
        command = ("gateway", "serve", "--config", str(config), "--host", "127.0.0.1")
        gateway = Process(folder / f"{way}.log", *command, "--port", str(port), "--admin-port", str(admin))
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


@contextlib.contextmanager
def running(workers: int, processes: int) -> Iterator[list[str]]:
    """The URLs of so many engines in so many processes."""
    port, first = free_port(), 0
    with contextlib.ExitStack() as stack:
        urls = []
        for count in _shares(workers, processes):
            urls += _engines(stack, first, count, port)
            first += count
        yield urls


def _engines(stack: contextlib.ExitStack, *numbers: int) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.fleet", "--engines", *map(str, numbers)]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
    stack.callback(process.kill)
    assert process.stdout is not None
    urls: list[str] = json.loads(process.stdout.readline())
    return urls


async def _until(http: httpx.AsyncClient, url: str, fits: Callable[[Any], bool]) -> Any:
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
    parser.add_argument("--way", type=Way, action="append", help="of finding them; all, when none is given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engines", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.engines is not None:
        uvloop.run(engines(*given.engines))
        return
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder, running(given.workers, given.processes) as urls:
        for way in given.way or Way:
            found[way] = uvloop.run(measure(way, urls, given.seconds, Path(folder)))
            print(f"{way}: done", file=sys.stderr)
    show(found)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2))


def show(found: Mapping[str, Mapping[str, float]]) -> None:
    """A row for each figure, a column for each way."""
    print(" " * 34, *(f"{way:>14}" for way in found))
    for name in next(iter(found.values())):
        values = (figures[name] for figures in found.values())
        print(f"{name:<34}", *(f"{value:>14.1f}" if isinstance(value, float) else f"{value:>14}" for value in values))


if __name__ == "__main__":
    main()
