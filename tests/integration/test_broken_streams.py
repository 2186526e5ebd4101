"""Streams that break, in the shape of every API: what arrived decides, and the client is told once, in its words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.records import Endpoint, Result
from gateway.upstream.connections import Timeouts
from tests.integration.relay_rig import Answer, Call, RelayRig, ask, both_loops, post, relay, streams, until

ANSWERS = Path(__file__).parents[1] / "golden" / "answers"
HI = b'"messages":[{"role":"user","content":"hi"}]'
USAGE_TOO = b',"stream_options":{"include_usage":true}'


class Api(NamedTuple):
    """One API: a request body for a stream, and the name of a recorded answer."""

    endpoint: Endpoint
    body: bytes
    recorded: str


APIS = (
    Api(Endpoint.CHAT, ask(stream=True), "chat_stream_plain"),
    Api(Endpoint.CHAT, ask(stream=True, more=USAGE_TOO), "chat_stream_usage"),
    Api(Endpoint.COMPLETIONS, b'{"model":"m","stream":true,"prompt":"hi"}', "completion_stream"),
    Api(Endpoint.COMPLETIONS, b'{"model":"m","stream":true,"prompt":"hi"%b}' % USAGE_TOO, "completion_stream"),
    Api(Endpoint.RESPONSES, b'{"model":"m","stream":true,"input":"hi"}', "responses_stream"),
    Api(Endpoint.MESSAGES, b'{"model":"m","stream":true,"max_tokens":4,%b}' % HI, "anthropic_messages_stream"),
    Api(Endpoint.GENERATE, b'{"model":"m","stream":true,"text":"hi"}', "generate_stream"),
)


def recorded(engine: str, api: Api) -> list[bytes]:
    """The events of a stream as the engine sent it; empty where it has no such API."""
    for answer in json.loads((ANSWERS / f"{engine}.json").read_text()):
        if answer["name"] == api.recorded:
            assert answer["endpoint"] == api.endpoint.name
            *events, end = answer["body"].encode().split(b"\n\n")
            assert end == b""
            return [event + b"\n\n" for event in events]
    return []


CASES = [
    pytest.param(engine, api, id=f"{engine}-{api.recorded}{'-usage' * (USAGE_TOO in api.body)}")
    for engine in ("vllm-0.16.0", "vllm-0.32.0", "sglang-0.5.23")
    for api in APIS
    if recorded(engine, api)
]
EACH_API = [pytest.param(api, id=f"{api.recorded}{'-usage' * (USAGE_TOO in api.body)}") for api in APIS]


def shown(api: Api, events: list[bytes]) -> list[bytes]:
    """Without the usage event, where the client did not ask for it."""
    asked = USAGE_TOO in api.body or api.endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS)
    return [event for event in events if asked or b'"choices":[],' not in event]


def error_told(api: Api, event: bytes) -> dict[str, Any]:
    """The error in the last event, after a look at its shape."""
    lines = event.rstrip(b"\n").split(b"\n")
    assert lines[-1].startswith(b"data: ")
    told: dict[str, Any] = json.loads(lines[-1][6:])
    match api.endpoint:
        case Endpoint.RESPONSES:
            assert lines[0] == b"event: error"
            assert set(told) == {"type", "code", "message", "param", "sequence_number"}
            assert told["type"] == "error"
            return told
        case Endpoint.MESSAGES:
            assert lines[0] == b"event: error"
            assert told["type"] == "error"
            assert set(told["error"]) == {"type", "message"}
        case _:
            assert len(lines) == 1
            assert set(told["error"]) == {"message", "type", "code", "param"}
    error: dict[str, Any] = told["error"]
    return error


async def asked(r: RelayRig, api: Api) -> Answer:
    client = await r.client()
    client.send(post(api.body, path=api.endpoint.value))
    answer = await client.answer()
    if [o.error_code for o in r.outcomes] in (["worker_broken"], ["worker_timeout"]):
        assert await client.rest() == b"", "a broken stream ends its connection"
    await client.close()
    return answer


@both_loops
@pytest.mark.parametrize(("engine", "api"), CASES)
async def test_a_whole_stream_passes_byte_for_byte(engine: str, api: Api) -> None:
    """An event a chunk, all in one, and cut anywhere."""
    events = recorded(engine, api)
    whole = b"".join(events)
    for pieces in (events, [whole], [whole[at : at + 7] for at in range(0, len(whole), 7)]):
        async with relay(streams(*pieces)) as r:
            assert (await asked(r, api)).body == b"".join(shown(api, events))
            outcome = await r.outcome()
            assert (outcome.result, outcome.error_code) == (Result.COMPLETED, None)
            await until(r.quiet)


def _ends(call: Call) -> None:
    call.end_stream()


def _closes(call: Call) -> None:
    call.close()


def _breaks_off_inside_an_event(call: Call) -> None:
    call.send(b"40\r\ndata: {half")
    call.close()


def _ends_inside_an_event(call: Call) -> None:
    call.events(b'data: {"half')
    call.end_stream()


def _stalls(_call: Call) -> None:
    pass


BREAKS = (_ends, _closes, _breaks_off_inside_an_event, _ends_inside_an_event, _stalls)


@both_loops
@pytest.mark.parametrize("then", BREAKS)
@pytest.mark.parametrize("api", EACH_API)
async def test_a_broken_one_ends_with_one_error_event(api: Api, then: Callable[[Call], None]) -> None:
    """Also when the worker ends its answer as if it were whole: an engine whose generation died."""
    engine = "sglang-0.5.23"
    events = recorded(engine, api)[:-1]
    if events[-1].startswith(b"event: message_stop"):
        events.pop()
    timeouts = Timeouts(idle_s=0.2) if then is _stalls else Timeouts()

    # Without a byte of the body nothing has begun, and another worker does it all.
    begins = then in (_breaks_off_inside_an_event, _ends_inside_an_event)
    for count in (0, 1, len(events)) if begins else (1, len(events)):
        sent = events[:count]

        def script(call: Call, sent: list[bytes] = sent) -> None:
            call.begin_stream(*sent)
            then(call)

        async with relay(script, streams(b"other"), timeouts=timeouts) as r:
            answer = await asked(r, api)
            assert answer.status == 200
            passed = b"".join(shown(api, sent))
            assert answer.body.startswith(passed)
            rest = answer.body[len(passed) :]
            *half, error, end = rest.split(b"\n\n")
            assert end == b""
            assert len(half) <= 1, "half an event, ended, where one was passed on"
            told = error_told(api, error)
            if api.endpoint is Endpoint.RESPONSES:
                assert told["sequence_number"] == count
            code = "worker_timeout" if then is _stalls else "worker_broken"
            assert told.get("code", code) == code
            for last in (b"[DONE]", b"message_stop", b"response.completed"):
                assert last not in rest
            result = Result.TIMED_OUT if then is _stalls else Result.WORKER_FAILED
            outcome = await r.outcome()
            assert (outcome.result, outcome.status, outcome.error_code, outcome.worker) == (result, 200, code, "w1")
            assert not r.retried
            assert not r.workers[1].calls
            await until(r.quiet)


WORKERS_OWN = (
    (Endpoint.CHAT, b'data: {"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}\n\n', True),
    (Endpoint.CHAT, b'data: {"error":{"message":"m","type":"BadRequestError","param":null,"code":400}}\n\n', False),
    (Endpoint.CHAT, b'data: {"error":{"message":"m","type":"invalid_request_error","code":"too_long"}}\n\n', False),
    (Endpoint.COMPLETIONS, b'data: {"object":"error","message":"m","type":"InternalServerError","code":500}\n\n', True),
    (Endpoint.COMPLETIONS, b'data: {"object":"error","message":"m","type":"BadRequest","code":400}\n\n', False),
    (Endpoint.RESPONSES, b'event: error\ndata: {"type":"error","code":"server_error","message":"m"}\n\n', True),
    (
        Endpoint.RESPONSES,
        b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed"}}\n\n',
        True,
    ),
    (Endpoint.MESSAGES, b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"m"}}\n\n', True),
    (
        Endpoint.MESSAGES,
        b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"m"}}\n\n',
        False,
    ),
)


@both_loops
@pytest.mark.parametrize("done", [True, False], ids=["done", "bare"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize(("endpoint", "error", "workers_fault"), WORKERS_OWN)
async def test_an_error_the_worker_tells_passes_and_is_its_own(
    endpoint: Endpoint, error: bytes, workers_fault: bool, first: bool, done: bool
) -> None:
    """No second error is added; it counts against the worker unless the request was at fault."""
    api = next(api for api in APIS if api.endpoint is endpoint)
    events = [] if first else recorded("vllm-0.32.0", api)[:2]
    events += [error, b"data: [DONE]\n\n"] if done else [error]
    async with relay(streams(*events)) as r:
        assert (await asked(r, api)).body == b"".join(events)
        outcome = await r.outcome()
        expected = (Result.WORKER_FAILED, "worker_error") if workers_fault else (Result.COMPLETED, None)
        assert (outcome.result, outcome.error_code) == expected
        await until(r.quiet)


@both_loops
@pytest.mark.parametrize("api", EACH_API)
async def test_what_is_odd_but_whole_passes(api: Api) -> None:
    """A malformed line, comments, and end marks inside a model's text."""
    events = recorded("sglang-0.5.23", api)
    inside = json.dumps({"text": 'data: [DONE]\n\nevent: message_stop\n\ndata: {"error":1}'}).encode()
    odd = [events[0], b"data: {broken\n\n", b": ping\n\n", b"data: " + inside + b"\n\n", *events[1:], b": bye\n\n"]
    async with relay(streams(*odd)) as r:
        assert (await asked(r, api)).body == b"".join(shown(api, odd))
        assert (await r.outcome()).result is Result.COMPLETED


@both_loops
@pytest.mark.parametrize("api", EACH_API)
async def test_end_marks_inside_text_are_no_end(api: Api) -> None:
    inside = json.dumps({"text": "data: [DONE]\n\n", "x": {"type": "message_stop"}, "y": "response.completed"}).encode()
    async with relay(streams(b"data: " + inside + b"\n\n")) as r:
        assert b"error" in (await asked(r, api)).body
        assert (await r.outcome()).error_code == "worker_broken"


@both_loops
async def test_the_long_event_that_ends_responses_is_an_end() -> None:
    """It repeats the whole answer; its type may be out of what is kept. Of such a stream the framing decides."""
    api = next(api for api in APIS if api.endpoint is Endpoint.RESPONSES)
    last = b'event: response.completed\ndata: {"type":"response.completed","response":{"output":"%b"}}\n\n'
    for size in (1_000, 300_000):
        async with relay(streams(last % (b"x" * size))) as r:
            assert (await asked(r, api)).body == last % (b"x" * size)
            assert (await r.outcome()).result is Result.COMPLETED
