"""Requests and streams that hypothesis makes up: right framing around anything, and what must come of it.

`test_fuzz` changes bytes of good messages; here messages are built, so that what has to be answered is known: requests
on one connection get their answers in order and never a 5xx, and a stream arrives as it was sent or ends with an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httptools
import pytest
import uvloop
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.upstream.connections import Timeouts
from tests.integration.relay_rig import Call, RelayRig, relay, silent, until
from tests.integration.test_fuzz import BODIES, OK, ErrorLog, StrictReader

bounded = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
"""The same cases in every run, and however slow the machine is."""


@dataclass(frozen=True)
class Stage:
    """A served edge with one worker, on a loop of its own, for all cases of a test."""

    runner: asyncio.Runner
    rig: RelayRig


@pytest.fixture
def errors() -> Iterator[list[str]]:
    """What is logged as an error; nothing may be."""
    log = ErrorLog()
    logging.getLogger().addHandler(log)
    try:
        yield log.said
    finally:
        logging.getLogger().removeHandler(log)


@pytest.fixture
def stage() -> Iterator[Stage]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        stack = AsyncExitStack()
        rig = runner.run(stack.enter_async_context(relay(silent, timeouts=Timeouts(first_byte_s=60, idle_s=60))))
        yield Stage(runner, rig)
        runner.run(until(rig.quiet))
        assert rig.edge.buffered_bytes == 0
        runner.run(stack.aclose())


# --------------------------------------------------------------------------- requests

texts = st.text(max_size=20)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": texts}), min_size=1)
sane_bodies = st.fixed_dictionaries(
    {"model": st.just("m"), "messages": messages, "prompt": texts.filter(bool), "max_tokens": st.integers(1, 99)},
    optional={"temperature": st.floats(0, 2), "user": texts, "stop": st.lists(texts, max_size=2), "x": anything},
)
odd_bodies = st.dictionaries(
    st.sampled_from(
        ["model", "messages", "prompt", "stream", "stream_options", "max_tokens", "n", "cache_salt", "input"]
    )
    | texts,
    anything | messages,
    max_size=5,
)
header_values = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=30)
headers = st.lists(
    st.tuples(
        st.sampled_from(["x-request-id", "x-session-id", "authorization", "accept", "x-kvgate-worker", "te", "x-any"]),
        header_values,
    ),
    max_size=4,
)


@dataclass(frozen=True)
class Asked:
    """One request: its bytes, and whether nothing is wrong with it."""

    raw: bytes
    sane: bool


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    sane = draw(st.booleans())
    path = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions"] if sane else [*BODIES, "/v1/embeddings"]))
    body = json.dumps(draw(sane_bodies if sane else odd_bodies), ensure_ascii=draw(st.booleans())).encode(
        "utf-8", "surrogatepass"
    )
    lines = [f"POST {path} HTTP/1.1", "host: t", *(f"{name}: {value}" for name, value in draw(headers))]
    if draw(st.booleans()):
        return Asked("\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body, sane)
    framed = b""
    while body:
        size = draw(st.integers(1, len(body)))
        extension = draw(st.sampled_from([b"", b";a=b", b';q="x"']))
        framed += b"%x%b\r\n%b\r\n" % (size, extension, body[:size])
        body = body[size:]
    framed += draw(st.sampled_from([b"0\r\n\r\n", b"000\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n"]))
    return Asked("\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode() + framed, sane)


def cut(data: bytes, shares: list[float]) -> list[bytes]:
    """At these shares of its length."""
    at = [0, *sorted(int(share * len(data)) for share in shares), len(data)]
    return [data[a:b] for a, b in pairwise(at) if a < b]


cuts = st.lists(st.floats(0, 1, exclude_max=True), max_size=4)


def test_requests_on_one_connection_are_answered_in_order(stage: Stage, errors: list[str]) -> None:
    rig = stage.rig
    rig.workers[0].script = lambda call: call.plain(OK)
    asked_of = 0

    async def send(asked: list[Asked], at: list[float]) -> None:
        client = await rig.client()
        for piece in cut(b"".join(one.raw for one in asked), at):
            client.send(piece)
            await asyncio.sleep(0)
        for one in asked:
            answer = await client.answer()
            assert answer.status < 500
            if one.sane:
                assert (answer.status, answer.body) == (200, OK)
            elif answer.status != 200:
                assert json.loads(answer.body)["error"]
        client.abort()
        rig.clients.remove(client)
        rig.outcomes.clear()
        rig.workers[0].calls.clear()

    @settings(bounded, max_examples=500)
    @given(st.lists(requests(), min_size=1, max_size=4), cuts)
    def run(asked: list[Asked], at: list[float]) -> None:
        nonlocal asked_of
        asked_of += len(asked)
        stage.runner.run(send(asked, at))

    run()
    assert asked_of > 500
    assert not errors


# --------------------------------------------------------------------------- streams

_deltas = st.builds(
    lambda text: json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
    | st.sampled_from(["[DONE]", '"usage"', "data: [DONE]"]),
)
_lines = st.one_of(
    _deltas.map(lambda data: f"data: {data}\n"),
    st.sampled_from([": ping\n", "event: message\n", "id: 7\n", "retry: 10\n", "data:\n"]),
)
events = st.lists(st.lists(_lines, min_size=1, max_size=3).map(lambda lines: "".join(lines) + "\n"), max_size=8)


@dataclass(frozen=True)
class Streamed:
    """What a worker sends: `body` in chunks cut at `at`, and how it ends."""

    body: bytes
    at: list[float]
    ended: bool
    finished: bool
    """The last event is there."""


@st.composite
def streams(draw: st.DrawFn) -> Streamed:
    finished = draw(st.booleans())
    body = "".join(draw(events)).encode() + (b"data: [DONE]\n\n" if finished else b"")
    return Streamed(body, draw(cuts), draw(st.booleans()), finished)


def test_a_stream_arrives_as_it_was_sent_or_ends_with_an_error(stage: Stage, errors: list[str]) -> None:
    rig = stage.rig
    worker = next(iter(rig.fleet.workers.values()))
    whole = 0

    async def send(stream: Streamed, asked_usage: bool) -> None:
        nonlocal whole

        def script(call: Call) -> None:
            call.begin_stream(*cut(stream.body, stream.at))
            if stream.ended:
                call.end_stream()
            else:
                call.close()

        rig.workers[0].script = script
        body: dict[str, Any] = {"model": "m", "stream": True, "prompt": "a"}
        if asked_usage:
            body["stream_options"] = {"include_usage": True}
        client = await rig.client()
        raw = json.dumps(body).encode()
        client.send(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\nconnection: close\r\n")
        client.send(b"content-length: %d\r\n\r\n%b" % (len(raw), raw))
        answer = await client.rest()
        client.abort()
        rig.clients.remove(client)
        rig.outcomes.clear()
        rig.workers[0].calls.clear()
        worker.health.reset(rig.edge.clock())
        reader = StrictReader()
        with_upgrade = False
        try:
            reader.parser.feed_data(answer)
        except httptools.HttpParserUpgrade:
            with_upgrade = True
        assert not with_upgrade
        assert reader.complete, "its framing is whole, whatever the worker did"
        if reader.parser.get_status_code() == 502:
            assert not stream.body  # nothing had come: it could have been tried elsewhere
        elif stream.finished and stream.ended:
            assert reader.body == stream.body
            whole += 1
        else:
            assert reader.body.startswith(stream.body)
            told = reader.body[len(stream.body) :]
            assert b'"error"' in told
            assert b"[DONE]" not in told

    @settings(bounded, max_examples=700)
    @given(streams(), st.booleans())
    @example(Streamed(b"data: [DONE]\n\n", [], True, True), False)
    def run(stream: Streamed, asked_usage: bool) -> None:
        stage.runner.run(send(stream, asked_usage))

    run()
    assert whole > 100
    assert not errors
