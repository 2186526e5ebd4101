"""W3C Trace Context: what is gone on with, what begins anew, and what the worker is told."""

from __future__ import annotations

from random import Random

import pytest

from gateway.telemetry.tracing import Tracing, traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def tracing(ratio: float = 1.0) -> Tracing:
    return Tracing(ratio=ratio, rng=Random(1))


@pytest.mark.parametrize(("flags", "sampled"), [("01", True), ("00", False), ("03", True), ("ff", True), ("02", False)])
def test_a_callers_trace_goes_on_and_keeps_its_decision(flags: str, sampled: bool) -> None:
    trace = tracing(0.5).begin(f"00-{TRACE}-{SPAN}-{flags}".encode())
    assert (trace.trace_id, trace.parent_id, trace.sampled) == (TRACE, SPAN, sampled)
    assert trace.span_id != SPAN
    assert traceparent(trace) == f"00-{TRACE}-{trace.span_id}-{'01' if sampled else '00'}".encode()


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"nonsense",
        f"00-{'0' * 32}-{SPAN}-01".encode(),
        f"00-{TRACE}-{'0' * 16}-01".encode(),
        f"ff-{TRACE}-{SPAN}-01".encode(),
        f"00-{TRACE.upper()}-{SPAN}-01".encode(),
        f"00-{TRACE}-{SPAN}-01-more".encode(),
        f"00-{TRACE}-{SPAN}-0".encode(),
        f"00-{TRACE}-{SPAN}-01\n".encode(),
    ],
)
def test_what_is_not_well_formed_begins_a_trace(header: bytes | None) -> None:
    trace = tracing().begin(header)
    assert trace.parent_id is None
    assert trace.trace_id != TRACE
    assert (len(trace.trace_id), len(trace.span_id)) == (32, 16)


def test_a_later_version_may_be_longer() -> None:
    assert tracing().begin(f"01-{TRACE}-{SPAN}-01-what-comes".encode()).trace_id == TRACE


def test_the_ratio_decides_for_traces_that_begin_here() -> None:
    some = tracing(0.1)
    sampled = sum(some.begin(None).sampled for _ in range(2000))
    assert 100 < sampled < 320
    assert not tracing(0.0).begin(None).sampled


def test_ids_differ() -> None:
    one = tracing()
    begun = [one.begin(None) for _ in range(100)]
    assert len({trace.trace_id for trace in begun} | {trace.span_id for trace in begun}) == 200
