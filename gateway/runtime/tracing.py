"""Distributed tracing, where a collector is configured."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from random import Random
from typing import Protocol

from gateway.config import ConfigError
from gateway.records import Outcome, Trace
from gateway.settings import TelemetrySettings
from gateway.telemetry.tracing import Tracing


class SpanSink(Protocol):
    """Who records ended requests (`telemetry.spans.Spans`)."""

    def record(self, outcome: Outcome) -> None:
        """One ended request; never waits."""
        ...

    def close(self) -> None:
        """Send what waits."""
        ...


class Traces:
    """`begin` gives a request its place, `spans` records how it ended."""

    def __init__(self, begin: Callable[[bytes | None], Trace], spans: SpanSink) -> None:
        self.begin = begin
        self.spans = spans


def open_traces(
    telemetry: TelemetrySettings, *, rng: Random, clock: Callable[[], float], wall: Callable[[], float]
) -> Traces | None:
    """None without a collector. Raises ConfigError where the packages for it are missing."""
    if telemetry.otlp_endpoint is None:
        return None
    try:
        from gateway.telemetry.spans import Spans
    except ImportError as error:
        raise ConfigError(
            [f"telemetry.otlp_endpoint: {error.name} is not installed: pip install 'kvgate[tracing]'"]
        ) from error
    spans = Spans(telemetry.otlp_endpoint, version=metadata.version("kvgate"), clock=clock, wall=wall)
    return Traces(Tracing(ratio=telemetry.sample_ratio, rng=rng).begin, spans)
