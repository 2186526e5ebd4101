"""A cheap load generator for the relay benchmark: raw HTTP/1.1 over asyncio protocols, one result line of JSON.

    python -m benchmarks.relay_load streams  --port 9000 --pid PROXY [--streams 100]
    python -m benchmarks.relay_load requests --port 9000 --pid PROXY [--rate 100] [--seconds 2]
    python -m benchmarks.relay_load paced    --port 9000 [--rate 100] [--seconds 2]

`streams` runs them side by side and counts chunks; `requests` (no streaming) and `paced` (streams) begin by a
timetable, whether the ones before are done or not; `paced` gives the time to the first body byte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from time import perf_counter

import uvloop

from benchmarks.process_cpu import cpu_s

_BEGIN_EVERY_S = 0.003
"""Between two streams' begins: no multiple or divisor of the 20 ms between chunks."""

_STREAM_S = 1.9
"""Within this long after the first one's begin all streams run; each takes 2 s."""

_RAMP_S = 2.2
"""Until as many streams run as ever will: a stream takes 2 s. Before, every stream opens a connection to the worker."""

_CONNECTIONS = 250
"""Opened before an open loop begins: streams of two seconds, a hundred begun each second."""

_PROMPT = "kv caches live from what is said twice " * 50


def _request(*, stream: bool) -> bytes:
    """A chat request with a prompt of 2 KB, as the OpenAI client would send it."""
    body = json.dumps(
        {
            "model": "fake",
            "stream": stream,
            "max_tokens": 100,
            "messages": [{"role": "system", "content": _PROMPT}, {"role": "user", "content": "and now?"}],
        },
        separators=(",", ":"),
    ).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\naccept: application/json\r\n"
        b"accept-encoding: gzip, deflate\r\nuser-agent: bench/1\r\nauthorization: Bearer sk-none\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


class Client(asyncio.Protocol):
    """One connection, one request at a time; counts what comes without parsing it."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = -1
        self._end = b""
        self._done: asyncio.Future[None] | None = None
        self.chunks = 0
        self.first_byte_at: float | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("the connection ended in the middle of an answer"))

    def ask(self, request: bytes) -> asyncio.Future[None]:
        self._done = asyncio.get_running_loop().create_future()
        self._buffer, self._left, self._end = b"", -1, b""
        self.chunks, self.first_byte_at = 0, None
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        if self._left < 0:
            self._buffer += data
            at = self._buffer.find(b"\r\n\r\n")
            if at < 0:
                return
            head, data = self._buffer[:at].lower(), self._buffer[at + 4 :]
            if not head.startswith(b"http/1.1 200"):
                raise ConnectionError(self._buffer[:300].decode("latin-1"))
            length = head.find(b"content-length:")
            self._left = int(head[length + 15 :].split(b"\r\n", 1)[0]) if length >= 0 else 1 << 60
            self._buffer = b""
        if data and self.first_byte_at is None:
            self.first_byte_at = perf_counter()
        self.chunks += data.count(b"data: ")
        self._left -= len(data)
        self._end = (self._end + data)[-5:]
        if self._left <= 0 or self._end == b"0\r\n\r\n":
            assert self._done is not None
            self._done.set_result(None)


async def _connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def streams(port: int, count: int, pid: int) -> dict[str, float]:
    """`count` streams at the same time, their chunks spread evenly over time.

    Streams that all begin at once send all their chunks at once, and a proxy then handles a hundred for one wake-up.
    Real streams do not, so each begins a little later than the one before. CPU is taken while all of them run; what
    their beginnings and ends cost is given a stream.
    """
    clients = [await _connect(port) for _ in range(count)]
    request = _request(stream=True)
    whole = cpu_s(pid)
    running = []
    began = perf_counter()
    for client in clients:
        running.append(client.ask(request))
        await asyncio.sleep(_BEGIN_EVERY_S)
    await asyncio.sleep(0.1)
    before, cpu = sum(client.chunks for client in clients), cpu_s(pid)
    await asyncio.sleep(max(0.2, began + _STREAM_S - perf_counter()))
    chunks, cpu = sum(client.chunks for client in clients) - before, cpu_s(pid) - cpu
    await asyncio.gather(*running)
    whole = cpu_s(pid) - whole
    for client in clients:
        client.close()
    chunk_us = cpu * 1e6 / chunks
    all_chunks = sum(client.chunks for client in clients)
    return {"units": all_chunks, "us": chunk_us, "us_a_stream": (whole * 1e6 - chunk_us * all_chunks) / count}


async def requests(port: int, rate: float, seconds: float, pid: int) -> dict[str, float]:
    """Open loop of small requests without streaming.

    Both proxies get the same number a second. In a closed loop the faster one would keep its peers so busy that
    waking them costs it nothing, which is more than half of what a request costs on an idle machine.
    """
    idle = [await _connect(port) for _ in range(_CONNECTIONS)]
    await _open_loop(port, _request(stream=False), rate, 0.2, idle)
    before = cpu_s(pid)
    times = await _open_loop(port, _request(stream=False), rate, seconds, idle)
    return {"units": len(times), "us": (cpu_s(pid) - before) * 1e6 / len(times)}


async def paced(port: int, rate: float, seconds: float) -> dict[str, float]:
    """Open loop of streams; time from the planned start to the first body byte, once the load is steady."""
    idle = [await _connect(port) for _ in range(_CONNECTIONS)]
    times = await _open_loop(port, _request(stream=True), rate, _RAMP_S + seconds, idle, after_s=_RAMP_S)
    cuts = statistics.quantiles(times, n=100)
    return {"units": len(times), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


async def _open_loop(
    port: int, request: bytes, rate: float, seconds: float, idle: list[Client], *, after_s: float = 0.0
) -> list[float]:
    """Seconds from each planned start to the first body byte, of those planned `after_s` after the first. `idle`
    connections are used, newest first."""
    times: list[float] = []

    async def one(planned: float) -> None:
        client = idle.pop() if idle else await _connect(port)
        await client.ask(request)
        assert client.first_byte_at is not None
        if planned >= began + after_s:
            times.append(client.first_byte_at - planned)
        idle.append(client)

    began = perf_counter() + 0.05
    running = []
    for number in range(int(rate * seconds)):
        planned = began + number / rate
        delay = planned - perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        running.append(asyncio.create_task(one(planned)))
    await asyncio.gather(*running)
    return times


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("streams", "requests", "paced"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--pid", type=int, default=os.getpid(), help="whose CPU to take")
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--seconds", type=float, default=2)
    args = parser.parse_args()
    match args.mode:
        case "streams":
            result = await streams(args.port, args.streams, args.pid)
        case "requests":
            result = await requests(args.port, args.rate, args.seconds, args.pid)
        case _:
            result = await paced(args.port, args.rate, args.seconds)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    uvloop.run(_main())
