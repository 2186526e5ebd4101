"""What the owners of state say about themselves when metrics are scraped.

The runtime implements `Readings` over the fleet, the index, the feeds, the pollers and the upstream; tests give
numbers.
Everything is read on the loop thread, at once, so one scrape shows one moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from gateway.records import Tier, TrustState, WorkerId


@dataclass(frozen=True, slots=True)
class WorkerReading:
    """One worker now. `states` are all states there are, in a fixed order, `state` the one it is in.

    `waiting_requests` and `kv_usage` are the worker's own words, None before its first load sample; `load_age_s` is
    the sample's age. `open_streams` counts the edge's open exchanges with the worker: leases minus these must be 0.
    `trust_state` is None before it has joined; `tightened` says that its refresh is, `relearned` how often
    its index was learned anew, `findings` are the codes of what was found about it. `error` is why the last probe
    failed, for operators. `learned_blocks` were learned from routing; `announces`: its events tell instead what it
    holds of token prompts. `hit_tokens` were delivered since the start.
    `breaker` is 0 (closed), 1 (half open) or 2 (open), None before it has joined. `load_socket` is None where its load
    is not listened to.
    """

    worker: WorkerId
    state: str
    states: tuple[str, ...]
    inflight_requests: int
    inflight_tokens: int
    open_streams: int
    waiting_requests: float | None = None
    kv_usage: float | None = None
    load_age_s: float | None = None
    trust: float | None = None
    trust_state: TrustState | None = None
    tightened: bool = False
    relearned: int = 0
    findings: tuple[str, ...] = ()
    blocks: Mapping[Tier, int] = field(default_factory=dict)
    polls_ok: int = 0
    polls_failed: int = 0
    hit_tokens: Mapping[Tier, int] = field(default_factory=dict)
    learned_blocks: int = 0
    announces: bool = False
    error: str | None = None
    breaker: int | None = None
    load_socket: LoadSocketReading | None = None


class LoadSocketReading(NamedTuple):
    """The load sockets of one worker, those of all its ranks together: messages heard, of these unreadable, new
    processes seen. `age_s` is that of the last one that could be read, of the rank heard longest ago; None while one
    has never been heard. `fresh`: its load is theirs now."""

    endpoints: tuple[str, ...]
    fresh: bool
    messages: int
    errors: int
    restarts: int
    age_s: float | None


class LifeReading(NamedTuple):
    """How long sampled blocks of a tier lived: how many up to each of `bounds` (seconds), one more above, and the sum
    of their seconds; `median_s` is the bound the middle one lies below."""

    bounds: Sequence[float]
    counts: Sequence[int]
    total_s: float
    median_s: float | None


@dataclass(frozen=True, slots=True)
class FeedReading:
    """The event feed of one worker, all ranks together; everything but the age counts since the feed began.

    `events` by type (`stored`, `removed`, `cleared`), `replays` by result (`complete`, `history_gone`, ...), `ignored`
    blocks by reason, `skipped` events by reason, `purges` by reason; `repeated` are blocks announced that were held,
    `overflows` messages that had no room while a replay ran. `doubts` says for each rank why its feed is not believed
    although it looks whole. `age_s` is the time since the last message that was applied, None before the first.
    `phases` says for each rank where its feed stands.
    """

    worker: WorkerId
    events: Mapping[str, int] = field(default_factory=dict)
    gaps: int = 0
    replays: Mapping[str, int] = field(default_factory=dict)
    resets: int = 0
    errors: int = 0
    age_s: float | None = None
    blocks_stored: Mapping[Tier, int] = field(default_factory=dict)
    blocks_removed: Mapping[Tier, int] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[int, str] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    purges: Mapping[str, int] = field(default_factory=dict)
    repeated: int = 0
    overflows: int = 0
    reconnects: int = 0
    silences: int = 0
    doubts: Mapping[int, str] = field(default_factory=dict)
    block_lives: Mapping[Tier, LifeReading] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexReading:
    """The index as a whole: bytes it takes (an estimate), blocks that wait for their head, blocks left out or dropped
    for a limit since the start. `learned_*` is what of it comes from routing: blocks, bytes, drops by reason.
    `tokens_asked` counts questions for token ids to engines, by result."""

    bytes: int
    orphans: int = 0
    truncated: int = 0
    learned_blocks: int = 0
    learned_bytes: int = 0
    learned_dropped: Mapping[str, int] = field(default_factory=dict)
    tokens_asked: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolReading:
    """The workers of one served model: how many may get requests, whether ejected ones are used for want of others,
    how many retries its budget refused, how many requests left the shard of their prefix, how many wait, by class
    and by tenant, how long until those have a worker, and how many were sent away from the queue by reason. `hedges`
    are requests sent to a second worker by what became of it, `hedges_refused` those that were late and were not."""

    model: str
    ready: int
    panic: bool
    retries_refused: int
    spilled: int = 0
    queued: Mapping[str, int] = field(default_factory=dict)
    queued_tenants: Mapping[str, int] = field(default_factory=dict)
    drain_s: float = 0.0
    shed: Mapping[str, int] = field(default_factory=dict)
    hedges: Mapping[str, int] = field(default_factory=dict)
    hedges_refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixReading:
    """What answered prompts for one served name had in common (`gateway.insight`), since the start: prompts and their
    tokens, tokens in common with earlier prompts, prompts whose first tokens were new, tokens lost to drift, and where
    prompts drifted: how many up to each of `bounds` (tokens), one more above, and the sum of these positions."""

    model: str
    prompts: int
    tokens: int
    shared_tokens: int
    new_heads: int
    drift_tokens: int
    bounds: Sequence[int]
    positions: Sequence[int]
    position_tokens: int


@dataclass(frozen=True, slots=True)
class ClientReading:
    """The client port: open connections, bytes of request bodies in memory, connections and bodies that were turned
    away because a limit of these was reached."""

    connections: int
    buffered_bytes: int
    turned_away: int


@dataclass(frozen=True, slots=True)
class PeerReading:
    """Another replica: seconds since it was heard and since it was heard first, its open requests, its placements known
    here, and messages of it that never came."""

    number: str
    silent_s: float
    known_s: float
    requests: int
    placements: int
    lost: int


@dataclass(frozen=True, slots=True)
class ReplicaReading:
    """What is shared with other replicas. `lag_s` is how long this one's last state took through the store and back,
    None while the store is down, and then `error` says why. `messages` and `bytes` are by direction (`sent`, `heard`),
    `ignored` what was of no use, by reason; `untold` counts placements that were not told because too many were open,
    `copies` those of the index by what became of them.
    """

    number: str
    store: str
    up: bool
    lag_s: float | None
    error: str | None
    messages: Mapping[str, int]
    bytes: Mapping[str, int]
    ignored: Mapping[str, int]
    untold: int
    copies: Mapping[str, int]
    peers: tuple[PeerReading, ...]


@dataclass(frozen=True, slots=True)
class SourceReading:
    """One source of workers: how many it names, how many of them have no room in the fleet, seconds since it said so
    (None before the first time), and why it cannot look now."""

    source: str
    workers: int
    left_out: int
    age_s: float | None
    error: str | None


@dataclass(frozen=True, slots=True)
class ConfigReading:
    """The configuration: reloads by result, whether the sources as they are now were refused, and how many keys wait
    for a restart."""

    reloads: Mapping[str, int]
    refused: bool
    needs_restart: int


class Readings(Protocol):
    """The owners, as metrics see them."""

    def workers(self) -> Iterable[WorkerReading]:
        """Every worker of the fleet."""
        ...

    def pools(self) -> Iterable[PoolReading]:
        """Every served model."""
        ...

    def prefixes(self) -> Iterable[PrefixReading]:
        """Every served name that had answers."""
        ...

    def feeds(self) -> Iterable[FeedReading]:
        """Every worker with an event feed."""
        ...

    def clients(self) -> ClientReading:
        """The client port."""
        ...

    def index(self) -> IndexReading:
        """The index."""
        ...

    def replicas(self) -> ReplicaReading | None:
        """What is shared with other replicas; None without a store."""
        ...

    def sources(self) -> Iterable[SourceReading]:
        """Where workers come from."""
        ...

    def config(self) -> ConfigReading:
        """The configuration."""
        ...

    def task_restarts(self) -> int:
        """Failures of background tasks since the start."""
        ...
