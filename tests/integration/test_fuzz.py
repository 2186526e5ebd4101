"""Requests and workers' answers with bytes changed at random: nothing crashes, leaks, or passes for what it is not.

A longer run:  python -m tests.integration.test_fuzz --cases 100000 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httptools
import uvloop

from gateway.edge import EdgeLimits
from gateway.upstream.connections import Timeouts
from tests.integration.relay_rig import Call, RelayRig, answers, ask, post, relay, silent, until

AT_ONCE = 32
PATIENCE_S = 30.0
OK = b'{"id":"1","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'

BODIES = {
    "/v1/chat/completions": ask(stream=True),
    "/v1/completions": b'{"model":"m","stream":true,"prompt":[1,2,3],"stream_options":{"include_usage":true}}',
    "/v1/responses": b'{"model":"m","stream":true,"input":"hi"}',
    "/v1/messages": b'{"model":"m","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hi"}]}',
    "/generate": b'{"stream":true,"text":"hi","sampling_params":{"max_new_tokens":3}}',
}
CHUNKED = b"".join(
    (
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\nx-session-id: s\r\n\r\n",
        b'10\r\n{"model":"m","pr\r\n9\r\nompt":"a"\r\n1;x=y\r\n}\r\n0\r\nx-t: 1\r\n\r\n',
    )
)
REQUESTS = (
    *(post(body, path=path) for path, body in BODIES.items()),
    post(ask(), headers=("expect: 100-continue", "x-request-id: r", "authorization: Bearer k")),
    post(ask()) * 2,
    CHUNKED,
    b"GET /v1/models HTTP/1.1\r\nhost: t\r\n\r\n",
    b"GET /ready HTTP/1.0\r\n\r\n",
)

EVENT = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
_SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"


def _chunks(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


ANSWERS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(OK), OK),
    b'HTTP/1.1 400 Bad\r\ncontent-length: 20\r\n\r\n{"error":{"code":1}}',
    b"HTTP/1.1 503 Busy\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n",
    _SSE + b"transfer-encoding: chunked\r\n\r\n" + _chunks(EVENT, EVENT, USAGE, DONE) + b"0\r\n\r\n",
    _SSE + b"transfer-encoding: chunked\r\n\r\n" + _chunks(EVENT + EVENT, USAGE + DONE) + b"0\r\nx-t: 1\r\n\r\n",
    _SSE + b"connection: close\r\n\r\n" + EVENT + USAGE + DONE,
    _SSE + b"transfer-encoding: chunked\r\n\r\n" + _chunks(
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n',
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ) + b"0\r\n\r\n",
    _SSE + b"transfer-encoding: chunked\r\n\r\n" + _chunks(
        b'event: response.completed\ndata: {"type":"response.completed","sequence_number":3}\n\n'
    ) + b"0\r\n\r\n",
)  # fmt: skip

WORDS = (
    b"\r\n", b"\n", b"\r\n\r\n", b"\0", b"\xff", b": ", b"{", b"}", b'"', b"[", b"0\r\n\r\n", b"ffffffff\r\n", b"-1",
    b"transfer-encoding: chunked\r\n", b"content-length: 5\r\n", b"connection: close\r\n", b"upgrade: h2c\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 ", b"data: ", b"[DONE]", b'"usage"', b'"choices":[]', b"\n\n",
    b'{"error":1}', b'"prompt_tokens":-1', b"999999999999999999999", b"1e999", b"\\u0000", b"\\ud800", b"null",
    b"\xc3", b"POST ", b"Infinity", b"[" * 300, b"x" * 9000,
)  # fmt: skip


def mutated(seed: bytes, rng: Random) -> bytes:
    """A few changes at random places: bytes flipped, cut out, repeated, words put in, the end cut off."""
    data = bytearray(seed)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(data) + 1)
        end = min(len(data), at + rng.choice((1, 2, 4, 20, 200)))
        match rng.randrange(6):
            case 0:
                data[at:end] = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at:end])
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = data[at:end] * rng.choice((1, 2, 30))
            case 3:
                data[at:at] = rng.choice(WORDS)
            case 4:
                data[at:end] = rng.choice(WORDS)
            case _:
                del data[at:]
    return bytes(data)


def pieces(data: bytes, rng: Random) -> list[bytes]:
    """Cut at up to three places."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 3))))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


class Report(NamedTuple):
    """What a run found: answers by status (0: none), and what is wrong."""

    statuses: Counter[int]
    wrong: list[str]


class StrictReader:
    """A strict reader of one answer."""

    def __init__(self) -> None:
        self.body = b""
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("bytes behind the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = self.parser.get_status_code() >= 200


async def _each(count: int, run: Callable[[int], Coroutine[Any, Any, None]]) -> None:
    numbers = iter(range(count))

    async def lane() -> None:
        for number in numbers:
            await run(number)

    await asyncio.gather(*(lane() for _ in range(AT_ONCE)))


async def _all_gone(r: RelayRig) -> None:
    for client in r.clients:
        client.abort()
    r.clients.clear()
    await until(r.quiet, within_s=PATIENCE_S)
    await until(lambda: len(r.edge.deadlines) == 0, within_s=PATIENCE_S)
    assert r.edge.buffered_bytes == 0


async def fuzz_requests(cases: int, seed: int) -> Report:
    """Changed requests to a sane worker: the only 5xx is the one for a coding that is not implemented."""
    report = Report(Counter(), [])
    limits = EdgeLimits(header_timeout_s=0.3, body_timeout_s=0.3, linger_s=0.05)
    async with relay(answers(OK), limits=limits, keep_alive_s=1) as r:

        async def one(number: int) -> None:
            rng = Random(f"{seed}-{number}")
            raw = mutated(rng.choice(REQUESTS), rng)
            client = await r.client()
            for piece in pieces(raw, rng):
                client.send(piece)
                await asyncio.sleep(0)
            try:
                status = (await client.answer()).status
            except (asyncio.IncompleteReadError, ConnectionError):
                status = 0
            report.statuses[status] += 1
            r.workers[0].calls.clear()
            if status >= 500 and status != 501:
                report.wrong.append(f"case {number}: {status} for {raw[:300]!r}")
            client.abort()
            r.clients.remove(client)
            r.outcomes.clear()

        await _each(cases, one)
        await _all_gone(r)
    return report


async def fuzz_answers(cases: int, seed: int) -> Report:
    """Changed answers of a worker: what the client reads is valid HTTP, and a broken stream never looks whole."""
    report = Report(Counter(), [])
    async with relay(silent, timeouts=Timeouts(first_byte_s=0.3, idle_s=0.3)) as r:
        worker = next(iter(r.fleet.workers.values()))

        def script(call: Call) -> None:
            rng = Random(f"{seed}-{call.headers['x-case']}")
            raw = mutated(rng.choice(ANSWERS), rng)
            for piece in pieces(raw, rng):
                call.send(piece)
            if rng.random() < 0.95:
                call.close()

        r.workers[0].script = script

        async def one(number: int) -> None:
            rng = Random(number)
            path = rng.choice(list(BODIES))
            client = await r.client()
            client.send(post(BODIES[path], path=path, headers=(f"x-case: {number}", "connection: close")))
            raw = await client.rest()
            r.clients.remove(client)
            client.abort()
            worker.health.reset(r.edge.clock())
            r.outcomes.clear()
            r.workers[0].calls.clear()
            reader = StrictReader()
            try:
                reader.parser.feed_data(raw)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
                report.wrong.append(f"case {number}: not valid HTTP ({error!r}): {raw[:300]!r}")
                return
            status = reader.parser.get_status_code() if raw else 0
            report.statuses[status] += 1
            told = reader.headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")
            if status == 200 and told and b"chunked" in reader.headers.get(b"transfer-encoding", b""):
                last = [line for line in reader.body.split(b"\n") if line.startswith(b"data:")][-1:]
                ends = (b"[DONE]", b"message_stop", b"response.completed", b'"error"')
                if not reader.complete or not any(end in line for line in last for end in ends):
                    report.wrong.append(f"case {number}: looks whole: {raw[-300:]!r}")

        await _each(cases, one)
        await _all_gone(r)
    return report


class ErrorLog(logging.Handler):
    """Collects what is logged as an error: a traceback is a bug."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


def _run(fuzz: Callable[[int, int], Coroutine[Any, Any, Report]], cases: int, seed: int) -> Report:
    errors = ErrorLog()
    logging.getLogger().addHandler(errors)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report = runner.run(fuzz(cases, seed))
    finally:
        logging.getLogger().removeHandler(errors)
    report.wrong.extend(errors.said)
    return report


def test_changed_requests() -> None:
    report = _run(fuzz_requests, 3000, seed=1)
    assert not report.wrong
    assert report.statuses[200] > 100
    assert report.statuses[400] > 300


def test_changed_answers() -> None:
    report = _run(fuzz_answers, 3000, seed=1)
    assert not report.wrong
    assert report.statuses[0] == 0, "every request is answered"
    assert report.statuses[200] > 300
    assert report.statuses[502] > 300


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def main() -> int:
    """Run many cases; the exit code is 1 when one went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    wrong: list[str] = []
    for fuzz in (fuzz_requests, fuzz_answers):
        _run(fuzz, 5000, args.seed)
        gc.collect()
        before, began = _rss_mb(), time.monotonic()
        report = _run(fuzz, args.cases, args.seed + 1)
        gc.collect()
        sys.stdout.write(
            f"{fuzz.__name__}: {args.cases} cases in {time.monotonic() - began:.0f} s, statuses "
            f"{dict(sorted(report.statuses.items()))}, RSS {before:.0f} -> {_rss_mb():.0f} MB, "
            f"wrong {len(report.wrong)}\n"
        )
        wrong += report.wrong
    sys.stdout.writelines(line + "\n" for line in wrong[:20])
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
