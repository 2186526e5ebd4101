"""A worker that accepts and never answers, beside one that streams and a scraper: processes, seen from outside.

Limits are in milliseconds, and the machine may have other work. So the time that the gateway had no core is taken off
(`tests.integration.measuring`); streams that go straight to the worker in the same run show how late the worker and
this client are themselves; and one of a few runs has to keep within the limits: a gateway that stalls does so in all.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL, Popen
from time import perf_counter
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
import uvloop

from benchmarks.relay import free_port
from tests.integration.measuring import Waiting, percentile, sampled
from tests.integration.processes import PATIENCE_S, Served, engine, gateway

ROOT = Path(__file__).parents[2]
TRIES = 3
CONCURRENT = 300
DIRECT = 40
CHUNKS = 100
EVERY_S = 0.02
FIRST_BYTE_S = 2.0
MAX_GAP_S = 0.06
MAX_SCRAPE_S = 0.05

_BODY = b'{"model":"fake","stream":true,"max_tokens":100,"messages":[{"role":"user","content":"%d"}]}'


class Reader(asyncio.Protocol):
    """One streamed request: its status, when pieces of its answer came, and its last bytes."""

    def __init__(self, number: int) -> None:
        self.status = 0
        self.at: list[float] = []
        self.last = b""
        self.done = asyncio.get_running_loop().create_future()
        body = _BODY % number
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.status = int(data[9:12])
        self.at.append(perf_counter())
        self.last = (self.last + data)[-64:]
        if (self.status != 200 or self.last.endswith(b"0\r\n\r\n")) and not self.done.done():
            self.done.set_result(None)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    @property
    def end(self) -> str:
        """How it ended."""
        if self.status != 200:
            return str(self.status)
        return "whole" if b"data: [DONE]" in self.last else "broken"

    def gaps_s(self, waiting: Waiting) -> list[float]:
        """Between two pieces."""
        return [waiting.without(before, after) for before, after in pairwise(self.at)]


class Stand(NamedTuple):
    """The processes."""

    served: Served
    stuck_url: str
    streaming_port: int


@contextmanager
def stand(directory: Path) -> Iterator[Stand]:
    """A gateway with both workers; requests go to them in turns."""
    with ExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.relay_worker", "--port", str(port), "--chunks", str(CHUNKS)]
        streaming = stack.enter_context(Popen([*command, "--every", str(EVERY_S)], cwd=ROOT, stdout=DEVNULL))
        stack.callback(streaming.kill)
        _, stuck_url = engine(stack, "--model", "fake")
        httpx.post(f"{stuck_url}/sim/fault", json={"kind": "freeze"}).raise_for_status()
        config = directory / "kvgate.json"
        config.write_text(
            json.dumps(
                {
                    "workers": [
                        {"url": f"http://127.0.0.1:{port}", "name": "streams", "kv_events": "off"},
                        {"url": stuck_url, "name": "stuck"},
                    ],
                    "routing": {"policy": "round_robin"},
                    "timeouts": {"first_byte_s": FIRST_BYTE_S, "connect_s": PATIENCE_S, "idle_s": PATIENCE_S},
                    "health": {"failures": 3, "open_s": 1, "probe_s": 0.5},
                }
            )
        )
        served = gateway(stack, "--config", str(config))
        yield Stand(served, stuck_url, port)


async def scrapes_s(url: str, waiting: Waiting, opened: asyncio.Event) -> list[float]:
    """Scrape every 200 ms until cancelled; what each took. `opened` is set when the breaker was seen open."""
    took: list[float] = []
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        try:
            while True:
                began = perf_counter()
                text = (await http.get(f"{url}/metrics")).text
                waiting.sample()
                took.append(waiting.without(began, perf_counter()))
                if 'kvgate_breaker_state{worker="stuck"} 2' in text:
                    opened.set()
                await asyncio.sleep(0.2)
        except asyncio.CancelledError:
            return took


async def asked(one: Stand) -> tuple[float, float, float]:
    """Everything at once; the p99 of gaps through the gateway and straight from the worker, and a good scrape."""
    loop = asyncio.get_running_loop()
    through, direct = urlsplit(one.served.url).port or 0, one.streaming_port
    opened = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), sampled([one.served.program.process.pid]) as waiting:
        scraping = loop.create_task(scrapes_s(one.served.admin, waiting, opened))
        readers: list[Reader] = []
        for number in range(CONCURRENT):
            _, reader = await loop.create_connection(lambda n=number: Reader(n), "127.0.0.1", through)  # type: ignore[misc]
            readers.append(reader)
        beside = [
            (await loop.create_connection(lambda n=number: Reader(n), "127.0.0.1", direct))[1]  # type: ignore[misc]
            for number in range(DIRECT)
        ]
        await asyncio.gather(*(reader.done for reader in (*readers, *beside)))
        await opened.wait()
        scraping.cancel()
        scrapes = await scraping
    ends = [reader.end for reader in readers]
    assert set(ends) <= {"whole", "504"}
    # Half go to the one that streams; of the others as many fail over as the budget of retries allows.
    assert ends.count("whole") > CONCURRENT // 3
    late = [reader.at[0] - readers[0].at[0] for reader in readers if reader.end == "504"]
    assert all(seconds < PATIENCE_S / 2 for seconds in late)
    assert {reader.end for reader in beside} == {"whole"}
    gaps = [gap for reader in readers if reader.end == "whole" for gap in reader.gaps_s(waiting)]
    straight = [after - before for reader in beside for before, after in pairwise(reader.at)]
    return percentile(gaps, 0.99), percentile(straight, 0.99), percentile(scrapes, 0.25)


def test_a_worker_that_never_answers_holds_up_no_stream_and_no_scrape(tmp_path: Path) -> None:
    seen = []
    with stand(tmp_path) as one:
        program, served = one.served.program, one.served
        for _ in range(TRIES):
            gap, straight, scrape = uvloop.run(asked(one))
            seen.append((gap, straight, scrape))
            if gap < max(MAX_GAP_S, straight + MAX_GAP_S - EVERY_S) and scrape < MAX_SCRAPE_S:
                break
        else:
            raise AssertionError(f"p99 of gaps, the same without a gateway, scrapes: {seen}")
        # It is repaired, nobody asks for anything, and it is back.
        httpx.post(f"{one.stuck_url}/sim/fault", json={"kind": "heal"}).raise_for_status()
        program.until(lambda: served.value("breaker_state", worker="stuck") == 0)
        for metric in ("accounting_drift", "worker_inflight_requests", "worker_inflight_tokens"):
            program.until(lambda name=metric: served.value(name) == 0)  # type: ignore[misc]
    assert "Traceback" not in program.output
