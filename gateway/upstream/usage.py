"""What a worker reports about tokens, read from the last bytes of its answer.

Rules:
1. Nothing is parsed while an answer passes: its last bytes are kept and read when it has ended.
2. A usage that cannot be found or has another shape is None; it never disturbs the answer.
3. `cached_tokens` is None when the worker says nothing of cached tokens (vLLM without
   `--enable-prompt-tokens-details`, SGLang without `--enable-cache-report`).

Wire formats: OpenAI chat and completions `usage.prompt_tokens`, `completion_tokens`,
`prompt_tokens_details.cached_tokens`; OpenAI responses `usage.input_tokens`, `output_tokens`,
`input_tokens_details.cached_tokens`, in streams inside the `response.completed` event; Anthropic messages
`usage.input_tokens`, `output_tokens`, `cache_read_input_tokens`, in streams in the first (`message_start`) and a late
event (`message_delta`); SGLang `/generate` `meta_info.prompt_tokens`, `completion_tokens`, `cached_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.errors import UNREADABLE
from gateway.records import Endpoint, Usage
from gateway.upstream.answer_json import WireUsage, decode_answer, decode_answers, decode_usage

MAX_WHOLE_BYTES = 262_144
"""A JSON answer up to this size is kept and parsed as a whole; of a longer one only the tail is searched."""

TAIL_BYTES = 65_536
"""Kept of a long JSON answer. vLLM puts nothing but nulls behind `usage` unless prompt logprobs are asked for."""

STREAM_TAIL_BYTES = 16_384
"""Kept of a stream. A usage event has less than 1 KB; the events behind it are `[DONE]` and `message_stop`."""

HEAD_BYTES = 8_192
"""Kept of the start of an Anthropic stream: `message_start` is the first event and carries no text yet."""

_MOST_TOKENS = 1 << 40
"""More were never computed for one request."""

_EVENTS_READ = 8
"""How many of the last events of a stream are looked at: usage is in the last or followed by one or two."""


# A quote inside a JSON string is escaped, so text of a model can never hold an unescaped `"usage":`; the look-behind
# turns away a key that merely ends in `\"usage`.
_USAGE_KEY = re.compile(rb'(?<!\\)"(?:usage|meta_info)"[ \t\r\n]*:[ \t\r\n]*(?=\{)')


class AnswerTail:
    """Keeps what of an answer's body the usage may be read from; at most twice the limit is held."""

    __slots__ = ("_endpoint", "_head", "_keep", "_limit", "_pieces", "_size", "_stream", "_whole")

    def __init__(self, endpoint: Endpoint, *, stream: bool) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._pieces: list[bytes] = []
        self._size = 0
        self._head = b""
        self._whole = True
        # The event that ends a stream of /v1/responses repeats the whole answer, with more behind its usage.
        wide = endpoint is Endpoint.RESPONSES or endpoint is Endpoint.GENERATE
        self._keep = STREAM_TAIL_BYTES if stream and not wide else TAIL_BYTES
        self._limit = 2 * self._keep if stream else MAX_WHOLE_BYTES

    def add(self, data: bytes) -> None:
        """The next bytes of the body."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > self._limit:
            self._trim()

    @property
    def whole(self) -> bool:
        """Nothing has been let go."""
        return self._whole

    def last(self) -> bytes:
        """What is kept of the end of the body so far: all of it, or at least `STREAM_TAIL_BYTES` of a stream."""
        return b"".join(self._pieces)

    def usage(self) -> Usage | None:
        """Read once, at the end of a successful answer."""
        body = b"".join(self._pieces)
        if not self._stream:
            found = _whole_answer(body) if self._whole else None
            return _usage([found] if found is not None else _searched(body))
        if self._endpoint is Endpoint.MESSAGES:
            head = body[:HEAD_BYTES] if self._whole else self._head
            return _usage([*_from_events(reversed(_events(head)[:_EVENTS_READ])), *_from_events(iter(_events(body)))])
        return _usage(list(_from_events(iter(_events(body)))) or _searched(body))

    def _trim(self) -> None:
        body = b"".join(self._pieces)
        if self._whole:
            self._whole = False
            self._limit = 2 * self._keep
            if self._endpoint is Endpoint.MESSAGES:
                self._head = body[:HEAD_BYTES]
        tail = body[-self._keep :]
        self._pieces.clear()
        self._pieces.append(tail)
        self._size = len(tail)


def usage_of(wire: WireUsage) -> Usage | None:
    """The record of one `usage` object; None when it holds no counts."""
    return _usage([wire])


def _whole_answer(body: bytes) -> WireUsage | None:
    try:
        return decode_answer(body).found()
    except UNREADABLE:
        pass
    try:
        answers = decode_answers(body)
    except UNREADABLE:
        return None
    return _sum([answer.meta_info for answer in answers if answer.meta_info is not None])


def _sum(parts: list[WireUsage]) -> WireUsage | None:
    """SGLang answers a batch of prompts with a list; the usage of the request is the sum."""
    if not parts:
        return None
    cached = [part.cached_tokens for part in parts if part.cached_tokens is not None]
    return WireUsage(
        prompt_tokens=sum(part.prompt_tokens or 0 for part in parts),
        completion_tokens=sum(part.completion_tokens or 0 for part in parts),
        cached_tokens=sum(cached) if cached else None,
    )


def _events(body: bytes) -> list[bytes]:
    """The JSON of each `data:` line. No known engine spreads one event's data over lines."""
    return [line[5:].strip() for line in body.splitlines() if line.startswith(b"data:")]


def _from_events(events: Iterator[bytes]) -> Iterator[WireUsage]:
    """The usage of the last event that has one, looking at the last few."""
    for data in list(events)[: -_EVENTS_READ - 1 : -1]:
        if b'"usage"' not in data and b'"meta_info"' not in data:
            continue
        try:
            found = decode_answer(data).found()
        except UNREADABLE:
            # An event cut at the start of the tail, or one of a shape of its own (SGLang's flat errors).
            continue
        if found is not None:
            yield found
            return


def _searched(body: bytes) -> list[WireUsage]:
    """The last usage object in a piece of JSON text whose beginning is missing."""
    for key in reversed(list(_USAGE_KEY.finditer(body))):
        text = _object_at(body, key.end())
        if text is None:
            continue
        try:
            wire = decode_usage(text)
        except UNREADABLE:
            continue
        if wire.prompt_tokens is not None or wire.input_tokens is not None:
            return [wire]
    return []


_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}]')


def _object_at(body: bytes, start: int) -> bytes | None:
    """The text of the JSON object that begins at `start`; None when its end is missing."""
    depth = 0
    for token in _STRUCTURE.finditer(body, start):
        text = token.group()
        if text == b"{":
            depth += 1
        elif text == b"}":
            depth -= 1
            if depth == 0:
                return body[start : token.end()]
    return None


def _usage(parts: list[WireUsage]) -> Usage | None:
    """Join what several events say; a later one wins."""
    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    for wire in parts:
        details = wire.prompt_tokens_details or wire.input_tokens_details
        prompt = _first(wire.prompt_tokens, wire.input_tokens, prompt)
        completion = _first(wire.completion_tokens, wire.output_tokens, completion)
        said = _first(wire.cached_tokens, wire.cache_read_input_tokens, cached)
        cached = said if details is None or details.cached_tokens is None else details.cached_tokens
    if prompt is None:
        return None
    if not (_can_be(prompt) and _can_be(completion or 0) and _can_be(cached or 0)):
        return None  # means, budgets and metrics are made of them: a wrong number is worse than none
    return Usage(prompt, completion or 0, cached)


def _can_be(tokens: int) -> bool:
    return 0 <= tokens <= _MOST_TOKENS


def _first(one: int | None, two: int | None, three: int | None) -> int | None:
    if one is not None:
        return one
    return three if two is None else two
