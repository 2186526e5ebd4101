"""Recorded requests as spans of OpenTelemetry, sent to a collector over OTLP (HTTP). Needs the extra `kvgate[tracing]`.

Rules:
1. Spans are made when a request is over, from its outcome: nothing of this is in a request's way. A thread of the SDK
   sends them in batches; what does not fit its queue is dropped.
2. One span for the request, as the server's, and under it one for each phase that took time, in the order in which they
   happened: parse, prefix, queue, route, connect, first_byte, stream.
3. Attributes hold names and numbers; no prompt text, no keys, no addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from gateway.records import Outcome, Result

_PATH = "/v1/traces"
_FAULTS = frozenset({Result.WORKER_FAILED, Result.TIMED_OUT, Result.SHUT_DOWN})

Attribute = str | int | float | bool


class Spans:
    """`record` outcomes, then `close`. `endpoint` is the collector's base URL, such as http://collector:4318."""

    def __init__(self, endpoint: str, *, version: str, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # decided when the request began
            resource=Resource.create({SERVICE_NAME: "kvgate", SERVICE_VERSION: version}),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        url = endpoint if endpoint.endswith(_PATH) else endpoint.rstrip("/") + _PATH
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("kvgate")

    def record(self, outcome: Outcome) -> None:
        """Nothing for a request that is not to be recorded."""
        trace = outcome.trace
        if trace is None or not trace.sampled:
            return
        to_wall_s = self._wall() - self._clock()

        def at(moment: float) -> int:
            return int((moment + to_wall_s) * 1e9)

        parent = None
        trace_id = int(trace.trace_id, 16)
        if trace.parent_id is not None:
            caller = SpanContext(trace_id, int(trace.parent_id, 16), is_remote=True, trace_flags=TraceFlags(1))
            parent = set_span_in_context(NonRecordingSpan(caller))
        self._ids.take(trace_id, int(trace.span_id, 16))
        path = outcome.endpoint.value if outcome.endpoint is not None else "/"
        span = self._tracer.start_span(
            f"POST {path}",
            parent,
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(outcome, path)),
            start_time=at(outcome.started_at),
        )
        if outcome.result in _FAULTS or outcome.status >= 500:
            span.set_status(Status(StatusCode.ERROR, outcome.error_code))
        within = set_span_in_context(span)
        for name, since, until in _phases(outcome):
            self._tracer.start_span(name, within, start_time=at(since)).end(at(until))
        span.end(at(outcome.ended_at))

    def close(self) -> None:
        """Send what waits; blocks for some seconds when the collector does not answer."""
        self._provider.shutdown()


class _Ids(IdGenerator):
    """Random ids, but for the gateway's own span, whose ids the worker has been told."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._trace: int | None = None
        self._span: int | None = None

    def take(self, trace_id: int, span_id: int) -> None:
        """The next span has these."""
        self._trace, self._span = trace_id, span_id

    def generate_span_id(self) -> int:
        span, self._span = self._span, None
        return self._random.generate_span_id() if span is None else span

    def generate_trace_id(self) -> int:
        trace, self._trace = self._trace, None
        return self._random.generate_trace_id() if trace is None else trace


def _phases(outcome: Outcome) -> Iterator[tuple[str, float, float]]:
    stages, moment = outcome.stages, outcome.started_at
    for name, seconds in (
        ("parse", stages.parse_s),
        ("prefix", stages.prefix_s),
        ("queue", stages.queue_s),
        ("route", stages.route_s),
        ("connect", stages.connect_s),
    ):
        if seconds > 0:
            yield name, moment, moment + seconds
            moment += seconds
    if outcome.ttft_s is not None:
        first_at = outcome.started_at + outcome.ttft_s
        yield "first_byte", min(moment, first_at), first_at
        yield "stream", first_at, outcome.ended_at


def _attributes(outcome: Outcome, path: str) -> Iterator[tuple[str, Attribute]]:
    """OpenTelemetry's names where it has them (HTTP and GenAI conventions), else our own."""
    yield "http.request.method", "POST"
    yield "url.path", path
    yield "http.response.status_code", outcome.status
    yield "gen_ai.request.model", outcome.model
    yield "kvgate.request_id", outcome.request_id
    yield "kvgate.result", outcome.result.value
    yield "kvgate.prompt_tokens", outcome.prompt_tokens
    yield "kvgate.available_tokens", outcome.available_tokens
    yield "kvgate.predicted_tokens", outcome.predicted_tokens
    yield "kvgate.retries", outcome.retries
    yield "kvgate.affinity", outcome.affinity
    if outcome.hedged is not None:
        yield "kvgate.hedged", outcome.hedged.value
    if outcome.worker is not None:
        yield "kvgate.worker", outcome.worker
        yield "kvgate.pool", outcome.pool
    if outcome.delivered_tokens is not None:
        yield "kvgate.delivered_tokens", outcome.delivered_tokens
    if outcome.miss_cause is not None:
        yield "kvgate.miss_cause", outcome.miss_cause.value
    if outcome.completion_tokens is not None:
        yield "gen_ai.usage.output_tokens", outcome.completion_tokens
    if outcome.error_code is not None:
        yield "error.type", outcome.error_code
    if outcome.tenant is not None:
        yield "kvgate.tenant", outcome.tenant
