"""Server-sent events: the usage event that only the gateway asked for, how a stream ended, and the event that ends a
broken one.

Rules:
1. Events pass byte for byte; only the event with empty `choices` and a `usage` object is taken out, whole.
2. The same bytes come out for every way the input is cut into pieces.
3. An event is held back only while its end is missing, and at most `MAX_HELD_BYTES` of it; a longer one passes.
4. What is still held when a stream breaks is dropped: half an event means nothing to a client (WHATWG HTML 9.2.6).
5. Whether an answer is whole is told by its last event, not by its framing: an engine whose generation dies may well
   end its HTTP answer properly. Chat, completions and `/generate` end with `[DONE]`; messages with `message_stop`;
   responses with `response.completed`, `.incomplete` or `.failed`.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from gateway.errors import UNREADABLE
from gateway.records import Endpoint, Usage
from gateway.upstream.answer_json import Fault, ToldEnd, decode_chunk, decode_told
from gateway.upstream.usage import usage_of

MAX_HELD_BYTES = 65_536

_EMPTY_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_BLANK_LINE = re.compile(rb"\n\r?\n")
_BLANK_LINE_BYTES = 3


_DONE = b"[DONE]"

_LAST_TYPES = {
    Endpoint.MESSAGES: frozenset(("message_stop", "error")),
    Endpoint.RESPONSES: frozenset(("response.completed", "response.incomplete", "response.failed", "error")),
}
_ENDED_BY_DONE = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE))

LAST_BYTES = 8_192
"""Enough to find the last events in. The one that ends `/v1/responses` repeats the answer and may be longer."""

_EVENTS_JUDGED = 2
"""An error that a worker tells stands last, or before `[DONE]`."""

_CLIENTS_FAULT = re.compile("invalid|bad.?request|not.?found|permission|authentication|too_large", re.IGNORECASE)

# A quote inside a JSON string is escaped: text of a model never matches.
_SEQUENCE = re.compile(rb'(?<!\\)"sequence_number"[ \t]*:[ \t]*(\d{1,15})\b')


class StreamEnd(Enum):
    """How a stream of events ended whose framing is whole."""

    WHOLE = "its last event came"
    FAILED = "the worker told an error in it"
    CUT = "its last event is missing"


class UsageEventFilter:
    """Takes the usage event out of one stream of chat or completions and remembers what it said."""

    __slots__ = ("_inside", "holds", "usage")

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.holds = b""
        """Bytes of an event whose end has not come; empty when the next byte begins an event."""
        self._inside = False
        """The held bytes are the last of an event that has passed already."""

    def feed(self, data: bytes) -> bytes:
        """The bytes that may go to the client now; often all of `data`, sometimes none."""
        if not self.holds and data.endswith(b"\n\n") and not _suspect(data):
            return data
        data = self.holds + data
        passed = b""
        if self._inside:
            end = _BLANK_LINE.search(data)
            if end is None:
                self.holds = data[-(_BLANK_LINE_BYTES - 1) :]
                return data[: -(_BLANK_LINE_BYTES - 1)]
            passed, data = data[: end.end()], data[end.end() :]
            self._inside = False
        cut = _end_of_events(data)
        whole, held = data[:cut], data[cut:]
        if _suspect(whole):
            whole = self._without_usage(whole)
        if len(held) > MAX_HELD_BYTES:
            self._inside = True
            whole += held[: -(_BLANK_LINE_BYTES - 1)]
            held = held[-(_BLANK_LINE_BYTES - 1) :]
        self.holds = held
        return passed + whole

    def finish(self) -> bytes:
        """The stream has ended properly: what is left of it."""
        held, self.holds = self.holds, b""
        return self._without_usage(held) if _suspect(held) and not self._inside else held

    def _without_usage(self, data: bytes) -> bytes:
        kept: list[bytes] = []
        start = 0
        while start < len(data):
            end = _BLANK_LINE.search(data, start)
            stop = end.end() if end else len(data)
            event = data[start:stop]
            if self._is_usage(event):
                # Blank lines before it were cut off from the event before.
                kept.append(event[: len(event) - len(event.lstrip(b"\r\n"))])
            else:
                kept.append(event)
            start = stop
        return b"".join(kept)

    def _is_usage(self, event: bytes) -> bool:
        if not _suspect(event):
            return False
        data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
        try:
            chunk = decode_chunk(data)
        except UNREADABLE:
            return False
        if chunk.choices != [] or chunk.usage is None:
            return False
        self.usage = usage_of(chunk.usage)
        return True


def error_event(error: bytes, *, named: bool) -> bytes:
    """A last event that carries an error object; `named` gives it the event name of Anthropic and of responses."""
    return b"%bdata: %b\n\n" % (b"event: error\n" if named else b"", error)


def next_sequence(last: bytes) -> int:
    """The `sequence_number` behind the last one in a stream of `/v1/responses`; `last` are its last bytes."""
    numbers = _SEQUENCE.findall(last)
    return int(numbers[-1]) + 1 if numbers else 0


def stream_end(endpoint: Endpoint, last: bytes, *, whole: bool) -> StreamEnd:
    """Judge a stream by its last bytes, at least `LAST_BYTES` of them where there are as many; `whole`: no event's
    beginning can be missing from them.

    Chunk sizes between events do no harm: no line of theirs begins with `data:`.
    """
    lines = _last_data(last)
    if not lines:
        # Of a last event that is longer than what was kept the type is unknown: the framing decides.
        return StreamEnd.CUT if whole or endpoint is not Endpoint.RESPONSES else StreamEnd.WHOLE
    done = lines[0] == _DONE
    for line in lines[:_EVENTS_JUDGED] if done else lines[:1]:
        if _tells_failure(line):
            return StreamEnd.FAILED
    if done or (endpoint not in _LAST_TYPES and endpoint not in _ENDED_BY_DONE):
        return StreamEnd.WHOLE
    types = _LAST_TYPES.get(endpoint)
    told = _told(lines[0])
    if told is None:
        return StreamEnd.CUT
    if told is _NESTED:
        return StreamEnd.WHOLE
    if _is_error(told):
        # The request's own fault, and told as such.
        return StreamEnd.WHOLE
    return StreamEnd.WHOLE if types is not None and told.type in types else StreamEnd.CUT


def _last_data(last: bytes) -> list[bytes]:
    """What stands behind `data:` in the last lines that have it, the last one first."""
    text = b"\n" + last
    found: list[bytes] = []
    end = len(text)
    while len(found) < _EVENTS_JUDGED:
        at = text.rfind(b"\ndata:", 0, end)
        if at < 0:
            break
        stop = text.find(b"\n", at + 1)
        found.append(text[at + 6 : stop if stop >= 0 else len(text)].strip())
        end = at
    return found


_NESTED = ToldEnd()
"""Stands for an event that is nested too deeply to be read, as one that repeats what a client sent may be: that is not
the worker's fault, and the framing decides."""


def _told(line: bytes) -> ToldEnd | None:
    try:
        return decode_told(line)
    except RecursionError:
        return _NESTED
    except msgspec.MsgspecError:
        return None


def _is_error(told: ToldEnd) -> bool:
    return told.error is not None or told.object == "error" or told.type in ("error", "response.failed")


def _tells_failure(line: bytes) -> bool:
    """It is an error, and not one of the request."""
    if b"error" not in line and b"response.failed" not in line:
        return False
    told = _told(line)
    if told is None or not _is_error(told):
        return False
    fault = told.error or Fault(told.type, told.code)
    if isinstance(fault.code, int):
        return not 400 <= fault.code < 500
    return _CLIENTS_FAULT.search(f"{fault.type} {fault.code}") is None


def _suspect(data: bytes) -> bool:
    return data.find(b'"usage"') >= 0 and _EMPTY_CHOICES.search(data) is not None


def _end_of_events(data: bytes) -> int:
    """Where the last complete event of `data` ends."""
    return max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3) if b"\n\n" in data or b"\n\r\n" in data else 0
