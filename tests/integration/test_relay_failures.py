"""Workers that fail in every phase, and clients that send what they should not."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gateway.edge import EdgeLimits, PhaseTimeouts
from gateway.edge.relay import Relay
from gateway.leases import Lease, Ledger
from gateway.pool import FleetSettings
from gateway.records import Endpoint, Result, WorkerSpec
from gateway.upstream.connections import Timeouts
from gateway.upstream.http import Upstream, UpstreamStream
from tests.integration.relay_rig import (
    Call,
    RelayRig,
    Script,
    answers,
    ask,
    both_loops,
    break_opening,
    post,
    relay,
    silent,
    streams,
    until,
)

OK = b'{"id":"1","choices":[]}'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def error_of(body: bytes) -> dict[str, object]:
    """The error object in OpenAI's shape."""
    error: dict[str, object] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "code", "param"}
    return error


def drop(call: Call) -> None:
    """A script: reset before any byte."""
    call.abort()


def half_a_head(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\ncontent-")
    call.close()


def no_http(call: Call) -> None:
    call.send(b"220 mail.example ESMTP\r\n\r\n")


# --------------------------------------------------------------------------- before the first byte


@both_loops
@pytest.mark.parametrize("failing", [None, drop, half_a_head, no_http], ids=["refused", "drop", "half", "no_http"])
async def test_another_worker_is_tried(failing: object) -> None:
    async with relay(failing, answers(OK)) as r:  # type: ignore[arg-type]
        answer = await r.ask(post(ask()))
        assert (answer.status, answer.body) == (200, OK)
        assert (answer.headers["x-kvgate-worker"], answer.headers["x-kvgate-retries"]) == ("w2", "1")
        assert [(o.worker, o.result, o.retries) for o in r.retried] == [("w1", Result.WORKER_FAILED, 0)]
        assert [(o.worker, o.result, o.retries) for o in r.outcomes] == [("w2", Result.COMPLETED, 1)]
        await until(r.quiet)


@both_loops
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_a_worker_that_says_it_cannot_is_left_for_another(status: int) -> None:
    bad = b'{"error":"busy"}'
    async with relay(answers(bad, status=f"{status} Busy"), answers(OK)) as r:
        assert (await r.ask(post(ask()))).body == OK
        assert [(o.worker, o.status) for o in r.retried] == [("w1", status)]
        await until(r.quiet)


@both_loops
@pytest.mark.parametrize("status", [429, 503])
async def test_with_nobody_else_its_answer_passes_unchanged(status: int) -> None:
    bad = b'{"error":"busy"}'
    async with relay(answers(bad, status=f"{status} Busy")) as r:
        answer = await r.ask(post(ask(stream=True)))
        assert (answer.status, answer.body) == (status, bad)
        assert ("retry-after" in answer.headers) == (status == 429)
        result = Result.WORKER_FAILED if status == 503 else Result.COMPLETED
        assert [(o.status, o.result, o.retries) for o in r.outcomes] == [(status, result, 0)]
        assert len(r.workers[0].calls) == 1


@both_loops
async def test_retries_are_bounded_and_no_worker_is_tried_twice() -> None:
    async with relay(drop, drop, drop, drop, answers(OK), limits=EdgeLimits(max_retries=2)) as r:
        answer = await r.ask(post(ask(), headers=("x-request-id: r1",)))
        assert (answer.status, error_of(answer.body)["code"]) == (502, "worker_broken")
        assert answer.headers["x-request-id"] == "r1"
        assert answer.headers["x-kvgate-retries"] == "2"
        assert [len(worker.calls) for worker in r.workers] == [1, 1, 1, 0, 0]
        assert [o.retries for o in (*r.retried, *r.outcomes)] == [0, 1, 2]
        await until(r.quiet)


@both_loops
async def test_all_workers_away() -> None:
    async with relay(None, None) as r:
        answer = await r.ask(post(ask()))
        assert (answer.status, error_of(answer.body)["code"]) == (502, "worker_unreachable")
        assert b"127.0.0.1" not in answer.body
        await until(r.quiet)


@both_loops
async def test_a_worker_that_never_answers_gives_504_or_another() -> None:
    timeouts = Timeouts(first_byte_s=0.1)
    async with relay(silent, answers(OK), timeouts=timeouts) as r:
        assert (await r.ask(post(ask()))).body == OK
        await r.workers[0].calls[0].gone.wait()
        assert r.retried[0].result is Result.TIMED_OUT
    async with relay(silent, timeouts=timeouts) as r:
        answer = await r.ask(post(ask()))
        assert (answer.status, error_of(answer.body)["code"]) == (504, "worker_timeout")
        await until(r.quiet)


@both_loops
async def test_a_worker_that_does_not_accept() -> None:
    """A listening socket whose backlog is full: connecting hangs."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with relay(None, answers(OK), timeouts=Timeouts(connect_s=0.1)) as r:
            r.workers[0].port = full.getsockname()[1]
            worker = next(iter(r.fleet.workers.values()))
            worker.spec = type(worker.spec)(name=worker.spec.name, url=f"http://127.0.0.1:{r.workers[0].port}")
            assert (await r.ask(post(ask()))).body == OK
            assert [o.error_code for o in r.retried] == ["connect_timeout"]
            await until(r.quiet)
        for filler in fillers:
            filler.close()


def head_only(call: Call) -> None:
    """Engines send the head of a stream before they compute anything."""
    call.begin_stream()


def head_and_gone(call: Call) -> None:
    call.begin_stream()
    call.close()


def head_and_rubbish(call: Call) -> None:
    call.begin_stream()
    call.send(b"what?\r\n")


def empty(call: Call) -> None:
    call.begin_stream()
    call.end_stream()


def empty_to_the_end(call: Call) -> None:
    call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    call.close()


@both_loops
@pytest.mark.parametrize("failing", [head_only, head_and_gone, head_and_rubbish, empty, empty_to_the_end])
async def test_a_stream_that_never_begins_is_served_elsewhere(failing: Script) -> None:
    """A head alone is no first byte: the client has seen nothing, so another worker can do it all."""
    async with relay(failing, answers(OK), timeouts=Timeouts(first_byte_s=0.3)) as r:
        answer = await r.ask(post(ask(stream=True)))
        assert (answer.status, answer.body, answer.headers["x-kvgate-worker"]) == (200, OK, "w2")
        assert [o.error_code for o in r.retried] == ["worker_timeout" if failing is head_only else "worker_broken"]
        await until(r.quiet)


@both_loops
async def test_a_request_that_is_not_taken_goes_elsewhere() -> None:
    """A worker whose kernel accepts and which never reads: a long body gets stuck on the way."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        async with relay(None, answers(OK), timeouts=Timeouts(send_s=2, first_byte_s=60)) as r:
            r.workers[0].port = deaf.getsockname()[1]
            worker = next(iter(r.fleet.workers.values()))
            worker.spec = type(worker.spec)(name=worker.spec.name, url=f"http://127.0.0.1:{r.workers[0].port}")
            long = ask(more=b',"pad":"' + b"p" * 8_000_000 + b'"')
            assert (await r.ask(post(long))).body == OK
            assert [(o.error_code, o.result) for o in r.retried] == [("send_timeout", Result.TIMED_OUT)]
            await until(r.quiet)


@both_loops
async def test_a_long_request_that_is_taken_has_its_time_to_first_byte() -> None:
    def later(call: Call) -> None:
        asyncio.get_running_loop().call_later(2.5, call.plain, OK)

    async with relay(later, timeouts=Timeouts(send_s=2, first_byte_s=60)) as r:
        long = ask(more=b',"pad":"' + b"p" * 8_000_000 + b'"')
        assert (await r.ask(post(long))).body == OK


@both_loops
async def test_a_client_may_shorten_the_whole() -> None:
    """Its limit ends the request without a second try, and says nothing of the worker."""
    async with relay(silent, silent) as r:
        answer = await r.ask(post(ask(stream=True), headers=("x-request-timeout-s: 0.2",)))
        assert (answer.status, error_of(answer.body)["code"]) == (504, "deadline_exceeded")
        assert sum(len(worker.calls) for worker in r.workers) == 1
        assert [(o.result, o.retries) for o in r.outcomes] == [(Result.TIMED_OUT, 0)]
        assert {worker.health.failures for worker in r.fleet.workers.values()} == {0}
        await until(r.quiet)
    async with relay(silent, timeouts=Timeouts(total_s=0.2)) as r:
        answer = await r.ask(post(ask(), headers=("x-request-timeout-s: 600",)))
        assert error_of(answer.body)["code"] == "deadline_exceeded"  # shorten, not lengthen


@both_loops
@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", "1e999", ""])
async def test_a_limit_that_is_no_number_is_refused(value: str) -> None:
    async with relay(answers(OK)) as r:
        answer = await r.ask(post(ask(), headers=(f"x-request-timeout-s: {value}",)))
        assert (answer.status, error_of(answer.body)["code"]) == (400, "bad_request")
        assert not r.workers[0].calls


@both_loops
async def test_a_failure_when_the_time_is_over_is_not_tried_elsewhere() -> None:
    def late(call: Call) -> None:
        asyncio.get_running_loop().call_later(0.25, call.abort)

    async with relay(late, answers(OK), timeouts=Timeouts(total_s=60)) as r:
        assert (await r.ask(post(ask(), headers=("x-request-timeout-s: 30",)))).body == OK
        assert [o.error_code for o in r.retried] == ["worker_broken"]


@both_loops
async def test_limits_by_path_and_model() -> None:
    quick = {"first_byte_s": 0.1}
    async with relay(silent, silent, answers(OK)) as r:
        timeouts = PhaseTimeouts(r.upstream.timeouts, paths={Endpoint.SCORE: quick}, models={"m": {}})
        r.edge.apply(replace(r.edge.settings, timeouts=timeouts))
        assert (await r.ask(post(ask(), path="/v1/score"))).body == OK
        assert [o.error_code for o in r.retried] == ["worker_timeout"] * 2
    async with relay(silent, answers(OK)) as r:
        timeouts = PhaseTimeouts(r.upstream.timeouts, models={"m": quick})
        r.edge.apply(replace(r.edge.settings, timeouts=timeouts))
        assert (await r.ask(post(ask()))).body == OK


# --------------------------------------------------------------------------- after the first byte


async def broken_stream(r: RelayRig, raw: bytes, then: object) -> tuple[list[bytes], bytes]:
    """(chunks, what follows the last chunk) of a stream whose worker does `then` after two events."""
    client = await r.client()
    client.send(raw)
    call = await r.workers[0].call()
    call.begin_stream(TOKEN, TOKEN)
    then(call)  # type: ignore[operator]
    assert (await client.head())[0] == 200
    chunks = []
    while chunk := await client.chunk():
        chunks.append(chunk)
    return chunks, await client.rest()


@both_loops
@pytest.mark.parametrize("asks", [True, False], ids=["usage_asked", "usage_hidden"])
@pytest.mark.parametrize("then", ["close", "reset", "half_event", "no_http", "stall"])
async def test_a_stream_that_breaks_ends_with_one_error_event(then: str, asks: bool) -> None:
    def act(call: Call) -> None:
        match then:
            case "close":
                call.close()
            case "reset":
                call.abort()
            case "half_event":
                call.send(b"40\r\ndata: {half")
                call.close()
            case "no_http":
                call.send(b"what?\r\n")

    more = b',"stream_options":{"include_usage":true}' if asks else b""
    async with relay(silent, answers(OK), timeouts=Timeouts(idle_s=0.2)) as r:
        chunks, rest = await broken_stream(r, post(ask(stream=True, more=more)), act)
        body = b"".join(chunks)
        assert rest == b""
        *events, error, end = body.split(b"\n\n")
        assert end == b""
        sent = [TOKEN.strip()] * 2
        assert events[:2] == sent[: len(events[:2])]
        assert error.startswith(b"data: ")
        code = "worker_timeout" if then == "stall" else "worker_broken"
        assert error_of(error[6:])["code"] == code
        assert b"[DONE]" not in body
        # What had come before a reset may be lost on the way to the gateway; nothing else is.
        assert then == "reset" or events[:2] == sent
        result = Result.TIMED_OUT if then == "stall" else Result.WORKER_FAILED
        assert [(o.result, o.status, o.error_code) for o in r.outcomes] == [(result, 200, code)]
        assert not r.workers[1].calls
        await until(r.quiet)


@both_loops
async def test_a_broken_anthropic_stream() -> None:
    body = b'{"model":"m","stream":true,"max_tokens":4,"messages":[{"role":"user","content":"hi"}]}'
    async with relay(silent) as r:
        chunks, _ = await broken_stream(r, post(body, path="/v1/messages"), lambda call: call.close())
        name, data = b"".join(chunks).split(b"\n\n")[-2].split(b"\n")
        assert name == b"event: error"
        assert json.loads(data[6:])["type"] == "error"


@both_loops
async def test_a_broken_stream_with_a_stated_length_is_cut() -> None:
    """An error event would fill it up and pass for the end of the answer."""

    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 70\r\n\r\n" + TOKEN)
        call.close()

    async with relay(script) as r:
        client = await r.client()
        client.send(post(ask(stream=True, more=b',"stream_options":{"include_usage":true}')))
        _, headers = await client.head()
        assert headers["content-length"] == "70"
        assert await client.rest() == TOKEN
        await until(r.quiet)


@both_loops
async def test_a_broken_plain_answer_is_cut() -> None:
    def short(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        call.close()

    def chunked(call: Call) -> None:
        call.begin_stream(b"{", content_type="application/json")
        call.close()

    async with relay(short, chunked) as r:
        for expected in (b"\r\n\r\n{", b"1\r\n{\r\n"):
            client = await r.client()
            client.send(post(ask()))
            raw = await client.rest()
            assert raw.endswith(expected)
        assert [o.result for o in r.outcomes] == [Result.WORKER_FAILED] * 2
        client = await r.client()
        client.send(post(ask(), version="1.0"))
        await client.reader.readuntil(b"\r\n\r\n")
        # Without a length only an error tells a 1.0 client; here there is one.
        await client.rest()
        await until(r.quiet)


@both_loops
async def test_a_stream_may_last_as_long_as_it_moves() -> None:
    async with relay(silent, timeouts=Timeouts(idle_s=0.4)) as r:
        client, call = await r.streaming(TOKEN)
        await client.head()
        assert await client.chunk() == TOKEN
        for _ in range(12):
            await asyncio.sleep(0.05)
            call.events(TOKEN)
            assert await client.chunk() == TOKEN
        call.events(DONE)
        call.end_stream()
        assert [await client.chunk(), await client.chunk()] == [DONE, b""]
        await client.close()


@both_loops
async def test_the_total_limit_ends_even_a_moving_stream() -> None:
    async with relay(silent, timeouts=Timeouts(total_s=0.3)) as r:
        client, call = await r.streaming(TOKEN)
        await client.head()
        while not call.gone.is_set():
            call.events(TOKEN)
            await asyncio.sleep(0.01)
        assert b"deadline_exceeded" in await client.rest()
        outcome = await r.outcome()
        assert (outcome.result, outcome.error_code) == (Result.TIMED_OUT, "deadline_exceeded")
        assert next(iter(r.fleet.workers.values())).health.failures == 0  # it did what it should


# --------------------------------------------------------------------------- clients at fault

REFUSED: Sequence[tuple[str, bytes, int, str]] = (
    ("no_http", b"NONSENSE\r\n\r\n", 400, "invalid_http"),
    (
        "length_and_chunked",
        b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
        "invalid_http",
    ),
    ("two_lengths", b"POST /v1/score HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\n", 400, "invalid_http"),
    ("bad_chunk", b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", 400, "invalid_http"),
    ("long_header", b"POST /v1/completions HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n", 431, "header_too_large"),
    ("endless_header", b"POST /v1/completions HTTP/1.1\r\nx: " + b"y" * 70_000, 431, "header_too_large"),
    ("many_headers", b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 40_000 + b"\r\n", 431, "header_too_large"),
    ("long_target", b"GET /" + b"y" * 66_000 + b" HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    ("no_host", b"POST http:///v1/completions HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", 400, "invalid_http"),
    ("no_such_port", b"GET http://x:99999/health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    *(
        (name, b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n" + rest, 400, "invalid_http")
        for name, rest in (
            ("space_before_colon", b"content-length : 2\r\n\r\n{}"),
            ("folded", b"transfer-encoding:\r\n chunked\r\n\r\n0\r\n\r\n"),
            ("plus_length", b"content-length: +2\r\n\r\n{}"),
            ("negative_length", b"content-length: -2\r\n\r\n{}"),
            ("hex_length", b"content-length: 0x2\r\n\r\n{}"),
            ("list_of_lengths", b"content-length: 2, 2\r\n\r\n{}"),
            ("same_length_twice", b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}"),
            ("huge_length", b"content-length: 99999999999999999999\r\n\r\n{}"),
            ("chunked_not_last", b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n"),
            ("chunked_twice", b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
            ("vertical_tab", b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n"),
            ("bare_cr", b"x: a\rcontent-length: 2\r\n\r\n"),
            ("bare_lf", b"content-length: 2\n\n{}"),
            ("nul", b"x: a\0b\r\ncontent-length: 2\r\n\r\n{}"),
            ("no_colon", b"garbage\r\ncontent-length: 2\r\n\r\n{}"),
            ("no_name", b": x\r\ncontent-length: 2\r\n\r\n{}"),
            ("chunk_ends_with_lf", b"transfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n"),
            ("chunk_size_and_space", b"transfer-encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\n\r\n"),
            ("chunk_size_0x", b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n"),
            ("chunk_size_too_long", b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n"),
            ("chunk_longer_than_said", b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n"),
            ("two_hosts", b"host: u\r\ncontent-length: 2\r\n\r\n{}"),
        )
    ),
    ("no_host_header", b"POST /v1/score HTTP/1.1\r\ncontent-length: 2\r\n\r\n{}", 400, "invalid_http"),
    ("chunked_1_0", b"POST /v1/score HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400, "invalid_http"),
    ("http_2_0", b"POST /v1/score HTTP/2.0\r\nhost: t\r\ncontent-length: 2\r\n\r\n{}", 400, "invalid_http"),
    ("gzip", b"POST /v1/score HTTP/1.1\r\nhost: t\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501,
     "unsupported_transfer_coding"),
    ("connect", b"CONNECT x:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "bad_request"),
)  # fmt: skip


@both_loops
@pytest.mark.parametrize(("raw", "status", "code"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
async def test_what_is_no_request_is_refused_and_the_connection_ends(raw: bytes, status: int, code: str) -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        client.send(raw)
        answer = await client.answer()
        assert (answer.status, error_of(answer.body)["code"]) == (status, code)
        assert answer.headers["connection"] == "close"
        assert "x-request-id" in answer.headers
        assert await client.rest() == b""
        assert not r.workers[0].calls
        await until(r.quiet)


@both_loops
async def test_bad_bodies_are_refused_and_the_connection_lives() -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        hi = b'"messages":[{"role":"user","content":"x"}]'
        bodies = (
            (b"", 400, "invalid_json"),
            (b"{", 400, "invalid_json"),
            (b'{"messages":[]}', 400, "bad_request"),
            (b"[" * 100_000, 400, "invalid_json"),
            (b'{"model":"\xff"}', 400, "invalid_json"),
            (b'["model"]', 400, "invalid_json"),
            (b'{"model":"m","messages":[]}', 400, "bad_request"),
            (b'{"model":"m","messages":"hi"}', 400, "bad_request"),
            (b'{"model":7,%b}' % hi, 400, "bad_request"),
            (b'{"model":"m","stream":"yes",%b}' % hi, 400, "bad_request"),
            (b'{"model":"m","max_tokens":-1,%b}' % hi, 400, "bad_request"),
            (b'{"model":"nope",%b}' % hi, 404, "model_not_found"),
        )
        for body, status, code in bodies:
            client.send(post(body))
            answer = await client.answer()
            assert (answer.status, error_of(answer.body)["code"]) == (status, code)
        client.send(post(b'{"model":"m","prompt":""}', path="/v1/completions"))
        assert (await client.answer()).status == 400
        odd = b'{"model":"m","temperature":NaN,%b}' % hi  # the worker's to judge
        for body in (ask(), odd):
            client.send(post(body))
            assert (await client.answer()).body == OK
        assert r.workers[0].calls[1].body == odd
        refused = [Result.REFUSED] * (len(bodies) + 1)
        assert [o.result for o in r.outcomes] == [*refused, Result.COMPLETED, Result.COMPLETED]
        assert not await_calls(r, 2)
        await client.close()


def await_calls(r: RelayRig, expected: int) -> bool:
    """True when the worker saw another number of requests."""
    return len(r.workers[0].calls) != expected


@both_loops
@pytest.mark.parametrize("piece", [b"x-a: b\r\n" * 1_000, b"y" * 8_000], ids=["many", "one"])
async def test_endless_trailers_are_refused(piece: bytes) -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
        )
        for _ in range(20):
            await asyncio.sleep(0.005)
            client.send(piece)
        answer = await client.answer()
        assert (answer.status, error_of(answer.body)["code"]) == (431, "header_too_large")
        await until(r.quiet)


@both_loops
async def test_a_body_in_very_small_chunks_is_no_endless_trailer() -> None:
    body = ask(more=b',"pad":"' + b"p" * 12_000 + b'"')
    async with relay(answers(OK), limits=EdgeLimits(max_header_bytes=1024)) as r:
        client = await r.client()
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n")
        for at in range(len(body)):
            client.send(b"1\r\n%c\r\n" % body[at])
            if at % 500 == 0:
                await asyncio.sleep(0.002)
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).body == OK
        assert r.workers[0].calls[0].body == body


@both_loops
async def test_an_anthropic_refusal() -> None:
    async with relay(answers(OK)) as r:
        body = json.loads((await r.ask(post(b"{}", path="/v1/messages"))).body)
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"


@both_loops
async def test_a_body_above_the_limit_is_refused_before_it_is_read() -> None:
    async with relay(answers(OK), limits=EdgeLimits(max_body_bytes=1_000_000)) as r:
        client = await r.client()
        raw = post(b"x" * 20_000_000)
        client.send(raw[:200])
        answer = await client.answer()
        assert (answer.status, error_of(answer.body)["code"]) == (413, "payload_too_large")
        await client.close()


@both_loops
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_that_sends_20_mb_all_the_same_sees_why(chunked: bool) -> None:
    async with relay(answers(OK), limits=EdgeLimits(max_body_bytes=1_000_000)) as r:
        client = await r.client()
        if chunked:
            client.send(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n")
            for _ in range(20):
                client.send(b"f4240\r\n" + b"x" * 1_000_000 + b"\r\n")
        else:
            client.send(post(b"x" * 20_000_000))
        assert (await client.answer()).status == 413
        await client.rest()
        await until(r.quiet)
        assert [(o.status, o.result) for o in r.outcomes] == [(413, Result.REFUSED)]
        await client.close()


@both_loops
async def test_slow_clients() -> None:
    """Nothing at all, half a head, half a body, nothing after an answer."""
    limits = EdgeLimits(header_timeout_s=0.1, body_timeout_s=0.1)
    async with relay(answers(OK), limits=limits, keep_alive_s=1) as r:
        client = await r.client()
        assert await client.rest() == b""
        client = await r.client()
        client.send(b"POST /v1/completions HTTP/1.1\r\n")
        answer = await client.answer()
        assert (answer.status, error_of(answer.body)["code"]) == (408, "request_timeout")
        assert await client.rest() == b""
        client = await r.client()
        client.send(post(ask())[:-5])
        answer = await client.answer()
        assert (answer.status, error_of(answer.body)["code"]) == (408, "request_timeout")
        assert await client.rest() == b""
        client = await r.client()
        client.send(post(ask()))
        assert (await client.answer()).status == 200
        assert await client.rest() == b""
        await until(r.quiet)


@both_loops
async def test_too_many_at_once() -> None:
    async with relay(silent, limits=EdgeLimits(max_exchanges=1)) as r:
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[0].call()
        refused = await r.ask(post(ask()))
        assert (refused.status, error_of(refused.body)["code"]) == (503, "overloaded")
        call.plain(OK)
        assert (await client.answer()).body == OK
        await client.close()


@both_loops
async def test_bodies_in_memory_are_bounded_all_together() -> None:
    """What is held counts until the head of its answer; one more body is refused, and later ones are served."""
    async with relay(silent, limits=EdgeLimits(max_buffered_bytes=100_000)) as r:
        pad = b',"x":"%b"' % (b"y" * 60_000)
        first = await r.client()
        first.send(post(ask(more=pad)))
        call = await r.workers[0].call()
        for chunked in (False, True):
            body = ask(more=pad)
            if chunked:
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
                raw = head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
            else:
                raw = post(body)
            refused = await r.ask(raw)
            assert (refused.status, error_of(refused.body)["code"]) == (503, "overloaded")
            assert refused.headers["retry-after"] == "1"
        assert r.edge.buffered_bytes == len(ask(more=pad))
        assert r.edge.turned_away == 2
        call.begin_stream(TOKEN)
        await until(lambda: r.edge.buffered_bytes == 0)
        call.end_stream()
        assert (await first.answer()).status == 200
        r.workers[0].script = answers(OK)
        assert (await r.ask(post(ask(more=pad)))).status == 200
        await until(r.quiet)
        assert r.edge.buffered_bytes == 0


@both_loops
async def test_bodies_of_clients_that_leave_are_let_go() -> None:
    async with relay(silent) as r:
        for raw in (post(ask()), post(ask())[:-5]):
            client = await r.client()
            client.send(raw)
            await until(lambda: r.edge.buffered_bytes > 0)
            client.abort()
            await until(lambda: r.edge.buffered_bytes == 0)
        await until(r.quiet)


@both_loops
async def test_one_connection_too_many_is_told_and_a_flood_is_cut() -> None:
    async with relay(answers(OK), limits=EdgeLimits(max_connections=10)) as r:
        held = [await r.client() for _ in range(10)]
        for client in held:
            client.send(post(ask()))
            assert (await client.answer()).status == 200
        late = await r.client()
        answer = await late.answer()
        assert (answer.status, error_of(answer.body)["code"]) == (503, "overloaded")
        assert await late.rest() == b""
        flood = [await r.client() for _ in range(30)]
        told = [await client.rest() for client in flood]
        assert b"" in told
        for client in held:
            client.send(post(ask()))
            assert (await client.answer()).status == 200, "who is in stays in"
            client.abort()
        await until(lambda: r.edge.connections == 0)
        assert r.edge.turned_away == 31
        assert (await r.ask(post(ask()))).status == 200


@both_loops
async def test_a_plain_answer_that_breaks_with_its_head_is_a_502() -> None:
    """Head and end in one read: nothing of it has gone out, so the client is told."""

    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n")

    async with relay(script) as r:
        answer = await r.ask(post(ask()))
        assert (answer.status, error_of(answer.body)["code"]) == (502, "worker_broken")
        assert [(o.status, o.result) for o in r.outcomes] == [(502, Result.WORKER_FAILED)]
        await until(r.quiet)


@both_loops
@pytest.mark.parametrize(("sent", "got"), [("304 Not Modified", 304), ("204 No Content", 502)])
async def test_an_event_stream_that_has_no_body_gets_none(sent: str, got: int) -> None:
    """204 is a success, and a successful stream has events."""

    def script(call: Call) -> None:
        call.send(f"HTTP/1.1 {sent}\r\ncontent-type: text/event-stream\r\n\r\n".encode())

    async with relay(script) as r:
        client = await r.client()
        client.send(post(ask(stream=True), headers=("connection: close",)))
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 %d " % got)
        assert (body == b"") == (got == 304)
        await until(r.quiet)


@pytest.mark.source_only
@both_loops
@pytest.mark.parametrize("how", ["at once", "body later", "stream"])
async def test_a_bug_in_what_follows_from_the_first_byte_costs_no_answer_and_no_lease(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bytes are with the client by then; nobody but the end of the answer could settle it."""

    def broken(*_: object) -> bool:
        raise RuntimeError("seeded bug")

    monkeypatch.setattr(Ledger, "prefilled", broken)
    async with relay(silent) as r:
        client = await r.client()
        client.send(post(ask(stream=how == "stream")))
        call = await r.workers[0].call()
        if how == "at once":
            call.plain(OK)
        elif how == "body later":
            call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(OK))
            await client.head()
            call.send(OK)
        else:
            call.begin_stream(TOKEN, DONE)
            call.end_stream()
        outcome = await r.outcome()
        assert (outcome.status, outcome.result) == (200, Result.COMPLETED)
        await until(r.quiet)
    assert "seeded bug" in caplog.text


@pytest.mark.source_only
@both_loops
async def test_a_bug_in_beginning_a_request_that_has_waited_ends_it_and_costs_no_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else would: it is not in the line any more, and its task waits to be told."""
    async with relay(silent) as r:
        r.fleet.apply(FleetSettings(max_inflight=1))
        first, second, third = [await r.client() for _ in range(3)]
        first.send(post(ask()))
        call = await r.workers[0].call()
        for number, client in enumerate((second, third), start=1):
            client.send(post(ask()))
            await until(lambda number=number: r.edge.turns.admission.held == number)  # type: ignore[misc]
        opened = Upstream.open

        def broken(self: Upstream, worker: WorkerSpec) -> UpstreamStream:
            monkeypatch.setattr(Upstream, "open", opened)
            raise RuntimeError("seeded bug")

        monkeypatch.setattr(Upstream, "open", broken)
        call.plain(OK)
        assert (await second.answer()).status == 500
        (await r.workers[0].call(1)).plain(OK)
        assert (await third.answer()).status == 200, "the line goes on"
        await until(r.quiet)
    assert "seeded bug" in caplog.text


@pytest.mark.source_only
@both_loops
async def test_a_bug_in_beginning_the_next_attempt_costs_neither_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    break_opening(monkeypatch, "w2")
    async with relay(drop, silent) as r:
        assert (await r.ask(post(ask()))).status == 500
        await until(r.quiet)
    assert "seeded bug" in caplog.text


@pytest.mark.source_only
@both_loops
async def test_a_bug_in_ending_an_attempt_costs_the_next_one_no_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Lease._make_outcome

    def broken(*_: object) -> None:
        monkeypatch.setattr(Lease, "_make_outcome", made)
        raise RuntimeError("seeded bug")

    monkeypatch.setattr(Lease, "_make_outcome", broken)
    async with relay(drop, silent) as r:
        assert (await r.ask(post(ask()))).status == 500
        await until(r.quiet)
    assert "seeded bug" in caplog.text


DEEP = b"[" * 3000 + b"]" * 3000


@both_loops
@pytest.mark.parametrize(
    ("path", "stream", "body"),
    [
        (Endpoint.CHAT, False, b'{"choices":[],"zz":%b,"usage":{"prompt_tokens":3}}' % DEEP),
        (Endpoint.CHAT, False, b"[%b]" % DEEP),
        (Endpoint.CHAT, True, b'data: {"choices":[],"usage":{"prompt_tokens":3},"zz":%b}\n\n%b' % (DEEP, DONE)),
        (Endpoint.MESSAGES, True, b'data: {"type":"message_stop","usage":{},"error":null,"zz":%b}\n\n' % DEEP),
        (Endpoint.RESPONSES, True, b'data: {"type":"response.completed","response":%b,"usage":{}}\n\n' % DEEP),
    ],
)
async def test_an_answer_that_is_nested_without_end_is_passed_on_and_costs_no_lease(
    path: Endpoint, stream: bool, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is read for its usage and for whether its last event came; neither disturbs it."""
    async with relay(streams(TOKEN, body) if stream else answers(body)) as r:
        answer = await r.ask(post(ask(stream=stream), path=path.value))
        assert answer.status == 200
        assert body in answer.body
        assert (await r.outcome()).result is Result.COMPLETED
        await until(r.quiet)
    assert "bug" not in caplog.text


@pytest.mark.source_only
@both_loops
async def test_a_bug_in_reading_the_usage_costs_no_lease(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Relay) -> None:
        raise RuntimeError("seeded bug")

    monkeypatch.setattr(Relay, "usage", broken)
    async with relay(answers(OK)) as r:
        assert (await r.ask(post(ask()))).body == OK
        outcome = await r.outcome()
        assert (outcome.result, outcome.status) == (Result.COMPLETED, 200)
        await until(r.quiet)
    assert "seeded bug" in caplog.text
