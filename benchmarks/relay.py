"""What passing bytes costs: the gateway's process beside nginx, in one run, as ratios.

    python -m benchmarks.relay [--rounds 5]

Everything runs on loopback in processes of its own: fake worker, nginx (plain proxy, `proxy_buffering off`), gateway,
load generator. Rounds are interleaved (direct, nginx, gateway, direct, ...), so that a noisy neighbour hits all alike;
medians are reported. CPU is what the kernel charged to the proxy's processes, user and system, for the work of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

_NGINX = """
worker_processes 1; daemon off; pid {dir}/nginx.pid; error_log {dir}/error.log;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 10000000; client_body_buffer_size 1m; client_max_body_size 64m;
  client_body_temp_path {dir}/b; proxy_temp_path {dir}/p; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u;
  scgi_temp_path {dir}/s;
  upstream workers {{ server 127.0.0.1:{worker}; keepalive 512; keepalive_requests 10000000; }}
  server {{ listen 127.0.0.1:{port} backlog=2048; location / {{
    proxy_pass http://workers; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
  }} }}
}}
"""


@dataclass(frozen=True, slots=True)
class RelayFigures:
    """Medians over the rounds. CPU in microseconds; added times in milliseconds over the direct connection.

    `chunk` while all streams run; `stream` is what the beginning and the end of a stream cost on top of its chunks.
    """

    rounds: int
    nginx_chunk_us: float
    gateway_chunk_us: float
    chunk_ratio: float
    nginx_stream_us: float
    gateway_stream_us: float
    nginx_request_us: float
    gateway_request_us: float
    request_ratio: float
    nginx_added_p50_ms: float
    nginx_added_p99_ms: float
    gateway_added_p50_ms: float
    gateway_added_p99_ms: float


def measure(*, rounds: int = 5, streams: int = 100, rate: float = 1000, seconds: float = 2.0) -> RelayFigures:
    """Run it all. Needs nginx on the machine; raises RuntimeError without it."""
    if shutil.which("nginx") is None:
        raise RuntimeError("nginx is not installed; it is what the relay is measured against")
    with contextlib.ExitStack() as stack:
        worker, nginx, gateway = free_port(), free_port(), free_port()
        started(stack, [sys.executable, "-m", "benchmarks.relay_worker", "--port", str(worker)], worker)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # nginx drops root for its worker process, which must still reach its folders.
        folder.chmod(0o755)
        (folder / "nginx.conf").write_text(_NGINX.format(dir=folder, worker=worker, port=nginx))
        nginx_pid = started(stack, ["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)], nginx)
        url = f"http://127.0.0.1:{worker}"
        log = stack.enter_context((folder / "gateway.log").open("wb"))
        serve = [sys.executable, "-m", "gateway", "serve", "--worker", url, "--port", str(gateway), "--admin-port", "0"]
        gateway_pid = started(stack, serve, gateway, log, path="/ready")
        proxies = {"nginx": (nginx, nginx_pid), "gateway": (gateway, gateway_pid)}
        chunk_us: dict[str, list[float]] = {name: [] for name in proxies}
        stream_us: dict[str, list[float]] = {name: [] for name in proxies}
        request_us: dict[str, list[float]] = {name: [] for name in proxies}
        p50: dict[str, list[float]] = {name: [] for name in ("direct", *proxies)}
        p99: dict[str, list[float]] = {name: [] for name in ("direct", *proxies)}
        for port, pid in proxies.values():
            _load("requests", port, pid=pid, rate=rate, seconds=0.5)
        for _ in range(rounds):
            for name, (port, pid) in proxies.items():
                figures = _load("streams", port, pid=pid, streams=streams)
                chunk_us[name].append(figures["us"])
                stream_us[name].append(figures["us_a_stream"])
                request_us[name].append(_load("requests", port, pid=pid, rate=rate, seconds=seconds)["us"])
            for name, port in (("direct", worker), ("nginx", nginx), ("gateway", gateway)):
                figures = _load("paced", port, seconds=seconds)
                p50[name].append(figures["p50_ms"])
                p99[name].append(figures["p99_ms"])
    mid = statistics.median
    return RelayFigures(
        rounds=rounds,
        nginx_chunk_us=mid(chunk_us["nginx"]),
        gateway_chunk_us=mid(chunk_us["gateway"]),
        chunk_ratio=_ratio(chunk_us),
        nginx_stream_us=mid(stream_us["nginx"]),
        gateway_stream_us=mid(stream_us["gateway"]),
        nginx_request_us=mid(request_us["nginx"]),
        gateway_request_us=mid(request_us["gateway"]),
        request_ratio=_ratio(request_us),
        nginx_added_p50_ms=mid(p50["nginx"]) - mid(p50["direct"]),
        nginx_added_p99_ms=mid(p99["nginx"]) - mid(p99["direct"]),
        gateway_added_p50_ms=mid(p50["gateway"]) - mid(p50["direct"]),
        gateway_added_p99_ms=mid(p99["gateway"]) - mid(p99["direct"]),
    )


def _ratio(cost_us: dict[str, list[float]]) -> float:
    """Median of the ratios of neighbouring rounds: what disturbs one round disturbs both."""
    return statistics.median(g / n for g, n in zip(cost_us["gateway"], cost_us["nginx"], strict=True))


def _load(mode: str, port: int, **options: float) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.relay_load", mode, "--port", str(port)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the load generator failed: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def started(
    stack: contextlib.ExitStack, command: list[str], port: int, log: IO[bytes] | None = None, *, path: str = "/health"
) -> int:
    """Run a process until the stack ends; returns its id when its port answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
    stack.enter_context(ending(process))
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{command[0]} ended with {process.returncode}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=1):
            return process.pid
        time.sleep(0.05)
    raise RuntimeError(f"{' '.join(command)} does not answer")


@contextlib.contextmanager
def ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def table(figures: RelayFigures) -> str:
    """For people."""
    f = figures
    return "\n".join(
        (
            f"relay, medians of {f.rounds} rounds       nginx   gateway     ratio",
            f"CPU us per streamed chunk       {f.nginx_chunk_us:9.1f} {f.gateway_chunk_us:9.1f} {f.chunk_ratio:9.2f}",
            f"CPU us per stream besides       {f.nginx_stream_us:9.1f} {f.gateway_stream_us:9.1f}",
            f"CPU us per small request        {f.nginx_request_us:9.1f} {f.gateway_request_us:9.1f} "
            f"{f.request_ratio:9.2f}",
            f"added to first byte, p50 ms     {f.nginx_added_p50_ms:9.2f} {f.gateway_added_p50_ms:9.2f}",
            f"added to first byte, p99 ms     {f.nginx_added_p99_ms:9.2f} {f.gateway_added_p99_ms:9.2f}",
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(rounds=args.rounds)
    print(json.dumps(asdict(result)) if args.json else table(result))
