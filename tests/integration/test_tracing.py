"""Traces on the wire: the worker goes on with the caller's, and a collector gets the spans of a request."""

from __future__ import annotations

import gzip
from random import Random

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.telemetry.tracing import Tracing
from tests.integration.relay_rig import FakeWorker, answers, ask, post, relay, streams, until
from tests.integration.rig import rig

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALLER = f"traceparent: 00-{TRACE}-{SPAN}-01"
_OK = b'{"id":"x","choices":[]}'


async def test_the_worker_goes_on_with_the_callers_trace() -> None:
    async with relay(answers(_OK)) as running:
        running.edge.trace = Tracing(ratio=0.0, rng=Random(1)).begin
        await running.ask(post(ask(), headers=[CALLER, "tracestate: vendor=1"]))
        head = running.workers[0].calls[0].head.decode()
        trace = running.outcomes[0].trace
        assert trace is not None
        assert head.lower().count("traceparent") == 1
        assert f"traceparent: 00-{TRACE}-{trace.span_id}-01" in head
        assert "tracestate: vendor=1" in head


async def test_without_a_collector_the_callers_header_passes() -> None:
    async with relay(answers(_OK)) as running:
        await running.ask(post(ask(), headers=[CALLER]))
        assert CALLER in running.workers[0].calls[0].head.decode()
        assert running.outcomes[0].trace is None


async def test_every_way_out_keeps_its_trace() -> None:
    async with relay(streams(b"data: {}\n\n")) as running:
        running.edge.trace = Tracing(ratio=1.0, rng=Random(1)).begin
        await running.ask(post(b"not json", headers=[CALLER]))
        await running.ask(post(ask(stream=True), headers=[CALLER]))
        assert [outcome.trace is not None and outcome.trace.trace_id for outcome in running.outcomes] == [TRACE, TRACE]


class Collector(FakeWorker):
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__("collector", answers(b"{}"))

    def spans(self) -> list[Span]:
        found = []
        for call in self.calls:
            body = gzip.decompress(call.body) if call.headers.get("content-encoding") == "gzip" else call.body
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found += scope.spans
        return found


async def test_a_collector_gets_the_spans_of_a_request() -> None:
    collector = Collector()
    await collector.start()
    try:
        telemetry = {"otlp_endpoint": f"http://127.0.0.1:{collector.port}", "sample_ratio": 0}
        async with rig(1, settings={"telemetry": telemetry}) as running:
            secret = "the prompt is nobody's business"
            body = {"model": "demo", "prompt": secret, "max_tokens": 4, "stream": True}
            for headers in ({}, {"traceparent": f"00-{TRACE}-{SPAN}-01"}):
                assert (await running.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
            await until(running.quiet)
        await until(lambda: any(span.parent_span_id.hex() == SPAN for span in collector.spans()))
        spans = collector.spans()
        assert {span.trace_id.hex() for span in spans} == {TRACE}, "what is not sampled is not recorded"
        (root,) = [span for span in spans if span.parent_span_id.hex() == SPAN]
        inner = [span for span in spans if span.parent_span_id == root.span_id]
        assert root.name == "POST /v1/completions"
        assert [span.name for span in sorted(inner, key=lambda span: span.start_time_unix_nano)][-2:] == [
            "first_byte",
            "stream",
        ]
        assert {"parse", "prefix", "route", "connect"} <= {span.name for span in inner}
        assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in inner)
        assert all(span.end_time_unix_nano <= root.end_time_unix_nano + 1_000_000 for span in inner)
        told = {attribute.key: attribute.value for attribute in root.attributes}
        assert told["kvgate.worker"].string_value == "w1"
        assert told["http.response.status_code"].int_value == 200
        assert secret not in str(spans)
    finally:
        await collector.stop()


async def test_a_collector_that_is_away_costs_nobody_an_answer() -> None:
    async with rig(1, settings={"telemetry": {"otlp_endpoint": "http://127.0.0.1:9", "sample_ratio": 1}}) as running:
        body = {"model": "demo", "prompt": [1] * 20, "max_tokens": 1}
        for _ in range(20):
            assert (await running.http.post("/v1/completions", json=body)).status_code == 200
