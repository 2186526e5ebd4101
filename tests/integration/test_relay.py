"""What reaches the worker and what reaches the client, byte for byte."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.edge import EdgeLimits
from gateway.records import PrefixMode, Result
from gateway.upstream.connections import Timeouts
from tests.integration.relay_rig import (
    CHAT,
    Call,
    answers,
    ask,
    both_loops,
    post,
    relay,
    silent,
    streams,
    until,
)

OK = b'{"id":"1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":null}}'
TOKEN = 'data: {"choices":[{"index":0,"delta":{"content":"größer 漢"}}]}\n\n'.encode()
USAGE = (
    b'data: {"id":"x","choices": [],"usage":{"prompt_tokens":9,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


# --------------------------------------------------------------------------- towards the worker


@both_loops
async def test_the_body_reaches_the_worker_byte_for_byte() -> None:
    body = (
        b' {"zz":1,\t"model":"m","model":"m","big":123456789012345678901234567890,"messages":[{"content":"\xc3\xa4 '
        b'\\"stream\\":true","role":"user"}],"x":1e400,"unknown":{"b":1,"a":[]}}\n'
    )
    async with relay(answers(OK)) as r:
        answer = await r.ask(post(body))
        assert (answer.status, answer.body) == (200, OK)
        assert r.workers[0].calls[0].body == body


@both_loops
async def test_a_chunked_upload_is_sent_on_with_its_length() -> None:
    body = ask()
    pieces = [body[:1], body[1:20], body[20:]]
    chunked = b"".join(b"%x;ext=1\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\nauthorization: trailer\r\n\r\n"
    async with relay(answers(OK)) as r:
        answer = await r.ask(
            f"POST {CHAT} HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n".encode() + chunked
        )
        assert answer.status == 200
        call = r.workers[0].calls[0]
        assert call.body == body
        assert call.headers["content-length"] == str(len(body))
        assert "transfer-encoding" not in call.headers
        assert "authorization" not in call.headers


@both_loops
async def test_a_body_in_another_coding_is_refused() -> None:
    async with relay(answers(OK)) as r:
        for coding in (b"gzip, chunked", b"gzip"):
            client = await r.client()
            client.send(b"POST %b HTTP/1.1\r\nhost: t\r\ntransfer-encoding: %b\r\n\r\n" % (CHAT.encode(), coding))
            answer = await client.answer()
            assert answer.status in (400, 501)
            assert b"error" in answer.body
        assert r.workers[0].calls == []


@both_loops
async def test_large_bodies_pass_unchanged() -> None:
    """Above the inline limit: parsed in a thread, written without a copy; sent by the client in two parts."""
    body = ask(more=b',"pad":"%b"' % (b"p" * 16_000_000))
    raw = post(body)
    async with relay(answers(OK)) as r:
        client = await r.client()
        client.send(raw[:3_000_000])
        await asyncio.sleep(0)
        client.send(raw[3_000_000:])
        assert (await client.answer()).status == 200
        assert r.workers[0].calls[0].body == body
        await client.close()


@both_loops
async def test_headers_towards_the_worker() -> None:
    sent = (
        "authorization: Bearer client",
        "accept-encoding: gzip",
        "connection: keep-alive, x-mine",
        "x-mine: hop",
        "keep-alive: 5",
        "te: trailers",
        "proxy-authorization: x",
        "x-kvgate-worker: forged",
        "x-session-id: s1",
        "x-request-id: req-42",
        "User-Agent: t/1",
        "x-custom: a,  b",
    )
    async with relay(answers(OK)) as r:
        await r.ask(post(ask(), headers=sent, path=CHAT + "?beta=1"))
        call = r.workers[0].calls[0]
        assert call.head.startswith(b"POST " + CHAT.encode() + b"?beta=1 HTTP/1.1\r\n")
        assert call.headers == {
            "host": f"127.0.0.1:{r.workers[0].port}",
            "x-request-id": "req-42",
            "authorization": "Bearer client",
            "x-session-id": "s1",
            "user-agent": "t/1",
            "x-custom": "a,  b",
            "content-length": str(len(ask())),
        }


@both_loops
async def test_usage_is_asked_for_and_nothing_else_changes() -> None:
    body = ask(stream=True, more=b', "stream_options" : {"continuous_usage_stats":false}')
    async with relay(streams(TOKEN, USAGE, DONE)) as r:
        answer = await r.ask(post(body))
        assert answer.body == TOKEN + DONE
        seen = r.workers[0].calls[0].body
        assert seen.startswith(body[:-1])
        assert json.loads(seen)["stream_options"] == {"continuous_usage_stats": False, "include_usage": True}
        assert (await r.outcome()).delivered_tokens == 4


# --------------------------------------------------------------------------- towards the client


@both_loops
async def test_the_answer_reaches_the_client_byte_for_byte() -> None:
    body = b'{ "b":1, "a":1, "a":2, "n":123456789012345678901234567890 }\n\n'
    headers = (
        "X-Odd-Case:  v ",
        "Set-Cookie: a=1",
        "Set-Cookie: b=2",
        "connection: x-hop",
        "x-hop: 1",
        "x-kvgate-x: 1",
    )
    async with relay(answers(body, headers=headers)) as r:
        client = await r.client()
        client.send(post(ask()))
        raw = await client.reader.readuntil(b"\r\n\r\n")
        assert raw.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"X-Odd-Case: v" in raw
        assert raw.count(b"Set-Cookie: ") == 2
        assert b"x-hop" not in raw
        assert b"x-kvgate-x" not in raw
        assert await client.reader.readexactly(len(body)) == body
        await client.close()


@both_loops
async def test_receipts() -> None:
    async with relay(answers(OK), answers(OK)) as r:
        first = await r.ask(post(ask(), headers=("x-request-id: mine",)))
        second = await r.ask(post(ask()))
        assert first.headers["x-request-id"] == "mine"
        assert {first.headers["x-kvgate-worker"], second.headers["x-kvgate-worker"]} == {"w1", "w2"}
        assert first.headers["x-kvgate-predicted-tokens"] == first.headers["x-kvgate-retries"] == "0"
        assert len(second.headers["x-request-id"]) == 24
    async with relay(answers(OK, headers=("x-request-id: theirs",)), receipts=False) as r:
        answer = await r.ask(post(ask()))
        assert answer.headers["x-request-id"] == "theirs"
        assert not [name for name in answer.headers if name.startswith("x-kvgate")]
        assert "x-request-id" in (await r.ask(post(b"{"))).headers


@both_loops
async def test_events_come_one_by_one() -> None:
    """Each chunk is with the client before the worker sends the next."""
    async with relay(silent) as r:
        client, call = await r.streaming()
        for number in range(5):
            event = b'data: {"n":%d}\n\n' % number
            call.events(event)
            if not number:
                assert (await client.head())[0] == 200
            assert await client.chunk() == event
        call.events(DONE)
        assert await client.chunk() == DONE
        call.end_stream()
        assert await client.chunk() == b""
        outcome = await r.outcome()
        assert (outcome.result, outcome.chunks, outcome.status) == (Result.COMPLETED, 6, 200)
        assert outcome.ttft_s is not None
        await client.close()


@both_loops
async def test_an_event_split_inside_a_character_over_segments() -> None:
    async with relay(silent) as r:
        client, call = await r.streaming()
        chunk = b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
        for at in range(len(chunk)):
            call.send(chunk[at : at + 1])
            await asyncio.sleep(0.001)
        call.events(USAGE + DONE)
        call.end_stream()
        assert (await client.answer()).body == TOKEN + DONE
        await client.close()


@both_loops
async def test_done_inside_text_and_malformed_lines_pass() -> None:
    odd = (b'data: {"choices":[{"delta":{"content":"data: [DONE]\\n\\n"}}]}\n\n', b"data: {broken\n\n", b": ping\n\n")
    async with relay(streams(*odd, DONE)) as r:
        assert (await r.ask(post(ask(stream=True)))).body == b"".join(odd) + DONE
        assert (await r.outcome()).result is Result.COMPLETED


@pytest.mark.parametrize("status", ["400 Bad Request", "404 Not Found", "422 Unprocessable Entity", "401 Unauthorized"])
@both_loops
async def test_a_refusal_to_a_stream_passes_byte_for_byte(status: str) -> None:
    body = b'{"object":"error","message":"no","code":400}'
    async with relay(answers(body, status=status), answers(OK)) as r:
        answer = await r.ask(post(ask(stream=True)))
        assert (answer.status, answer.body) == (int(status[:3]), body)
        assert answer.headers["content-type"] == "application/json"
        outcome = await r.outcome()
        assert (outcome.result, outcome.status, outcome.ttft_s) == (Result.COMPLETED, int(status[:3]), None)
        assert not r.workers[1].calls


@both_loops
async def test_usage_of_a_plain_answer() -> None:
    async with relay(answers(OK)) as r:
        await r.ask(post(ask()))
        outcome = await r.outcome()
        assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.delivered_tokens) == (7, 2, None)
        assert (outcome.worker, outcome.mode) == ("w1", PrefixMode.NONE)
        assert all(seconds >= 0 for seconds in outcome.stages)


@both_loops
async def test_an_answer_that_ends_with_its_connection() -> None:
    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + OK[:20])
        call.send(OK[20:])
        call.close()

    async with relay(script) as r:
        for _ in range(2):
            assert (await r.ask(post(ask()))).body == OK
        assert r.workers[0].accepted == 2


@both_loops
async def test_an_answer_without_a_body() -> None:
    async with relay(lambda call: call.send(b"HTTP/1.1 204 No Content\r\n\r\n")) as r:
        client = await r.client()
        for _ in range(2):
            client.send(post(ask()))
            status, headers = await client.head()
            assert status == 204
            assert "transfer-encoding" not in headers
        assert r.workers[0].accepted == 1
        await client.close()


@both_loops
async def test_interim_answers_stay_here() -> None:
    def script(call: Call) -> None:
        call.send(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        call.plain(OK)

    async with relay(script) as r:
        answer = await r.ask(post(ask()))
        assert (answer.status, answer.body) == (200, OK)
        assert "link" not in answer.headers


@both_loops
async def test_rubbish_behind_an_answer_ends_the_connection_only() -> None:
    async with relay(lambda call: call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}rubbish")) as r:
        for _ in range(2):
            answer = await r.ask(post(ask()))
            assert (answer.status, answer.body) == (200, b"{}")
        assert r.workers[0].accepted == 2


@both_loops
async def test_a_second_answer_nobody_asked_for_is_not_passed_on() -> None:
    forged = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged"
    async with relay(lambda call: call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}" + forged)) as r:
        client = await r.client()
        for _ in range(3):
            client.send(post(ask()))
            assert (await client.answer()).body == b"{}"
        assert r.workers[0].accepted == 3
        await client.close()


@both_loops
async def test_trailers_are_no_headers_of_the_next_answer() -> None:
    trailers = b"set-cookie: sid=1\r\nx-leak: secret\r\n"

    def script(call: Call) -> None:
        call.begin_stream(TOKEN, DONE)
        call.send(b"0\r\n" + trailers + b"\r\n")

    async with relay(script) as r:
        for _ in range(2):
            answer = await r.ask(post(ask(stream=True)))
            assert answer.body == TOKEN + DONE
            assert not {"set-cookie", "x-leak"} & set(answer.headers)
        assert r.workers[0].accepted == 1


# --------------------------------------------------------------------------- connections


@both_loops
async def test_connections_are_kept_on_both_sides() -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        for _ in range(5):
            client.send(post(ask()))
            assert (await client.answer()).status == 200
        assert r.workers[0].accepted == 1
        assert r.upstream.idle_connections(r.fleet.workers["w1"].id) == 1  # type: ignore[index]
        await client.close()


@both_loops
async def test_pipelined_requests_are_answered_in_order() -> None:
    """Among them one that goes to the app, and one that arrives in two parts."""
    async with relay(lambda call: call.plain(call.body)) as r:
        client = await r.client()
        bodies = [ask(more=b',"number":%d' % n) for n in range(4)]
        raw = post(bodies[0]) + post(bodies[1]) + b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n" + post(bodies[2])
        last = post(bodies[3])
        client.send(raw + last[:30])
        assert [(await client.answer()).body for _ in range(2)] == bodies[:2]
        assert (await client.answer()).body == b'{"status":"ok"}'
        assert (await client.answer()).body == bodies[2]
        client.send(last[30:])
        assert (await client.answer()).body == bodies[3]
        await until(r.quiet)
        await client.close()


@both_loops
async def test_requests_sent_during_a_stream_wait_their_turn() -> None:
    async with relay(silent) as r:
        client = await r.client()
        client.send(post(ask(stream=True)))
        first = await r.workers[0].call()
        first.begin_stream(TOKEN)
        await client.head()
        assert await client.chunk() == TOKEN
        client.send(post(ask()) * 3 + b"GET /nothing HTTP/1.1\r\nhost: t\r\n\r\n" + b"NONSENSE\r\n\r\n")
        first.events(DONE)
        first.end_stream()
        assert [await client.chunk(), await client.chunk()] == [DONE, b""]
        for number in range(1, 4):
            call = await r.workers[0].call(number)
            assert len(r.workers[0].calls) == number + 1
            call.plain(OK)
            assert (await client.answer()).body == OK
        assert (await client.answer()).status == 404
        refused = await client.answer()
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (400, "invalid_http")
        assert await client.rest() == b""
        await client.close()


@both_loops
async def test_expect_100_continue() -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        raw = post(ask(), headers=("expect: 100-continue",))
        head, body = raw.split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert (await client.head())[0] == 100
        assert not r.workers[0].calls
        client.send(body)
        assert (await client.answer()).status == 200
        assert "expect" not in r.workers[0].calls[0].headers
        await client.close()


@both_loops
async def test_http_1_0() -> None:
    async with relay(streams(TOKEN, DONE), answers(OK)) as r:
        client = await r.client()
        client.send(post(ask(stream=True), version="1.0"))
        answer = await client.answer()
        assert answer.body == TOKEN + DONE
        assert answer.headers["connection"] == "close"
        assert "transfer-encoding" not in answer.headers
        await client.close()
        client = await r.client()
        client.send(post(ask(), version="1.0"))
        assert (await client.answer()).body == OK
        assert await client.rest() == b""
        await client.close()


@both_loops
async def test_a_client_that_asks_for_close_gets_it() -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        client.send(post(ask(), headers=("connection: close",)))
        answer = await client.answer()
        assert (answer.body, answer.headers["connection"]) == (OK, "close")
        assert await client.rest() == b""
        await client.close()


@both_loops
async def test_an_offered_upgrade_is_ignored() -> None:
    """As Java's client sends it with its first request."""
    sent = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMA")
    async with relay(answers(OK)) as r:
        client = await r.client()
        for _ in range(2):
            client.send(post(ask(), headers=sent))
            assert (await client.answer()).body == OK
        call = r.workers[0].calls[0]
        assert call.body == ask()
        assert not {"upgrade", "http2-settings", "connection"} & set(call.headers)
        client.send(b"GET /health HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        assert (await client.answer()).status == 200
        await client.close()


@both_loops
async def test_many_requests_in_one_read_are_no_long_head() -> None:
    request = b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n"
    async with relay(answers(OK), limits=EdgeLimits(max_header_bytes=1024)) as r:
        client = await r.client()
        client.send(request * 200 + request[:-3])
        await asyncio.sleep(0.05)
        client.send(request[-3:])
        for _ in range(201):
            assert (await client.answer()).status == 200


@both_loops
async def test_many_offered_upgrades_in_one_read() -> None:
    async with relay(answers(OK)) as r:
        client = await r.client()
        client.send(b"GET /health HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 1_200)
        for _ in range(1_200):
            assert (await client.answer()).status == 200
        client.send(post(ask()))
        assert (await client.answer()).body == OK


@both_loops
async def test_a_stale_kept_connection_costs_nothing() -> None:
    """The worker closes it when the next request arrives, before any byte of an answer."""
    served = 0

    def script(call: Call) -> None:
        nonlocal served
        served += 1
        call.abort() if served == 2 else call.plain(OK)

    async with relay(script, answers(b"other")) as r:
        for expected in (OK, b"other", OK):
            answer = await r.ask(post(ask()))
            assert (answer.status, answer.body, answer.headers["x-kvgate-retries"]) == (200, expected, "0")
        assert (served, r.workers[0].accepted) == (3, 2)
        assert not r.retried
        await until(r.quiet)


@both_loops
async def test_a_kept_connection_is_closed_at_its_age() -> None:
    async with relay(answers(OK), timeouts=Timeouts(pool_idle_s=0.05)) as r:
        await r.ask(post(ask()))
        await until(lambda: not r.workers[0].connections)
        assert (await r.ask(post(ask()))).status == 200
        assert r.workers[0].accepted == 2


@both_loops
async def test_back_pressure() -> None:
    """A client that does not read: the worker is paused, and what is held stays small."""
    piece = b"data: " + b"x" * 65_000 + b"\n\n"
    total = 400
    async with relay(silent) as r:
        client = await r.client(limit=1024)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(ask(stream=True, more=b',"stream_options":{"include_usage":true}')))
        call = await r.workers[0].call()
        call.begin_stream()
        call.events(*[piece] * total, DONE)
        call.end_stream()
        sent = -1
        # The worker's backlog stops shrinking: what is missing from it lies in four socket buffers and two transports.
        while call.write_backlog() != sent:
            sent = call.write_backlog()
            await asyncio.sleep(0.1)
        assert sent > len(piece) * total // 2
        assert not r.outcomes
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.answer()).body == piece * total + DONE
        assert (await r.outcome()).result is Result.COMPLETED
        await client.close()


@both_loops
async def test_a_client_that_never_reads_is_given_up() -> None:
    piece = b"x" * 65_000
    async with relay(silent, timeouts=Timeouts(idle_s=0.2)) as r:
        client = await r.client(limit=1024)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(ask(stream=True)))
        call = await r.workers[0].call()
        call.begin_stream()
        call.events(*[piece] * 1000)
        outcome = await r.outcome()
        assert outcome.result is Result.CLIENT_GONE
        await call.gone.wait()
        await until(r.quiet)
        client.abort()


@both_loops
async def test_no_garbage_is_left_for_the_collector() -> None:
    """A request's objects die with it: what only a collection could free would be paused for at random."""
    import gc

    async with relay(streams(TOKEN, USAGE, DONE)) as r:
        client = await r.client()

        async def some(count: int) -> None:
            for _ in range(count):
                client.send(post(ask(stream=True)))
                await client.answer()

        await some(5)
        gc.collect()
        gc.disable()
        try:
            await some(50)
            assert gc.collect() < 50
        finally:
            gc.enable()
        await client.close()


# --------------------------------------------------------------------------- the rest of the port


@both_loops
async def test_models_health_and_errors() -> None:
    async with relay(answers(OK)) as r:

        async def get(path: str, method: str = "GET") -> tuple[int, dict[str, object], dict[str, str]]:
            answer = await r.ask(f"{method} {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
            return answer.status, json.loads(answer.body), answer.headers

        status, models, _ = await get("/v1/models")
        assert status == 200
        assert [model["id"] for model in models["data"]] == ["m"]  # type: ignore[attr-defined]
        assert (await get("/v1/models/m"))[1]["id"] == "m"
        status, error, _ = await get("/v1/models/nope")
        assert (status, error["error"]["code"]) == (404, "model_not_found")  # type: ignore[index]
        assert (await get("/health"))[0] == (await get("/ready"))[0] == 200
        status, error, headers = await get(CHAT)
        assert (status, headers["allow"]) == (405, "POST")
        assert error["error"]["code"] == "method_not_allowed"  # type: ignore[index]
        assert (await get("/v1/models", "DELETE"))[0] == 405
        status, error, _ = await get("/docs")
        assert (status, error["error"]["code"]) == (404, "not_found")  # type: ignore[index]
        r.edge.accepting = False
        assert (await get("/ready"))[0] == 503
        assert (await get("/health"))[0] == 200


@both_loops
async def test_draining() -> None:
    """New requests are refused, open ones finish; those that do not are cut and counted as shut down."""
    async with relay(silent) as r:
        clients = [await r.client() for _ in range(3)]
        for client in clients:
            client.send(post(ask(stream=True)))
        calls = [await r.workers[0].call(number) for number in range(3)]
        for call in calls[:2]:
            call.begin_stream(TOKEN)
        for client in clients[:2]:
            await client.head()
        r.edge.accepting = False
        refused = await r.ask(post(ask()))
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert json.loads(refused.body)["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        calls[0].events(DONE)
        calls[0].end_stream()
        assert [await clients[0].chunk() for _ in range(3)] == [TOKEN, DONE, b""]
        await until(lambda: r.edge.open_exchanges == 2)
        r.edge.cut()
        assert await clients[1].chunk() == TOKEN
        assert await clients[1].rest() == b""
        assert (await clients[2].answer()).status == 503
        await until(r.quiet)
        assert sorted(o.result for o in r.outcomes) == [
            Result.COMPLETED,
            Result.SHUT_DOWN,
            Result.SHUT_DOWN,
            Result.SHUT_DOWN,
        ]
        for client in clients:
            await client.close()


@both_loops
async def test_a_bug_costs_one_request(caplog: pytest.LogCaptureFixture) -> None:
    async with relay(answers(OK)) as r:
        whole = r.edge.hashers

        def broken(model: str) -> None:
            raise RuntimeError("seeded bug")

        r.edge.hashers = broken
        answer = await r.ask(post(ask(), headers=("x-request-id: bug-1",)))
        assert (answer.status, answer.headers["connection"]) == (500, "close")
        assert b"seeded" not in answer.body
        assert "seeded bug" in caplog.text
        assert "bug-1" in caplog.text
        r.edge.hashers = whole
        assert (await r.ask(post(ask()))).status == 200
        assert [o.error_code for o in r.outcomes] == ["internal_error", None]
        await until(r.quiet)
