"""What a scrape of `/metrics` costs: CPU of the whole, and the longest stretch for which it holds up streams."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from random import Random

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from gateway.pool import WorkerState
from gateway.records import Endpoint, MissCause, Outcome, PrefixMode, Result, StageTimes, Tier, TrustState, WorkerId
from gateway.telemetry import (
    ClientReading,
    ConfigReading,
    Exposition,
    FeedReading,
    IndexReading,
    PoolReading,
    PrefixReading,
    ReplicaReading,
    RequestMetrics,
    SourceReading,
    WorkerReading,
)

_ROUNDS = 9
_REQUESTS_A_SERIES = 12


class Owners:
    """A fleet of `count` workers in which every number is told."""

    def __init__(self, count: int) -> None:
        self._names = [WorkerId(f"llama-{number:03}") for number in range(count)]

    def workers(self) -> Iterable[WorkerReading]:
        """Every worker."""
        states = tuple(state.value for state in WorkerState)
        for name in self._names:
            yield WorkerReading(
                worker=name,
                state="ready",
                states=states,
                inflight_requests=12,
                inflight_tokens=34_567,
                open_streams=12,
                waiting_requests=3.0,
                kv_usage=0.4312,
                load_age_s=0.731,
                trust=0.987,
                trust_state=TrustState.TRUSTED,
                findings=("no_replay",),
                blocks=dict.fromkeys(Tier, 123_456),
                polls_ok=86_400,
                polls_failed=3,
                breaker=0,
            )

    def feeds(self) -> Iterable[FeedReading]:
        """Every feed."""
        for name in self._names:
            yield FeedReading(
                worker=name,
                events={"stored": 1_234_567, "removed": 1_111_111, "cleared": 1},
                replays={"complete": 3, "history_gone": 1},
                age_s=0.05,
                blocks_stored=dict.fromkeys((Tier.GPU, Tier.CPU), 1_234_567),
                blocks_removed=dict.fromkeys((Tier.GPU, Tier.CPU), 1_111_111),
                ignored={"cache_group": 3},
                skipped={"unknown_kind": 2},
                purges={"restart": 1},
            )

    def pools(self) -> Iterable[PoolReading]:
        """One model."""
        return [PoolReading("llama", len(self._names), False, 0)]

    def clients(self) -> ClientReading:
        """The client port."""
        return ClientReading(1000, 1_000_000, 0)

    def index(self) -> IndexReading:
        """The index."""
        return IndexReading(bytes=1_000_000_000, learned_dropped={"size": 3, "age": 4})

    def replicas(self) -> ReplicaReading | None:
        """None."""
        return None

    def config(self) -> ConfigReading:
        return ConfigReading({"applied": 1}, False, 0)

    def sources(self) -> Iterable[SourceReading]:
        return [SourceReading("config", 200, 0, 1.0, None)]

    def prefixes(self) -> Iterable[PrefixReading]:
        """One model."""
        return [PrefixReading("llama", 9, 9000, 7000, 2, 640, (64, 128), (0, 3, 1), 500)]

    def task_restarts(self) -> int:
        """None."""
        return 0


def counted(workers: int) -> RequestMetrics:
    """Request counters after requests to each worker."""
    metrics = RequestMetrics(lambda _: True)
    rng = Random(1)
    for number in range(workers):
        for _ in range(_REQUESTS_A_SERIES):
            ttft_s = rng.expovariate(2.0)
            metrics.record(
                Outcome(
                    request_id="r",
                    endpoint=Endpoint.CHAT,
                    model="llama",
                    pool="default",
                    worker=WorkerId(f"llama-{number:03}"),
                    result=Result.COMPLETED,
                    status=rng.choice((200, 200, 429)),
                    stream=True,
                    started_at=0.0,
                    ended_at=ttft_s + 3.0,
                    prompt_tokens=4000,
                    available_tokens=3600,
                    predicted_tokens=3600,
                    delivered_tokens=3200,
                    completion_tokens=300,
                    missed_tokens=400,
                    miss_cause=rng.choice(tuple(MissCause)),
                    ttft_s=ttft_s,
                    inter_token_s=0.02,
                    mode=PrefixMode.EXACT,
                    stages=StageTimes(1e-4, 1e-3, 1e-4, 0.0, 1e-4),
                )
            )
    return metrics


def measure(*, workers: int = 200) -> dict[str, float]:
    """Milliseconds of CPU of a scrape, and of its longest piece; the least of some rounds."""
    process = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=process)
    exposition = Exposition(counted(workers), Owners(workers), process=process)
    whole, longest, size = [], [], 0
    for _ in range(_ROUNDS):
        steps = list(_timed(exposition))
        whole.append(sum(steps))
        longest.append(max(steps))
        size = len(exposition.render())
    return {
        "workers": workers,
        "scrape_ms": min(whole) * 1e3,
        "longest_piece_ms": min(longest) * 1e3,
        "page_kb": size / 1024,
    }


def _timed(exposition: Exposition) -> Iterator[float]:
    """CPU seconds of each piece."""
    pieces = exposition.pieces()
    more = True
    while more:
        began = time.process_time()
        more = next(pieces, None) is not None
        yield time.process_time() - began
