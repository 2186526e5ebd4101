"""Where requests stand in distributed traces: W3C Trace Context, level 1 (https://www.w3.org/TR/trace-context/).

Rules:
1. A caller's trace is gone on with, and its decision to record is kept; a request without one begins a trace, recorded
   with the ratio that is set. A header that is not well-formed begins one too, as the specification says.
2. The worker gets the same trace with the gateway's span as the parent, recorded or not. `tracestate` passes unchanged.
3. Ids come from the random source given.

Cheap enough for every request; what is recorded is made of outcomes, afterwards (`telemetry.spans`).
"""

from __future__ import annotations

import re
from random import Random

from gateway.records import Trace

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_ONLY_KNOWN_LENGTH = 55
"""Of version 00; only later ones may be longer."""
_SAMPLED = 0x01


class Tracing:
    """Gives each request its place. `ratio` of the traces that begin here are recorded."""

    def __init__(self, *, ratio: float, rng: Random) -> None:
        self._ratio = ratio
        self._rng = rng

    def begin(self, header: bytes | None) -> Trace:
        """`header` is the request's `traceparent`."""
        span_id = f"{self._rng.getrandbits(64) or 1:016x}"
        found = _TRACEPARENT.fullmatch(header) if header is not None else None
        if found is not None and header is not None and _is_valid(header, found):
            sampled = bool(int(found[3], 16) & _SAMPLED)
            return Trace(found[1].decode(), span_id, found[2].decode(), sampled)
        sampled = self._rng.random() < self._ratio
        return Trace(f"{self._rng.getrandbits(128) or 1:032x}", span_id, None, sampled)


def _is_valid(header: bytes, found: re.Match[bytes]) -> bool:
    if header.startswith(b"00") and len(header) != _ONLY_KNOWN_LENGTH:
        return False
    return int(found[1], 16) != 0 and int(found[2], 16) != 0


def traceparent(trace: Trace) -> bytes:
    """The header for the worker."""
    return f"00-{trace.trace_id}-{trace.span_id}-{_SAMPLED if trace.sampled else 0:02x}".encode()
