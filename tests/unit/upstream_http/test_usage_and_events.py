"""Usage from the tail, and the hidden usage event, on what real engines sent and for every way it may be cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.records import Endpoint, Usage
from gateway.upstream.sse import MAX_HELD_BYTES, UsageEventFilter
from gateway.upstream.usage import MAX_WHOLE_BYTES, TAIL_BYTES, AnswerTail

GOLDEN = Path(__file__).parents[2] / "golden" / "answers"
ENGINES = ("vllm-0.32.0", "vllm-0.16.0", "sglang-0.5.23")


def golden(engine: str) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in json.loads((GOLDEN / f"{engine}.json").read_text("utf-8"))}


EXPECTED = {
    "chat_shared_prefix_1": Usage(398, 12, 384),
    "chat_stream_usage": Usage(398, 12, 384),
    "chat_stream_continuous_usage": Usage(398, 4, 384),
    "chat_stream_n2": Usage(400, 8, 384),
    "chat_stream_plain": None,
    "completion": Usage(120, 6, 0),
    "completion_stream": Usage(2, 4, 0),
    "generate": Usage(2, 4, 0),
    "generate_stream": Usage(2, 4, 0),
    "err_too_long_stream": None,
}
DIFFERENT = {
    # It leaves the details out when nothing was cached.
    ("vllm-0.16.0", "completion"): Usage(120, 6, None),
    ("vllm-0.16.0", "completion_stream"): Usage(2, 4, None),
    ("vllm-0.32.0", "responses"): Usage(13, 4, 0),
    ("vllm-0.32.0", "responses_stream"): Usage(13, 3, 0),
    ("vllm-0.32.0", "anthropic_messages"): Usage(13, 4, 0),
    ("vllm-0.32.0", "anthropic_messages_stream"): Usage(13, 3, 0),
    ("vllm-0.16.0", "responses"): Usage(13, 4, 0),
    ("vllm-0.16.0", "responses_stream"): Usage(13, 3, 0),
    ("vllm-0.16.0", "anthropic_messages"): Usage(13, 4, None),
    ("vllm-0.16.0", "anthropic_messages_stream"): Usage(13, 3, None),
    ("sglang-0.5.23", "responses"): Usage(13, 2, 0),
    ("sglang-0.5.23", "responses_stream"): Usage(13, 1, 0),
    ("sglang-0.5.23", "anthropic_messages"): Usage(13, 4, None),
    ("sglang-0.5.23", "anthropic_messages_stream"): Usage(13, 3, None),
}


def cases() -> Iterator[tuple[str, str, Usage | None]]:
    for engine in ENGINES:
        for name in golden(engine):
            yield engine, name, expected(engine, name)


def expected(engine: str, name: str) -> Usage | None:
    return DIFFERENT[engine, name] if (engine, name) in DIFFERENT else EXPECTED[name]


def read(entry: dict[str, Any], pieces: list[bytes]) -> Usage | None:
    tail = AnswerTail(Endpoint[entry["endpoint"]], stream=is_stream(entry))
    for piece in pieces:
        tail.add(piece)
    return tail.usage()


def is_stream(entry: dict[str, Any]) -> bool:
    return any(name == "content-type" and value.startswith("text/event-stream") for name, value in entry["headers"])


@pytest.mark.parametrize(("engine", "name", "usage"), list(cases()))
def test_usage_of_real_answers(engine: str, name: str, usage: Usage | None) -> None:
    entry = golden(engine)[name]
    body = entry["body"].encode()
    assert read(entry, [body]) == usage
    assert read(entry, [body[at : at + 1] for at in range(len(body))]) == usage
    for at in range(0, len(body), 7):
        assert read(entry, [body[:at], body[at:]]) == usage


CHAT = {"endpoint": "CHAT", "headers": [["content-type", "application/json"]]}
CHAT_STREAM = {"endpoint": "CHAT", "headers": [["content-type", "text/event-stream"]]}
USAGE = b'"usage":{"prompt_tokens":5,"completion_tokens":6,"prompt_tokens_details":{"cached_tokens":3}}'


@pytest.mark.parametrize("size", [1000, MAX_WHOLE_BYTES - 500, MAX_WHOLE_BYTES + 500, 3 * MAX_WHOLE_BYTES])
def test_usage_of_long_answers(size: int) -> None:
    fake = json.dumps('"usage":{"prompt_tokens":1,"completion_tokens":1} \\').encode()
    body = (
        b'{"choices":[{"text":"%b","again":%b}], %b ,"metadata":{"usage":"x","a\\"usage":{"prompt_tokens":9}},"e":null}'
        % (b"x" * size, fake, USAGE)
    )
    assert read(CHAT, [body]) == Usage(5, 6, 3)
    assert read(CHAT, [body[at : at + 1400] for at in range(0, len(body), 1400)]) == Usage(5, 6, 3)


def test_usage_too_far_from_the_end_is_unknown() -> None:
    body = b'{"pad":"%b",%b,"logprobs":"%b"}' % (b"x" * MAX_WHOLE_BYTES, USAGE, b"y" * 2 * TAIL_BYTES)
    assert read(CHAT, [body]) is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"nonsense",
        b'{"usage":null}',
        b'{"usage":[]}',
        b'{"usage":{"prompt_tokens":"5"}}',
        b'{"usage":{}}',
        b"\xff",
    ],
)
def test_usage_of_another_shape_is_unknown(body: bytes) -> None:
    assert read(CHAT, [body]) is None
    assert read(CHAT_STREAM, [b"data: " + body + b"\n\ndata: [DONE]\n\n"]) is None


@pytest.mark.parametrize("wrong", [-1, 1 << 41, 10**400], ids=["negative", "large", "beyond a float"])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens", "cached_tokens"])
def test_counts_that_cannot_be_are_unknown(name: str, wrong: int) -> None:
    """Of a plain answer and of a stream, whose usage event is taken out all the same."""
    usage = json.dumps({"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 1, name: wrong})
    tail = AnswerTail(Endpoint.CHAT, stream=False)
    tail.add(b'{"choices":[],"usage":%b}' % usage.encode())
    assert tail.usage() is None
    passing = UsageEventFilter()
    assert passing.feed(b'data: {"choices":[],"usage":%b}\n\n' % usage.encode()) + passing.finish() == b""
    assert passing.usage is None


def test_a_large_last_event_is_read_from_its_tail() -> None:
    entry = {"endpoint": "RESPONSES", "headers": [["content-type", "text/event-stream"]]}
    event = b'data: {"response":{"output":"%b","usage":{"input_tokens":7,"output_tokens":1}}}\n\n'
    body = event % (b"x" * 500_000)
    assert read(entry, [body[at : at + 65536] for at in range(0, len(body), 65536)]) == Usage(7, 1, None)


def test_a_long_anthropic_stream_keeps_its_first_event() -> None:
    entry = {"endpoint": "MESSAGES", "headers": [["content-type", "text/event-stream"]]}
    first = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":13,"cache_read_input_tokens":8}}}\n\n'
    text = b'event: content_block_delta\ndata: {"delta":{"text":"word"}}\n\n' * 2000
    last = b'event: message_delta\ndata: {"usage":{"output_tokens":3}}\n\nevent: message_stop\ndata: {}\n\n'
    body = first + text + last
    assert read(entry, [body[at : at + 60] for at in range(0, len(body), 60)]) == Usage(13, 3, 8)


def test_two_sglang_prompts_add_up() -> None:
    part = b'{"text":"a","meta_info":{"prompt_tokens":4,"completion_tokens":2,"cached_tokens":1}}'
    entry = {"endpoint": "GENERATE", "headers": [["content-type", "application/json"]]}
    assert read(entry, [b"[%b,%b]" % (part, part)]) == Usage(8, 4, 2)


# --------------------------------------------------------------------------- hiding


def hidden(pieces: list[bytes]) -> tuple[bytes, Usage | None]:
    passing = UsageEventFilter()
    out = b"".join([passing.feed(piece) for piece in pieces]) + passing.finish()
    return out, passing.usage


def without_usage(body: bytes) -> bytes:
    """The expectation, from the text itself: every event but the one with empty choices."""
    return b"".join(e + b"\n\n" for e in body.split(b"\n\n")[:-1] if b'"choices":[]' not in e)


STREAMS = [(e, n) for e in ENGINES for n, entry in golden(e).items() if is_stream(entry) and n in EXPECTED]


@pytest.mark.parametrize(("engine", "name"), STREAMS)
def test_the_usage_event_is_taken_out_wherever_it_is_cut(engine: str, name: str) -> None:
    body = golden(engine)[name]["body"].encode()
    found = without_usage(body), expected(engine, name) if "generate" not in name else None
    assert hidden([body]) == found
    assert hidden([body[at : at + 1] for at in range(len(body))]) == found
    for at in range(len(body)):
        assert hidden([body[:at], body[at:]]) == found


SPACED = b'data: { "choices" : [ ] , "usage" : { "prompt_tokens" : 1, "completion_tokens" : 2 } }\r\n\r\n'
AWKWARD = [
    b": ping\n\n",
    b'data: {"choices":[],"usage":null,"prompt_filter_results":[]}\n\n',
    b'data: {"choices":[{"delta":{"content":"\\"choices\\":[] \\"usage\\" \\n\\n"}}]}\n\n',
    b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":1}}\r\n\r\n',
    b'data: {broken "usage" "choices":[]\n\n',
    "data: größer 漢字\n\n".encode(),
    b"event: x\ndata: 1\n\n",
    b"data: [DONE]\n\n",
    b"\n\n",
]


@given(
    events=st.lists(st.sampled_from([*AWKWARD, SPACED]), max_size=8),
    end=st.sampled_from([b"", b"data: half"]),
    cuts=st.lists(st.integers(0, 800), max_size=12),
)
def test_every_cutting_gives_the_same(events: list[bytes], end: bytes, cuts: list[int]) -> None:
    body = b"".join(events) + end
    edges = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    pieces = [body[a:b] for a, b in itertools.pairwise(edges) if a < b]
    out, usage = hidden(pieces)
    assert out == b"".join(e for e in events if e is not SPACED) + end
    assert (usage is not None) == (SPACED in events)


def test_a_usage_event_without_its_blank_line_is_taken_out_at_the_end() -> None:
    assert hidden([AWKWARD[0], SPACED[:-4]]) == (AWKWARD[0], Usage(1, 2, None))


def test_whole_events_are_never_held() -> None:
    passing = UsageEventFilter()
    for event in AWKWARD:
        assert passing.feed(event) == event


def test_an_endless_event_passes_and_the_one_after_it_is_still_seen() -> None:
    long = b"data: " + b"x" * (3 * MAX_HELD_BYTES) + b"\r\n\r\n"
    body = long + SPACED + AWKWARD[-2]
    for step in (1000, 65_536, len(body)):
        passing = UsageEventFilter()
        out = b""
        for at in range(0, len(body), step):
            out += passing.feed(body[at : at + step])
            assert len(passing.holds) <= MAX_HELD_BYTES
        assert out + passing.finish() == long + AWKWARD[-2]
        assert passing.usage == Usage(1, 2, None)
