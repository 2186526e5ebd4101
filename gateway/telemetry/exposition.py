"""The text of `/metrics`: reads every owner once and writes the Prometheus text format 0.0.4.

Rules:
1. Owners are read at once, so that gauges show one moment; counters family by family. All of it runs on the loop
   thread, where they are changed, so no lock is needed.
2. Written directly, not through prometheus_client's `generate_latest`: with 64 workers that takes 50 ms on the loop,
   this a tenth. Process and garbage-collector metrics come from the prometheus_client registry that is passed in.
3. A number nobody knows yet is left out: absent is honest, 0 would be a claim.
4. A page of 200 workers takes ten milliseconds, so it is made in pieces of two milliseconds at most; whoever serves
   it lets streams go on in between (`pieces`).
5. Label texts are kept from one page to the next, those of the last page only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from prometheus_client import CollectorRegistry, generate_latest

from gateway.records import TrustState
from gateway.telemetry import metrics as m
from gateway.telemetry.metrics import MetricSpec
from gateway.telemetry.readings import FeedReading, PrefixReading, Readings, ReplicaReading, WorkerReading
from gateway.telemetry.requests import Histogram, RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


_SAMPLES = 250
"""Of counters and gauges in a piece."""
_HISTOGRAMS = 16
"""In a piece: some twenty lines each."""

_LabelTexts = dict[tuple[tuple[str, ...], tuple[str, ...]], str]


class Exposition:
    """Everything a scrape shows. `process` holds what prometheus_client knows of the process itself."""

    def __init__(self, requests: RequestMetrics, readings: Readings, *, process: CollectorRegistry) -> None:
        self._requests = requests
        self._readings = readings
        self._process = process
        self.label_texts: _LabelTexts = {}
        """Of the last page."""

    def render(self) -> bytes:
        """The exposition as UTF-8, at once; every family of `METRICS` is in it, also without a series."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The same in pieces (rule 4)."""
        page = _Page(self.label_texts)
        for piece in self._texts(page):
            yield piece.encode()
        self.label_texts = page.label_texts
        yield generate_latest(self._process)

    def _texts(self, page: _Page) -> Iterator[str]:
        workers, feeds = list(self._readings.workers()), list(self._readings.feeds())
        pools, clients, index = list(self._readings.pools()), self._readings.clients(), self._readings.index()
        restarts, replicas, config = self._readings.task_restarts(), self._readings.replicas(), self._readings.config()
        prefixes, sources = list(self._readings.prefixes()), list(self._readings.sources())
        yield from self._write_requests(page)
        yield from _write_workers(page, workers)
        yield from page.family(m.RETRIES_REFUSED, [((pool.model,), pool.retries_refused) for pool in pools])
        yield from page.family(
            m.QUEUE_DEPTH, [((pool.model, name), depth) for pool in pools for name, depth in pool.queued.items()]
        )
        yield from page.family(
            m.SHED, [((pool.model, reason), count) for pool in pools for reason, count in pool.shed.items()]
        )
        yield from page.family(m.HEDGES, [((pool.model, kind), n) for pool in pools for kind, n in pool.hedges.items()])
        yield from page.family(
            m.HEDGES_REFUSED, [((pool.model, why), n) for pool in pools for why, n in pool.hedges_refused.items()]
        )
        yield from page.family(m.POOL_READY, [((pool.model,), pool.ready) for pool in pools])
        yield from page.family(m.POOL_PANIC, [((pool.model,), int(pool.panic)) for pool in pools])
        yield from page.family(m.SHARD_SPILLS, [((pool.model,), pool.spilled) for pool in pools])
        yield from page.family(m.CLIENT_CONNECTIONS, [((), clients.connections)])
        yield from page.family(m.CLIENT_BUFFERED, [((), clients.buffered_bytes)])
        yield from page.family(m.CLIENT_TURNED_AWAY, [((), clients.turned_away)])
        yield from page.family(m.INDEX_BYTES, [((), index.bytes)])
        yield from page.family(m.INDEX_ORPHANS, [((), index.orphans)])
        yield from page.family(m.INDEX_TRUNCATED, [((), index.truncated)])
        yield from page.family(m.INDEX_LEARNED_DROPPED, [((reason,), n) for reason, n in index.learned_dropped.items()])
        yield from page.family(m.TOKENIZE_QUESTIONS, [((result,), n) for result, n in index.tokens_asked.items()])
        yield from page.family(m.CONFIG_RELOADS, [((result,), n) for result, n in config.reloads.items()])
        yield from page.family(m.CONFIG_STALE, [((), int(config.refused))])
        yield from page.family(m.CONFIG_NEEDS_RESTART, [((), config.needs_restart)])
        yield from page.family(m.TASK_RESTARTS, [((), restarts)])
        yield from page.family(m.DISCOVERY_WORKERS, [((source.source,), source.workers) for source in sources])
        yield from page.family(m.DISCOVERY_UP, [((source.source,), int(source.error is None)) for source in sources])
        yield from page.family(m.DISCOVERY_AGE, [((source.source,), source.age_s) for source in sources])
        yield from _write_prefixes(page, prefixes)
        yield from _write_replicas(page, replicas)
        yield from _write_feeds(page, feeds)

    def _write_requests(self, page: _Page) -> Iterator[str]:
        requests = self._requests.counts
        series = list(requests.series())
        sent = [s for s in series if s.prompt]
        yield from page.family(m.REQUESTS, [((*s.labels, str(code)), n) for s in series for code, n in s.codes.items()])
        yield from page.histograms(m.REQUEST_SECONDS, [(s.labels, s.seconds) for s in series])
        yield from page.histograms(m.TTFT_SECONDS, [(s.labels, s.ttft) for s in series])
        yield from page.histograms(m.INTER_TOKEN_SECONDS, [(s.labels, s.inter_token) for s in series])
        yield from page.family(m.PREFIX_MODES, [((mode,), n) for mode, n in requests.modes.items()])
        yield from page.histograms(
            m.OVERHEAD_SECONDS, [((stage,), seconds) for stage, seconds in requests.stages.items()]
        )
        yield from page.histograms(m.QUEUE_SECONDS, [((), requests.queue)])
        yield from page.family(m.PROMPT_TOKENS, [(s.labels, s.prompt) for s in sent])
        yield from page.family(m.AVAILABLE_TOKENS, [(s.labels, s.available) for s in sent])
        yield from page.family(m.PREDICTED_TOKENS, [(s.labels, s.predicted) for s in sent])
        yield from page.family(m.PROMISED_TOKENS, [(s.labels, s.promised) for s in sent])
        yield from page.family(m.DELIVERED_TOKENS, [(s.labels, s.delivered) for s in sent])
        yield from page.family(m.REPORTED_PROMPT_TOKENS, [(s.labels, s.reported) for s in sent])
        yield from page.family(m.ROUTE_PREDICTIONS, [((worker,), n) for worker, n in requests.predictions.items()])
        yield from page.family(m.ROUTE_MISSES, requests.misses.items())
        yield from page.family(m.HIT_TOKENS, list(requests.hits.items()))
        yield from page.family(m.AFFINITY, [((result,), n) for result, n in requests.affinity.items()])
        yield from page.family(m.REQUEST_RESULTS, requests.results.items())
        yield from page.family(m.RETRIES, [((reason,), n) for reason, n in requests.retries.items()])


def _write_workers(page: _Page, workers: Sequence[WorkerReading]) -> Iterator[str]:
    yield from page.family(m.WORKER_STATE, [((w.worker, s), int(s == w.state)) for w in workers for s in w.states])
    yield from page.family(m.BREAKER_STATE, [((w.worker,), w.breaker) for w in workers])
    yield from page.family(m.WORKER_INFLIGHT_REQUESTS, [((w.worker,), w.inflight_requests) for w in workers])
    yield from page.family(m.WORKER_INFLIGHT_TOKENS, [((w.worker,), w.inflight_tokens) for w in workers])
    yield from page.family(m.WORKER_WAITING_REQUESTS, [((w.worker,), w.waiting_requests) for w in workers])
    yield from page.family(m.WORKER_KV_USAGE, [((w.worker,), w.kv_usage) for w in workers])
    yield from page.family(m.WORKER_TRUST, [((w.worker,), w.trust) for w in workers])
    believed = [(w, w.trust_state) for w in workers if w.trust_state is not None]
    yield from page.family(
        m.WORKER_TRUST_STATE, [((w.worker, s), int(s is state)) for w, state in believed for s in TrustState]
    )
    yield from page.family(m.WORKER_REFRESH_TIGHTENED, [((w.worker,), int(w.tightened)) for w, _ in believed])
    yield from page.family(m.INDEX_RELEARNED, [((w.worker,), w.relearned) for w, _ in believed])
    yield from page.family(
        m.WORKER_FINDINGS, [((w.worker, code), 1) for w in workers for code in sorted(set(w.findings))]
    )
    yield from page.family(m.WORKER_LOAD_AGE, [((w.worker,), w.load_age_s) for w in workers])
    yield from page.family(
        m.LOAD_POLLS,
        [((w.worker, result), n) for w in workers for result, n in (("ok", w.polls_ok), ("failed", w.polls_failed))],
    )
    yield from page.family(m.ACCOUNTING_DRIFT, [((w.worker,), w.inflight_requests - w.open_streams) for w in workers])
    yield from page.family(m.INDEX_LEARNED, [((w.worker,), w.learned_blocks) for w in workers])
    yield from page.family(m.INDEX_BLOCKS, [((w.worker, tier), n) for w in workers for tier, n in w.blocks.items()])


def _write_prefixes(page: _Page, prefixes: Sequence[PrefixReading]) -> Iterator[str]:
    yield from page.family(m.PREFIX_PROMPTS, [((p.model,), p.prompts) for p in prefixes])
    yield from page.family(m.PREFIX_TOKENS, [((p.model,), p.tokens) for p in prefixes])
    yield from page.family(m.PREFIX_SHARED, [((p.model,), p.shared_tokens) for p in prefixes])
    yield from page.family(m.PREFIX_NEW_HEADS, [((p.model,), p.new_heads) for p in prefixes])
    yield from page.family(m.PREFIX_DRIFT, [((p.model,), p.drift_tokens) for p in prefixes])
    positions = [((p.model,), Histogram.of(p.bounds, p.positions, p.position_tokens)) for p in prefixes]
    yield from page.histograms(m.PREFIX_DRIFT_POSITION, positions)


def _write_replicas(page: _Page, reading: ReplicaReading | None) -> Iterator[str]:
    shared = [reading] if reading is not None else []
    yield from page.family(m.STORE_UP, [((), int(r.up)) for r in shared])
    yield from page.family(m.REPLICA_PEERS, [((), len(r.peers)) for r in shared])
    yield from page.family(m.REPLICA_LAG, [((), r.lag_s) for r in shared])
    yield from page.family(m.REPLICA_MESSAGES, [((way,), n) for r in shared for way, n in r.messages.items()])
    yield from page.family(m.REPLICA_BYTES, [((way,), n) for r in shared for way, n in r.bytes.items()])
    yield from page.family(m.REPLICA_IGNORED, [((reason,), n) for r in shared for reason, n in r.ignored.items()])
    yield from page.family(m.REPLICA_UNTOLD, [((), r.untold) for r in shared])
    yield from page.family(m.INDEX_COPIES, [((result,), n) for r in shared for result, n in r.copies.items()])


def _write_feeds(page: _Page, feeds: Sequence[FeedReading]) -> Iterator[str]:
    yield from page.family(m.KV_EVENTS, [((f.worker, kind), n) for f in feeds for kind, n in f.events.items()])
    yield from page.family(m.KV_EVENT_GAPS, [((f.worker,), f.gaps) for f in feeds])
    yield from page.family(
        m.KV_EVENT_REPLAYS, [((f.worker, result), n) for f in feeds for result, n in f.replays.items()]
    )
    yield from page.family(m.KV_EVENT_RESETS, [((f.worker,), f.resets) for f in feeds])
    yield from page.family(m.KV_EVENT_ERRORS, [((f.worker,), f.errors) for f in feeds])
    yield from page.family(
        m.KV_EVENTS_SKIPPED, [((f.worker, reason), n) for f in feeds for reason, n in f.skipped.items()]
    )
    yield from page.family(
        m.KV_EVENT_PURGES, [((f.worker, reason), n) for f in feeds for reason, n in f.purges.items()]
    )
    yield from page.family(m.KV_EVENT_OVERFLOWS, [((f.worker,), f.overflows) for f in feeds])
    yield from page.family(m.KV_EVENT_RECONNECTS, [((f.worker,), f.reconnects) for f in feeds])
    yield from page.family(m.KV_EVENT_SILENCES, [((f.worker,), f.silences) for f in feeds])
    yield from page.family(m.KV_BLOCKS_REPEATED, [((f.worker,), f.repeated) for f in feeds])
    yield from page.family(m.KV_EVENT_AGE, [((f.worker,), f.age_s) for f in feeds])
    yield from page.family(
        m.KV_BLOCKS_STORED, [((f.worker, tier), n) for f in feeds for tier, n in f.blocks_stored.items()]
    )
    yield from page.family(
        m.KV_BLOCKS_REMOVED, [((f.worker, tier), n) for f in feeds for tier, n in f.blocks_removed.items()]
    )
    yield from page.family(
        m.KV_BLOCKS_IGNORED, [((f.worker, reason), n) for f in feeds for reason, n in f.ignored.items()]
    )
    lives = [
        ((f.worker, tier), Histogram.of(life.bounds, life.counts, life.total_s))
        for f in feeds
        for tier, life in f.block_lives.items()
    ]
    yield from page.histograms(m.KV_BLOCK_LIFE, lives)


class _Page:
    """Text of one exposition, in pieces. `known` are the label texts of the last one."""

    def __init__(self, known: _LabelTexts) -> None:
        self.label_texts: _LabelTexts = {}
        self._known = known
        self._edges: dict[Sequence[float], list[str]] = {}

    def family(self, spec: MetricSpec, samples: Iterable[tuple[tuple[str, ...], float | None]]) -> Iterator[str]:
        """A counter or gauge with its samples; those without a value are left out."""
        lines = [_head(spec)]
        left = iter(samples)
        while some := list(islice(left, _SAMPLES)):
            for values, value in some:
                if value is not None:
                    text = self._labels(spec.labels, values)
                    lines.append(f"{spec.name}{{{text}}} {value}\n" if text else f"{spec.name} {value}\n")
            yield "".join(lines)
            lines.clear()
        if lines:
            yield "".join(lines)

    def histograms(self, spec: MetricSpec, samples: Iterable[tuple[tuple[str, ...], Histogram]]) -> Iterator[str]:
        """A histogram's cumulative buckets, sum and count, for each label set."""
        lines = [_head(spec)]
        left = iter(samples)
        while some := list(islice(left, _HISTOGRAMS)):
            for values, histogram in some:
                text = self._labels(spec.labels, values)
                front = f"{spec.name}_bucket{{{text}{',' if text else ''}le="
                running = 0
                for edge, count in zip(self._edge_texts(histogram.bounds), histogram.counts, strict=True):
                    running += count
                    lines.append(f"{front}{edge}{running}\n")
                lines.append(f"{spec.name}_sum{{{text}}} {histogram.total}\n{spec.name}_count{{{text}}} {running}\n")
            yield "".join(lines)
            lines.clear()
        if lines:
            yield "".join(lines)

    def _labels(self, names: tuple[str, ...], values: tuple[str, ...]) -> str:
        key = (names, values)
        text = self.label_texts.get(key)
        if text is None:
            text = self._known.get(key)
            if text is None:
                pairs = zip(names, values, strict=True)
                text = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
            self.label_texts[key] = text
        return text

    def _edge_texts(self, bounds: Sequence[float]) -> list[str]:
        texts = self._edges.get(bounds)
        if texts is None:
            texts = self._edges[bounds] = [f'"{float(bound)}"}} ' for bound in bounds] + ['"+Inf"} ']
        return texts


def _head(spec: MetricSpec) -> str:
    return f"# HELP {spec.name} {spec.help}\n# TYPE {spec.name} {spec.kind}\n"
