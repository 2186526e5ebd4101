"""Every metric of kvgate: names, types, labels, help.

Rules:
1. `METRICS` is the only place where a name, a label or a help text is written; the reference page is made of it.
2. Label values come from configuration and from fixed words, never from clients.

Nothing is counted here. Request counters live in `telemetry.requests`, all other numbers with their owners
(`telemetry.readings`); `telemetry.exposition` reads both when a scrape comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

PREFIX = "kvgate_"


class Kind(StrEnum):
    """Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSpec(NamedTuple):
    """One metric as it is exposed; `name` is complete, with prefix and `_total`."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


_REQUEST = ("model", "pool", "worker")


def _spec(name: str, kind: Kind, labels: Sequence[str], text: str) -> MetricSpec:
    return MetricSpec(PREFIX + name, kind, tuple(labels), text)


REQUESTS = _spec("requests_total", Kind.COUNTER, (*_REQUEST, "code"), "Requests ended, by HTTP status.")
REQUEST_SECONDS = _spec(
    "request_seconds", Kind.HISTOGRAM, _REQUEST, "Time from the first byte of the request to its end."
)
TTFT_SECONDS = _spec(
    "ttft_seconds", Kind.HISTOGRAM, _REQUEST, "Time from the first byte of the request to the first of the answer."
)
INTER_TOKEN_SECONDS = _spec(
    "inter_token_seconds", Kind.HISTOGRAM, _REQUEST, "Mean time between two tokens of one answer, once a request."
)
PREFIX_MODES = _spec(
    "prefix_mode_total", Kind.COUNTER, ("mode",), "Requests placed, by what their prefix blocks were made of."
)
OVERHEAD_SECONDS = _spec(
    "overhead_seconds",
    Kind.HISTOGRAM,
    ("stage",),
    "Time the gateway itself took before the worker had the request, by stage; a stage that took none is left out.",
)
PROMPT_TOKENS = _spec("prompt_tokens_total", Kind.COUNTER, _REQUEST, "Prompt tokens of requests sent to a worker.")
AVAILABLE_TOKENS = _spec(
    "available_tokens_total", Kind.COUNTER, _REQUEST, "Prompt tokens the best worker of the pool held."
)
PREDICTED_TOKENS = _spec(
    "predicted_tokens_total", Kind.COUNTER, _REQUEST, "Prompt tokens the chosen worker was predicted to hold."
)
PROMISED_TOKENS = _spec(
    "promised_tokens_total",
    Kind.COUNTER,
    _REQUEST,
    "The part of the predicted tokens that rested on what was sent there a moment before, told by no event yet.",
)
DELIVERED_TOKENS = _spec(
    "delivered_tokens_total", Kind.COUNTER, _REQUEST, "Prompt tokens the worker reported as taken from its cache."
)
REPORTED_PROMPT_TOKENS = _spec(
    "reported_prompt_tokens_total",
    Kind.COUNTER,
    _REQUEST,
    "Prompt tokens of requests whose worker reported cached tokens: the denominator of the delivered hit rate.",
)
ROUTE_PREDICTIONS = _spec(
    "route_predictions_total",
    Kind.COUNTER,
    ("worker",),
    "Predicted hits that could be checked against what the worker reported.",
)
ROUTE_MISSES = _spec(
    "route_misses_total",
    Kind.COUNTER,
    ("worker", "cause"),
    "Predicted hits of which more than a block and 10 % was not delivered, by cause.",
)
HIT_TOKENS = _spec(
    "hit_tokens_total",
    Kind.COUNTER,
    ("worker", "tier"),
    "Prompt tokens the worker reported as taken from its cache, by the tier they were predicted in.",
)
AFFINITY = _spec(
    "affinity_total",
    Kind.COUNTER,
    ("result",),
    "Requests by what became of their session: none, new, kept, moved_busy (elsewhere was cheaper), moved_drained, "
    "moved_ejected, moved_gone, moved_failed (its worker failed this request), moved_late (its worker was late, see "
    "hedges_total), moved_other (not for this request).",
)
REQUEST_RESULTS = _spec(
    "request_results_total",
    Kind.COUNTER,
    ("worker", "result"),
    "How requests ended: completed, client_gone, worker_failed (streams that broke after code 200 too), timed_out, "
    "refused, shut_down.",
)
RETRIES = _spec(
    "retries_total",
    Kind.COUNTER,
    ("reason",),
    "Further workers tried before the first byte, by error of the failed try.",
)
RETRIES_REFUSED = _spec(
    "retries_refused_total",
    Kind.COUNTER,
    ("model",),
    "Retries that were not made because the pool's budget was spent (retries.budget_ratio).",
)
HEDGES = _spec(
    "hedges_total",
    Kind.COUNTER,
    ("pool", "outcome"),
    "Requests sent to a second worker because the first was late (retries.hedge_percentile), by model and what became "
    "of the second: won (it answered first), lost, failed, ended (the request was over before either answered).",
)
HEDGES_REFUSED = _spec(
    "hedges_refused_total",
    Kind.COUNTER,
    ("pool", "reason"),
    "Times a late request was not sent to a second worker: no_worker (nobody else may have it), queue (others wait at "
    "the gateway), room (the pool or that worker is nearly full), busy (it would wait there), budget (of retries).",
)
QUEUE_DEPTH = _spec(
    "queue_depth",
    Kind.GAUGE,
    ("pool", "class"),
    "Requests that wait at the gateway for a worker, by model and priority class (high, normal, low).",
)
QUEUE_SECONDS = _spec("queue_seconds", Kind.HISTOGRAM, (), "How long requests waited that had to wait, also in vain.")
SHED = _spec(
    "shed_total",
    Kind.COUNTER,
    ("pool", "reason"),
    "Requests sent away from the queue of a model: queue_full, queue_timeout, deadline_exceeded, no_worker.",
)
POOL_READY = _spec("pool_ready_workers", Kind.GAUGE, ("model",), "Workers that may get requests for the model.")
POOL_PANIC = _spec(
    "pool_panic",
    Kind.GAUGE,
    ("model",),
    "1 while so many workers are ejected that all are used (health.panic_ratio), else 0.",
)
SHARD_SPILLS = _spec(
    "shard_spills_total", Kind.COUNTER, ("model",), "Requests that went to another shard than their prefix's."
)
WORKER_STATE = _spec("worker_state", Kind.GAUGE, ("worker", "state"), "1 for the state the worker is in, else 0.")
BREAKER_STATE = _spec(
    "breaker_state", Kind.GAUGE, ("worker",), "0 closed, 1 half open (a trial is due), 2 open (the worker is ejected)."
)
WORKER_INFLIGHT_REQUESTS = _spec(
    "worker_inflight_requests", Kind.GAUGE, ("worker",), "Requests this gateway has open on the worker."
)
WORKER_INFLIGHT_TOKENS = _spec(
    "worker_inflight_tokens",
    Kind.GAUGE,
    ("worker",),
    "Uncached prompt tokens this gateway sent and not yet seen answered.",
)
WORKER_WAITING_REQUESTS = _spec(
    "worker_waiting_requests", Kind.GAUGE, ("worker",), "Requests waiting in the worker, as it says itself."
)
WORKER_KV_USAGE = _spec(
    "worker_kv_usage_ratio", Kind.GAUGE, ("worker",), "Share of KV blocks held by running requests, as the worker says."
)
WORKER_TRUST = _spec("worker_trust", Kind.GAUGE, ("worker",), "How far the worker's index is believed, 0 to 1.")
WORKER_TRUST_STATE = _spec(
    "worker_trust_state",
    Kind.GAUGE,
    ("worker", "state"),
    "1 for the state of the worker's index (trusted, catching_up, uncertain, blind), else 0.",
)
WORKER_REFRESH_TIGHTENED = _spec(
    "worker_refresh_tightened",
    Kind.GAUGE,
    ("worker",),
    "1 while the worker is polled more often because predictions fail, else 0.",
)
INDEX_RELEARNED = _spec(
    "index_relearned_total",
    Kind.COUNTER,
    ("worker",),
    "Times a worker's part of the index was learned anew because requests contradicted it.",
)
WORKER_FINDINGS = _spec(
    "worker_findings", Kind.GAUGE, ("worker", "code"), "1 for each finding about the worker, see findings.md."
)
WORKER_LOAD_AGE = _spec(
    "worker_load_age_seconds", Kind.GAUGE, ("worker",), "Age of the last load sample of the worker."
)
LOAD_POLLS = _spec("load_polls_total", Kind.COUNTER, ("worker", "result"), "Polls of a worker's load: ok, failed.")
ACCOUNTING_DRIFT = _spec(
    "accounting_drift", Kind.GAUGE, ("worker",), "Open leases minus open exchanges with the worker; must be 0."
)
INDEX_BLOCKS = _spec("index_blocks", Kind.GAUGE, ("worker", "tier"), "Blocks the index knows of a worker, by tier.")
CLIENT_CONNECTIONS = _spec("client_connections", Kind.GAUGE, (), "Open connections of clients.")
CLIENT_BUFFERED = _spec("client_buffered_bytes", Kind.GAUGE, (), "Request bodies in memory.")
CLIENT_TURNED_AWAY = _spec(
    "client_turned_away_total",
    Kind.COUNTER,
    (),
    "Connections and bodies refused because server.max_connections or max_buffered_bytes was reached.",
)
INDEX_BYTES = _spec("index_bytes", Kind.GAUGE, (), "Memory the index takes, estimated.")
INDEX_ORPHANS = _spec(
    "index_orphans", Kind.GAUGE, (), "Announced blocks whose head is unknown; not part of an overlap."
)
INDEX_TRUNCATED = _spec("index_truncated_total", Kind.COUNTER, (), "Blocks the index left out or dropped for a limit.")
INDEX_LEARNED = _spec(
    "index_learned_blocks", Kind.GAUGE, ("worker",), "Blocks learned from routing, where no event tells."
)
INDEX_LEARNED_DROPPED = _spec(
    "index_learned_dropped_total",
    Kind.COUNTER,
    ("reason",),
    "Learned blocks dropped: size (of the worker's cache), age, evicted (the worker reported fewer cached tokens).",
)
TOKENIZE_QUESTIONS = _spec(
    "tokenize_questions_total",
    Kind.COUNTER,
    ("result",),
    "Prompts whose token ids an engine was asked for: told, failed, skipped, pushed_out.",
)
CONFIG_RELOADS = _spec(
    "config_reloads_total",
    Kind.COUNTER,
    ("result",),
    "Configurations read while running: applied, unchanged, refused (the one before stays in force).",
)
CONFIG_STALE = _spec(
    "config_stale", Kind.GAUGE, (), "1 while the file cannot be used and an older configuration is in force."
)
CONFIG_NEEDS_RESTART = _spec(
    "config_needs_restart", Kind.GAUGE, (), "Keys of the file that differ from what is in force until a restart."
)
TASK_RESTARTS = _spec(
    "task_restarts_total",
    Kind.COUNTER,
    (),
    "Background tasks that failed and were started again; the log has each one's name and traceback.",
)
DISCOVERY_WORKERS = _spec("discovery_workers", Kind.GAUGE, ("source",), "Workers that a source names now.")
DISCOVERY_UP = _spec(
    "discovery_up", Kind.GAUGE, ("source",), "0 while a source of workers cannot look; its last list stays, else 1."
)
DISCOVERY_AGE = _spec(
    "discovery_age_seconds", Kind.GAUGE, ("source",), "Time since a source told its list; absent before the first."
)
STORE_UP = _spec(
    "store_up",
    Kind.GAUGE,
    (),
    "1 while messages to other replicas go through the store and come back, else 0; absent without a store.",
)
REPLICA_PEERS = _spec("replica_peers", Kind.GAUGE, (), "Other replicas heard lately.")
REPLICA_LAG = _spec(
    "replica_lag_seconds",
    Kind.GAUGE,
    (),
    "Time this replica's last state took through the store and back; absent while the store is down.",
)
REPLICA_MESSAGES = _spec(
    "replica_messages_total", Kind.COUNTER, ("direction",), "Messages sent and heard, own included."
)
REPLICA_BYTES = _spec("replica_bytes_total", Kind.COUNTER, ("direction",), "Bytes of these messages.")
REPLICA_IGNORED = _spec(
    "replica_ignored_total",
    Kind.COUNTER,
    ("reason",),
    "Messages and placements of other replicas that were of no use, by reason; `version`: another release of them.",
)
REPLICA_UNTOLD = _spec(
    "replica_untold_total", Kind.COUNTER, (), "Placements not told to others because too many were open."
)
INDEX_COPIES = _spec(
    "index_copies_total",
    Kind.COUNTER,
    ("result",),
    "Copies of workers' parts of the index in the store, a rank's each. When its feed began: restored, or not, for "
    "there was none, or it was of an other_start of the engine or in an other_size of blocks. Later: written, or "
    "too_large for that. store: it did not answer.",
)
KV_EVENTS = _spec("kv_events_total", Kind.COUNTER, ("worker", "type"), "KV events received, by type.")
KV_EVENT_GAPS = _spec("kv_event_gaps_total", Kind.COUNTER, ("worker",), "Gaps in the sequence of event messages.")
KV_EVENT_REPLAYS = _spec(
    "kv_event_replays_total", Kind.COUNTER, ("worker", "result"), "Replays asked of a worker, by result."
)
KV_EVENT_RESETS = _spec(
    "kv_event_resets_total", Kind.COUNTER, ("worker",), "Restarts of a worker seen in its event sequence."
)
KV_EVENT_ERRORS = _spec("kv_event_errors_total", Kind.COUNTER, ("worker",), "Event messages that could not be read.")
KV_EVENTS_SKIPPED = _spec(
    "kv_events_skipped_total",
    Kind.COUNTER,
    ("worker", "reason"),
    "KV events left out: malformed, unknown_kind, unknown_medium, foreign (messages), other_rank (messages).",
)
KV_EVENT_PURGES = _spec(
    "kv_event_purges_total",
    Kind.COUNTER,
    ("worker", "reason"),
    "Times all a rank announced was forgotten, by reason: restart, gap, history_gone, resync, ...",
)
KV_EVENT_OVERFLOWS = _spec(
    "kv_event_overflows_total",
    Kind.COUNTER,
    ("worker",),
    "Event messages that had no room while a replay ran; they are asked for again.",
)
KV_EVENT_RECONNECTS = _spec(
    "kv_event_reconnects_total", Kind.COUNTER, ("worker",), "Times the event connection to a worker was made anew."
)
KV_EVENT_SILENCES = _spec(
    "kv_event_silences_total", Kind.COUNTER, ("worker",), "Times a worker computed new blocks and announced nothing."
)
KV_EVENT_AGE = _spec("kv_event_age_seconds", Kind.GAUGE, ("worker",), "Time since the last event message of a worker.")
KV_BLOCKS_IGNORED = _spec(
    "kv_blocks_ignored_total",
    Kind.COUNTER,
    ("worker", "reason"),
    "Announced blocks left out; cache_group (hybrid models), unknown_removal (after a start), let_go (cap) are usual.",
)
KV_BLOCKS_REPEATED = _spec(
    "kv_blocks_repeated_total",
    Kind.COUNTER,
    ("worker",),
    "Announced blocks the worker held already: further copies (vLLM), or said again (SGLang).",
)
KV_BLOCKS_STORED = _spec(
    "kv_blocks_stored_total", Kind.COUNTER, ("worker", "tier"), "Blocks a worker announced as stored, by tier."
)
KV_BLOCKS_REMOVED = _spec(
    "kv_blocks_removed_total", Kind.COUNTER, ("worker", "tier"), "Blocks a worker announced as removed, by tier."
)

KV_BLOCK_LIFE = _spec(
    "kv_block_life_seconds",
    Kind.HISTOGRAM,
    ("worker", "tier"),
    "How long blocks lived from their announcement until they were pushed out, of one block in 64.",
)
PREFIX_PROMPTS = _spec("prefix_prompts_total", Kind.COUNTER, ("model",), "Answered prompts compared with earlier ones.")
PREFIX_TOKENS = _spec("prefix_tokens_total", Kind.COUNTER, ("model",), "Their tokens, in full blocks.")
PREFIX_SHARED = _spec(
    "prefix_shared_tokens_total", Kind.COUNTER, ("model",), "Those of them that an earlier prompt began with too."
)
PREFIX_NEW_HEADS = _spec(
    "prefix_new_heads_total", Kind.COUNTER, ("model",), "Prompts whose first 64 tokens no prompt of late began with."
)
PREFIX_DRIFT = _spec(
    "prefix_drift_tokens_total",
    Kind.COUNTER,
    ("model",),
    "Prompt tokens lost because a prompt parted from others of its application earlier than they usually do.",
)
PREFIX_DRIFT_POSITION = _spec(
    "prefix_drift_position_tokens",
    Kind.HISTOGRAM,
    ("model",),
    "Where these prompts parted, in tokens.",
)

METRICS: tuple[MetricSpec, ...] = (
    REQUESTS,
    REQUEST_SECONDS,
    TTFT_SECONDS,
    INTER_TOKEN_SECONDS,
    PREFIX_MODES,
    OVERHEAD_SECONDS,
    PROMPT_TOKENS,
    AVAILABLE_TOKENS,
    PREDICTED_TOKENS,
    PROMISED_TOKENS,
    DELIVERED_TOKENS,
    REPORTED_PROMPT_TOKENS,
    ROUTE_PREDICTIONS,
    ROUTE_MISSES,
    HIT_TOKENS,
    PREFIX_PROMPTS,
    PREFIX_TOKENS,
    PREFIX_SHARED,
    PREFIX_NEW_HEADS,
    PREFIX_DRIFT,
    PREFIX_DRIFT_POSITION,
    AFFINITY,
    REQUEST_RESULTS,
    RETRIES,
    RETRIES_REFUSED,
    HEDGES,
    HEDGES_REFUSED,
    QUEUE_DEPTH,
    QUEUE_SECONDS,
    SHED,
    POOL_READY,
    POOL_PANIC,
    SHARD_SPILLS,
    WORKER_STATE,
    BREAKER_STATE,
    WORKER_INFLIGHT_REQUESTS,
    WORKER_INFLIGHT_TOKENS,
    WORKER_WAITING_REQUESTS,
    WORKER_KV_USAGE,
    WORKER_TRUST,
    WORKER_TRUST_STATE,
    WORKER_REFRESH_TIGHTENED,
    INDEX_RELEARNED,
    WORKER_FINDINGS,
    WORKER_LOAD_AGE,
    LOAD_POLLS,
    ACCOUNTING_DRIFT,
    CLIENT_CONNECTIONS,
    CLIENT_BUFFERED,
    CLIENT_TURNED_AWAY,
    INDEX_BLOCKS,
    INDEX_BYTES,
    INDEX_ORPHANS,
    INDEX_TRUNCATED,
    INDEX_LEARNED,
    INDEX_LEARNED_DROPPED,
    TOKENIZE_QUESTIONS,
    CONFIG_RELOADS,
    CONFIG_STALE,
    CONFIG_NEEDS_RESTART,
    TASK_RESTARTS,
    DISCOVERY_WORKERS,
    DISCOVERY_UP,
    DISCOVERY_AGE,
    STORE_UP,
    REPLICA_PEERS,
    REPLICA_LAG,
    REPLICA_MESSAGES,
    REPLICA_BYTES,
    REPLICA_IGNORED,
    REPLICA_UNTOLD,
    INDEX_COPIES,
    KV_EVENTS,
    KV_EVENT_GAPS,
    KV_EVENT_REPLAYS,
    KV_EVENT_RESETS,
    KV_EVENT_ERRORS,
    KV_EVENTS_SKIPPED,
    KV_EVENT_PURGES,
    KV_EVENT_OVERFLOWS,
    KV_EVENT_RECONNECTS,
    KV_EVENT_SILENCES,
    KV_EVENT_AGE,
    KV_BLOCKS_REPEATED,
    KV_BLOCKS_STORED,
    KV_BLOCKS_REMOVED,
    KV_BLOCKS_IGNORED,
    KV_BLOCK_LIFE,
)


def describe_metrics() -> list[tuple[str, str, tuple[str, ...], str]]:
    """Every metric as (name, type, labels, help), in the order of the exposition; for the reference page."""
    return [(spec.name, spec.kind.value, spec.labels, spec.help) for spec in METRICS]
