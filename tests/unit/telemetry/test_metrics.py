"""Counters of outcomes and the text of /metrics: right numbers, right form, bounded labels."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from gateway.records import Endpoint, MissCause, Outcome, PrefixMode, Result, StageTimes, Tier, TrustState, WorkerId
from gateway.telemetry import (
    ClientReading,
    ConfigReading,
    Exposition,
    FeedReading,
    IndexReading,
    LifeReading,
    PeerReading,
    PoolReading,
    PrefixReading,
    ReplicaReading,
    RequestMetrics,
    SourceReading,
    WorkerReading,
    describe_metrics,
)

W1, W2 = WorkerId("w1"), WorkerId("w2")


def outcome(**changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "endpoint": Endpoint.CHAT,
        "model": "llama",
        "pool": "default",
        "worker": W1,
        "result": Result.COMPLETED,
        "status": 200,
        "stream": True,
        "started_at": 10.0,
        "ended_at": 12.0,
        "prompt_tokens": 1000,
        "available_tokens": 800,
        "predicted_tokens": 640,
        "delivered_tokens": 624,
        "completion_tokens": 50,
        "ttft_s": 0.3,
        "inter_token_s": 0.02,
        "mode": PrefixMode.EXACT,
        "stages": StageTimes(parse_s=1e-4, prefix_s=2e-3, route_s=5e-5, connect_s=0.0),
    }
    return Outcome(**{**fields, **changes})


class Numbers:
    """Owners with fixed numbers."""

    def __init__(
        self,
        workers: Sequence[WorkerReading] = (),
        feeds: Sequence[FeedReading] = (),
        index: IndexReading | None = None,
    ) -> None:
        self._workers, self._feeds, self._index = workers, feeds, index or IndexReading(bytes=0)

    def workers(self) -> Iterable[WorkerReading]:
        return self._workers

    def rename(self, name: WorkerId) -> None:
        self._workers = [replace(worker, worker=name) for worker in self._workers]

    def feeds(self) -> Iterable[FeedReading]:
        return self._feeds

    def pools(self) -> Iterable[PoolReading]:
        queued = {"high": 0, "normal": 2, "low": 1}
        hedges, refused = {"won": 2}, {"busy": 5}
        return [
            PoolReading(
                "llama", 2, True, 3, queued=queued, shed={"queue_full": 4}, hedges=hedges, hedges_refused=refused
            )
        ]

    def replicas(self) -> ReplicaReading | None:
        return ReplicaReading(
            "01",
            "server redis:6379",
            True,
            0.002,
            None,
            {"sent": 4, "heard": 9},
            {"sent": 400, "heard": 900},
            {"version": 2},
            1,
            {"restored": 3, "none": 1},
            (PeerReading("02", 0.5, 60.0, 3, 1, 0),),
        )

    def sources(self) -> Iterable[SourceReading]:
        return [
            SourceReading("config", 2, 0, 1.5, None),
            SourceReading("dns:vllm.example", 0, 0, None, "no answer"),
        ]

    def config(self) -> ConfigReading:
        return ConfigReading({"applied": 2, "refused": 1}, True, 3)

    def prefixes(self) -> Iterable[PrefixReading]:
        return [PrefixReading("llama", 9, 9000, 7000, 2, 640, (64, 128), (0, 3, 1), 500)]

    def task_restarts(self) -> int:
        return 3

    def clients(self) -> ClientReading:
        return ClientReading(7, 4096, 2)

    def index(self) -> IndexReading:
        return self._index


def counters(*outcomes: Outcome, max_series: int = 1000) -> RequestMetrics:
    metrics = RequestMetrics(lambda name: name in ("llama", "qwen"), max_series=max_series)
    for item in outcomes:
        metrics.record(item)
    return metrics


def page(requests: RequestMetrics, numbers: Numbers | None = None) -> str:
    return Exposition(requests, numbers or Numbers(), process=CollectorRegistry()).render().decode()


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(text: str, name: str, **labels: str) -> float:
    found = [sample.value for sample in samples(text) if sample.name == f"kvgate_{name}" and sample.labels == labels]
    assert len(found) == 1, (name, labels, found)
    return found[0]


LLAMA = {"model": "llama", "pool": "default", "worker": "w1"}


def full_page() -> str:
    miss = outcome(delivered_tokens=0, missed_tokens=640, miss_cause=MissCause.UNKNOWN, affinity="moved")
    requests = counters(outcome(), miss, outcome(worker=None, pool="", status=404, model="no such"))
    requests.record_retry(outcome(error_code="worker_unreachable", status=502))
    worker = WorkerReading(
        worker=W1,
        state="ready",
        states=("ready", "draining", "gone"),
        breaker=2,
        inflight_requests=3,
        inflight_tokens=4096,
        open_streams=3,
        waiting_requests=2.0,
        kv_usage=0.25,
        load_age_s=0.4,
        trust=1.0,
        trust_state=TrustState.UNCERTAIN,
        tightened=True,
        relearned=2,
        findings=("identity", "no_replay"),
        blocks={Tier.GPU: 100, Tier.CPU: 7},
        learned_blocks=9,
        polls_ok=12,
        polls_failed=1,
    )
    feed = FeedReading(
        worker=W1,
        events={"stored": 5, "removed": 2},
        gaps=1,
        replays={"complete": 1},
        resets=1,
        errors=0,
        age_s=0.1,
        blocks_stored={Tier.GPU: 110},
        block_lives={Tier.GPU: LifeReading((1, 5), (0, 2, 1), 30.0, 5.0)},
        blocks_removed={Tier.GPU: 10},
        ignored={"cache_group": 3},
        skipped={"unknown_kind": 2},
        purges={"restart": 1},
        repeated=6,
        overflows=8,
        reconnects=2,
        silences=1,
    )
    return page(
        requests,
        Numbers(
            [worker],
            [feed],
            IndexReading(bytes=12345, orphans=4, truncated=2, learned_dropped={"age": 3}, tokens_asked={"told": 2}),
        ),
    )


# --------------------------------------------------------------------------- counting


def test_one_outcome_is_counted_everywhere() -> None:
    text = page(counters(outcome()))
    assert value(text, "requests_total", **LLAMA, code="200") == 1
    assert value(text, "prompt_tokens_total", **LLAMA) == 1000
    assert value(text, "available_tokens_total", **LLAMA) == 800
    assert value(text, "predicted_tokens_total", **LLAMA) == 640
    assert value(text, "delivered_tokens_total", **LLAMA) == 624
    assert value(text, "reported_prompt_tokens_total", **LLAMA) == 1000
    assert value(text, "route_predictions_total", worker="w1") == 1
    assert value(text, "affinity_total", result="none") == 1
    assert value(text, "request_seconds_sum", **LLAMA) == 2
    assert value(text, "ttft_seconds_sum", **LLAMA) == pytest.approx(0.3)
    assert value(text, "inter_token_seconds_count", **LLAMA) == 1


def test_buckets_are_cumulative_and_include_their_bound() -> None:
    text = page(counters(outcome(ttft_s=0.3), outcome(ttft_s=0.31), outcome(ttft_s=1000.0)))
    assert value(text, "ttft_seconds_bucket", **LLAMA, le="0.2") == 0
    assert value(text, "ttft_seconds_bucket", **LLAMA, le="0.3") == 1
    assert value(text, "ttft_seconds_bucket", **LLAMA, le="0.5") == 2
    assert value(text, "ttft_seconds_bucket", **LLAMA, le="120.0") == 2
    assert value(text, "ttft_seconds_bucket", **LLAMA, le="+Inf") == 3
    assert value(text, "ttft_seconds_count", **LLAMA) == 3


def test_stages_that_took_time_are_counted() -> None:
    text = page(counters(outcome()))
    assert value(text, "overhead_seconds_count", stage="prefix") == 1
    assert value(text, "overhead_seconds_sum", stage="prefix") == pytest.approx(2e-3)
    assert value(text, "overhead_seconds_count", stage="connect") == 0


def test_an_unreported_hit_is_no_miss() -> None:
    text = page(counters(outcome(delivered_tokens=None)))
    assert value(text, "predicted_tokens_total", **LLAMA) == 640
    assert value(text, "delivered_tokens_total", **LLAMA) == 0
    assert value(text, "reported_prompt_tokens_total", **LLAMA) == 0
    assert "kvgate_route_predictions_total{" not in text


@pytest.mark.parametrize("changes", [{"predicted_tokens": 0}, {"mode": PrefixMode.NONE}])
def test_what_was_not_predicted_cannot_miss(changes: Mapping[str, Any]) -> None:
    text = page(counters(outcome(**changes)))
    assert "kvgate_route_predictions_total{" not in text
    assert value(text, "delivered_tokens_total", **LLAMA) == 624


@pytest.mark.parametrize(
    ("delivered", "hits"),
    [
        (640, {"gpu": 400, "cpu": 200, "disk": 40}),
        (500, {"gpu": 400, "cpu": 100}),
        (300, {"gpu": 300}),
        (700, {"gpu": 460, "cpu": 200, "disk": 40}),  # more than was predicted
        (0, {}),
    ],
)
def test_hits_are_laid_over_the_tiers_they_were_predicted_in(delivered: int, hits: Mapping[str, int]) -> None:
    metrics = RequestMetrics(lambda _: True)
    slow = {Tier.CPU: 200, Tier.DISK: 40}
    metrics.record(outcome(predicted_tokens=640, delivered_tokens=delivered, slow_tokens=slow))
    assert metrics.counts.hits == {(W1, Tier(tier)): tokens for tier, tokens in hits.items()}
    metrics.forget(W1)
    assert metrics.counts.hits == {}


def test_misses_by_cause() -> None:
    text = page(counters(outcome(missed_tokens=640, miss_cause=MissCause.UNKNOWN), outcome()))
    assert value(text, "route_misses_total", worker="w1", cause="unknown") == 1
    assert value(text, "route_predictions_total", worker="w1") == 2


def test_retries_are_no_requests() -> None:
    requests = counters()
    requests.record_retry(outcome(error_code="worker_broken"))
    requests.record_retry(outcome(status=503))
    text = page(requests)
    assert value(text, "retries_total", reason="worker_broken") == 1
    assert value(text, "retries_total", reason="http_503") == 1
    assert "kvgate_requests_total{" not in text


# --------------------------------------------------------------------------- labels


def test_models_nobody_serves_share_one_label() -> None:
    refused = [outcome(model=f"guess-{i}", pool="", worker=None, status=404, ttft_s=None) for i in range(50)]
    requests = counters(*refused)
    assert len(list(requests.counts.series())) == 1
    assert value(page(requests), "requests_total", model="unknown", pool="none", worker="none", code="404") == 50


def test_a_served_model_without_a_worker_keeps_its_name() -> None:
    text = page(counters(outcome(worker=None, status=503)))
    assert value(text, "requests_total", model="llama", pool="default", worker="none", code="503") == 1
    assert "kvgate_affinity_total{" not in text


def test_one_that_cannot_be_counted_takes_no_others_with_it() -> None:
    metrics = counters(outcome(), outcome(stages=None), outcome(), outcome())  # no stage times at all
    with pytest.raises((AttributeError, TypeError)):
        page(metrics)
    text = page(metrics)
    assert value(text, "requests_total", **LLAMA, code="200") >= 3


def test_series_are_bounded() -> None:
    many = [outcome(worker=WorkerId(f"w{i}")) for i in range(10)]
    requests = counters(*many, *many, max_series=3)
    assert len(list(requests.counts.series())) <= 4
    text = page(requests)
    assert value(text, "requests_total", model="other", pool="other", worker="other", code="200") == 14


def test_a_worker_that_left_leaves_no_series() -> None:
    requests = counters(outcome(missed_tokens=640), outcome(worker=W2))
    requests.forget(W1)
    text = page(requests)
    assert 'worker="w1"' not in text
    assert value(text, "requests_total", **{**LLAMA, "worker": "w2"}, code="200") == 1


def test_odd_names_are_escaped() -> None:
    requests = RequestMetrics(lambda _: True)
    requests.record(outcome(model='a"b\\c\nd'))
    assert value(page(requests), "requests_total", **{**LLAMA, "model": 'a"b\\c\nd'}, code="200") == 1


# --------------------------------------------------------------------------- the page


def test_gauges_come_from_their_owners() -> None:
    text = full_page()
    assert value(text, "worker_state", worker="w1", state="ready") == 1
    assert value(text, "worker_state", worker="w1", state="gone") == 0
    assert value(text, "breaker_state", worker="w1") == 2
    assert value(text, "pool_ready_workers", model="llama") == 2
    assert value(text, "pool_panic", model="llama") == 1
    assert value(text, "retries_refused_total", model="llama") == 3
    assert value(text, "hedges_total", pool="llama", outcome="won") == 2
    assert value(text, "hedges_refused_total", pool="llama", reason="busy") == 5
    assert value(text, "worker_inflight_tokens", worker="w1") == 4096
    assert value(text, "worker_kv_usage_ratio", worker="w1") == 0.25
    assert value(text, "accounting_drift", worker="w1") == 0
    assert value(text, "index_blocks", worker="w1", tier="cpu") == 7
    assert value(text, "index_bytes") == 12345
    assert value(text, "client_connections") == 7
    assert value(text, "config_reloads_total", result="applied") == 2
    assert value(text, "config_stale") == 1
    assert value(text, "config_needs_restart") == 3
    assert value(text, "client_buffered_bytes") == 4096
    assert value(text, "client_turned_away_total") == 2
    assert value(text, "index_truncated_total") == 2
    assert value(text, "kv_events_total", worker="w1", type="stored") == 5
    assert value(text, "kv_event_replays_total", worker="w1", result="complete") == 1
    assert value(text, "kv_events_skipped_total", worker="w1", reason="unknown_kind") == 2
    assert value(text, "kv_event_purges_total", worker="w1", reason="restart") == 1
    assert value(text, "kv_event_overflows_total", worker="w1") == 8
    assert value(text, "kv_event_reconnects_total", worker="w1") == 2
    assert value(text, "kv_event_silences_total", worker="w1") == 1
    assert value(text, "kv_blocks_repeated_total", worker="w1") == 6
    assert value(text, "load_polls_total", worker="w1", result="failed") == 1
    assert value(text, "retries_total", reason="worker_unreachable") == 1


def test_drift_shows_a_lost_stream() -> None:
    worker = WorkerReading(W1, "ready", ("ready",), inflight_requests=5, inflight_tokens=0, open_streams=3)
    assert value(page(counters(), Numbers([worker])), "accounting_drift", worker="w1") == 2


def test_numbers_nobody_knows_are_absent() -> None:
    worker = WorkerReading(W1, "ready", ("ready",), inflight_requests=0, inflight_tokens=0, open_streams=0)
    text = page(counters(), Numbers([worker], [FeedReading(W1)]))
    for name in ("worker_waiting_requests", "worker_kv_usage_ratio", "worker_load_age_seconds", "kv_event_age_seconds"):
        assert f"kvgate_{name}{{" not in text
        assert f"# TYPE kvgate_{name} gauge" in text


def test_every_described_metric_is_on_the_page_with_its_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(full_page())}
    described = describe_metrics()
    assert len({name for name, _, _, _ in described}) == len(described)
    for name, kind, labels, text in described:
        family = families.pop(name.removesuffix("_total") if kind == "counter" else name)
        assert (family.type, family.documentation) == (kind, text)
        assert family.samples, name
        for sample in family.samples:
            assert tuple(label for label in sample.labels if label != "le") == labels
    assert not families, "every metric on the page is described"


def test_a_page_is_made_in_small_pieces() -> None:
    workers = [
        WorkerReading(WorkerId(f"w{number}"), "ready", ("ready", "gone"), inflight_requests=0, inflight_tokens=0,
                      open_streams=0, trust=1.0)
        for number in range(700)
    ]  # fmt: skip
    requests = RequestMetrics(lambda _: True)
    for worker in workers[:100]:
        requests.record(outcome(worker=worker.worker))
    exposition = Exposition(requests, Numbers(workers), process=CollectorRegistry())
    pieces = list(exposition.pieces())
    assert max(piece.count(b"\n") for piece in pieces) <= 400
    assert b"".join(pieces) == exposition.render()


def test_label_texts_of_workers_that_left_are_not_kept() -> None:
    owners = Numbers([WorkerReading(W1, "ready", ("ready",), 0, 0, 0)])
    exposition = Exposition(RequestMetrics(lambda _: True), owners, process=CollectorRegistry())
    assert b'worker="w1"' in exposition.render()
    owners.rename(W2)
    assert b'worker="w1"' not in exposition.render()
    assert all("w1" not in text for text in exposition.label_texts.values())


def test_metrics_of_the_process_are_part_of_the_page() -> None:
    registry = CollectorRegistry()
    Gauge("process_example", "An example.", registry=registry).set(3)
    text = Exposition(counters(), Numbers(), process=registry).render().decode()
    assert [s.value for s in samples(text) if s.name == "process_example"] == [3]


def test_promtool_finds_nothing_to_say() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=full_page().encode(), capture_output=True, check=False, timeout=60
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_a_request_that_ends_after_its_worker_left_makes_no_series_of_it() -> None:
    """Names of pods are not used again: their series would fill the table, and all newcomers be `other`."""
    present = {"w1"}
    requests = RequestMetrics(lambda _: True, is_worker=present.__contains__, max_series=3)
    requests.record(outcome(predicted_tokens=100))
    present.clear()
    requests.forget(WorkerId("w1"))
    for number in range(10):
        requests.record(outcome(worker=WorkerId(f"pod-{number}"), predicted_tokens=100, missed_tokens=50))
    (series,) = requests.counts.series()
    assert series.labels[2] == "gone"
    assert sum(series.codes.values()) == 11
    assert (requests.counts.predictions, requests.counts.misses) == ({}, {})
