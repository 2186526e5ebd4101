"""Request counters: one record in, a few additions.

Rules:
1. To count a request costs additions only: series are found in one look-up and hold plain numbers: 2 us, where
   prometheus_client's own objects (a lock for each of the sixteen numbers) take 9 us. `record` only keeps it; what is
   kept is counted when somebody looks, or when it is some: one alone costs five times as much, since the processor has
   forgotten the code by then.
2. A model name that nobody serves is a client's word and becomes `unknown`; no worker becomes `none`.
3. A request that ends when its worker has left, or a moment before, counts under the worker `gone`: names that are not
   used again (pods) would fill the table for ever.
4. The number of series is bounded: what does not fit is counted under `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from gateway.records import Outcome, PrefixMode, StageTimes, Tier, WorkerId

UNKNOWN, NONE, OTHER, GONE = "unknown", "none", "other", "gone"

MAX_SERIES = 1000
"""Sets of (model, pool, worker): 64 workers with 15 adapters each. More would make a scrape take longer than 50 ms."""

_KEPT = 32
"""Ended requests counted in one go, 60 us."""

STAGES = ("parse", "prefix", "route", "queue", "connect")

REQUEST_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800)
"""A refused request to the longest allowed answer (`timeouts.total_s`)."""
TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120)
"""A full hit on an idle worker to the first-byte deadline; dense where objectives are set, 0.2 to 5 s."""
INTER_TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
"""A small model alone to a worker that swaps."""
QUEUE_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120)
"""A moment between two prefills to the longest wait (`admission.queue_timeout_s`), with room above."""
OVERHEAD_BOUNDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
"""10 us (a short body) to a second (a queue); the budgets of 1 ms and 5 ms are bounds."""


class Histogram:
    """Counts by bucket and a sum. `counts` has one more entry than `bounds`: what lies above the last."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """One that was counted elsewhere."""
        histogram = cls(bounds)
        histogram.counts, histogram.total = list(counts), total
        return histogram

    def observe(self, value: float) -> None:
        """A bucket holds values up to and including its bound, as Prometheus's `le` says."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class RequestSeries:
    """The numbers of one (model, pool, worker)."""

    __slots__ = (
        "available",
        "codes",
        "delivered",
        "gone",
        "inter_token",
        "labels",
        "predicted",
        "promised",
        "prompt",
        "reported",
        "seconds",
        "ttft",
    )

    def __init__(self, labels: tuple[str, str, str]) -> None:
        self.labels = labels
        self.gone = labels[2] == GONE
        self.codes: dict[int, int] = {}
        self.seconds = Histogram(REQUEST_BOUNDS)
        self.ttft = Histogram(TTFT_BOUNDS)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS)
        self.prompt = self.available = self.predicted = self.promised = self.delivered = self.reported = 0


class RequestMetrics:
    """All request counters of the process. `record` is what the edge calls with each outcome."""

    def __init__(
        self,
        is_model: Callable[[str], bool],
        *,
        is_worker: Callable[[WorkerId], bool] = lambda _: True,
        max_series: int = MAX_SERIES,
    ) -> None:
        self._counts = RequestCounts(is_model, is_worker, max_series)
        self._kept: list[Outcome] = []

    @property
    def counts(self) -> RequestCounts:
        """Every request that was recorded, counted."""
        self._count()
        return self._counts

    def record(self, outcome: Outcome) -> None:
        """One ended request."""
        kept = self._kept
        kept.append(outcome)
        if len(kept) >= _KEPT:
            self._count()

    def record_retry(self, attempt: Outcome) -> None:
        """An attempt that failed before its first byte and was followed by one on another worker. It is no request of
        its own; the reason is its error, else the worker's HTTP status."""
        retries, reason = self._counts.retries, attempt.error_code or f"http_{attempt.status}"
        retries[reason] = retries.get(reason, 0) + 1

    def forget(self, worker: WorkerId) -> None:
        """Drop the series of a worker that left the fleet, so that a fleet that scales does not pile them up."""
        self.counts.forget(worker)

    def _count(self) -> None:
        kept, counts = self._kept, self._counts
        kept.reverse()
        while kept:
            counts.count(kept.pop())  # one that cannot be counted takes no others with it


class RequestCounts:
    """The counters. Changed by `RequestMetrics` only."""

    def __init__(self, is_model: Callable[[str], bool], is_worker: Callable[[WorkerId], bool], max_series: int) -> None:
        self._is_model = is_model
        self._is_worker = is_worker
        self._max_series = max_series
        self._series: dict[tuple[str, str, WorkerId | None], RequestSeries] = {}
        self.stages = {stage: Histogram(OVERHEAD_BOUNDS) for stage in STAGES}
        self.queue = Histogram(QUEUE_BOUNDS)
        self._stage_list = tuple(self.stages.values())
        self.predictions: dict[WorkerId, int] = {}
        self.misses: dict[tuple[WorkerId, str], int] = {}
        self.hits: dict[tuple[WorkerId, Tier], int] = {}
        """Delivered tokens by the tier they were predicted in."""
        self.affinity: dict[str, int] = {}
        self.retries: dict[str, int] = {}
        self.modes: dict[PrefixMode, int] = {}
        self.results: dict[tuple[str, str], int] = {}
        """By (worker, result): a stream that was cut has code 200, and `worker_failed` here."""

    def series(self) -> Iterator[RequestSeries]:
        """Every series there is."""
        return iter(self._series.values())

    def count(self, outcome: Outcome) -> None:
        """Count one ended request."""
        worker = outcome.worker
        series = self._series.get((outcome.model, outcome.pool, worker)) or self._open(outcome)
        status = outcome.status
        series.codes[status] = series.codes.get(status, 0) + 1
        ended = (series.labels[2], outcome.result)
        self.results[ended] = self.results.get(ended, 0) + 1
        series.seconds.observe(outcome.ended_at - outcome.started_at)
        if outcome.ttft_s is not None:
            series.ttft.observe(outcome.ttft_s)
        if outcome.inter_token_s is not None:
            series.inter_token.observe(outcome.inter_token_s)
        if outcome.stages is not _NO_STAGES:
            for histogram, seconds in zip(self._stage_list, outcome.stages, strict=True):
                if seconds > 0.0:
                    histogram.observe(seconds)
            if outcome.stages.queue_s > 0.0:
                self.queue.observe(outcome.stages.queue_s)
        if worker is None:
            return
        self.modes[outcome.mode] = self.modes.get(outcome.mode, 0) + 1
        affinity = outcome.affinity
        self.affinity[affinity] = self.affinity.get(affinity, 0) + 1
        series.prompt += outcome.prompt_tokens
        series.available += outcome.available_tokens
        series.predicted += outcome.predicted_tokens
        series.promised += outcome.promised_tokens
        delivered = outcome.delivered_tokens
        if delivered is None:
            return
        series.delivered += delivered
        series.reported += outcome.prompt_tokens
        if delivered and not series.gone:
            if outcome.slow_tokens:
                self._count_by_tier(worker, delivered, outcome)
            else:
                fast = (worker, Tier.GPU)
                self.hits[fast] = self.hits.get(fast, 0) + delivered
        promised = outcome.predicted_tokens > 0 or outcome.missed_tokens > 0
        if promised and outcome.mode is not PrefixMode.NONE and not series.gone:
            self.predictions[worker] = self.predictions.get(worker, 0) + 1
            if outcome.missed_tokens > 0:
                cause = outcome.miss_cause.value if outcome.miss_cause is not None else UNKNOWN
                self.misses[worker, cause] = self.misses.get((worker, cause), 0) + 1

    def _count_by_tier(self, worker: WorkerId, delivered: int, outcome: Outcome) -> None:
        """Which tier a hit came from is not reported: it is laid over the prediction from the start of the prompt, the
        fast tier first; what goes beyond it counts as the fast tier's."""
        left = delivered
        fast = outcome.predicted_tokens - sum(outcome.slow_tokens.values())
        for tier, predicted in ((Tier.GPU, fast), *outcome.slow_tokens.items()):
            part = min(left, predicted)
            if part > 0:
                self.hits[worker, tier] = self.hits.get((worker, tier), 0) + part
                left -= part
        if left:
            self.hits[worker, Tier.GPU] = self.hits.get((worker, Tier.GPU), 0) + left

    def forget(self, worker: WorkerId) -> None:
        """Drop the series of a worker."""
        for key in [key for key in self._series if key[2] == worker]:
            del self._series[key]
        self.predictions.pop(worker, None)
        for ended in [ended for ended in self.results if ended[0] == worker]:
            del self.results[ended]
        for tier in Tier:
            self.hits.pop((worker, tier), None)
        for miss in [miss for miss in self.misses if miss[0] == worker]:
            del self.misses[miss]

    def _open(self, outcome: Outcome) -> RequestSeries:
        model, pool = outcome.model, outcome.pool
        if outcome.worker is None and not self._is_model(model):
            model, pool = UNKNOWN, NONE
        worker = outcome.worker
        if worker is not None and not self._is_worker(worker):
            worker = WorkerId(GONE)
        key = (model, pool or NONE, worker)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= self._max_series:
                key = (OTHER, OTHER, None)
                if (series := self._series.get(key)) is not None:
                    return series
            labels = (key[0], key[1], key[2] if key[2] is not None else NONE)
            series = self._series[key] = RequestSeries(labels if key[0] != OTHER else (OTHER, OTHER, OTHER))
        return series


_NO_STAGES = StageTimes()
