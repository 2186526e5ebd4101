"""Server-sent events: the usage event that only the gateway asked for, and the event that ends a broken stream.

Rules:
1. Events pass byte for byte; only the event with empty `choices` and a `usage` object is taken out, whole.
2. The same bytes come out for every way the input is cut into pieces.
3. An event is held back only while its end is missing, and at most `MAX_HELD_BYTES` of it; a longer one passes.
4. What is still held when a stream breaks is dropped: half an event means nothing to a client (WHATWG HTML 9.2.6).
"""

from __future__ import annotations

import re

import msgspec

from gateway.records import Usage
from gateway.upstream.usage import WireUsage, usage_of

MAX_HELD_BYTES = 65_536

_EMPTY_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_BLANK_LINE = re.compile(rb"\n\r?\n")
_BLANK_LINE_BYTES = 3


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: WireUsage | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


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
            chunk = _decode_chunk(data)
        except msgspec.MsgspecError:
            return False
        if chunk.choices != [] or chunk.usage is None:
            return False
        self.usage = usage_of(chunk.usage)
        return True


def error_event(error: bytes, *, named: bool) -> bytes:
    """A last event that carries an error object; `named` gives it Anthropic's event name."""
    return b"%bdata: %b\n\n" % (b"event: error\n" if named else b"", error)


def _suspect(data: bytes) -> bool:
    return data.find(b'"usage"') >= 0 and _EMPTY_CHOICES.search(data) is not None


def _end_of_events(data: bytes) -> int:
    """Where the last complete event of `data` ends."""
    return max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3) if b"\n\n" in data or b"\n\r\n" in data else 0
