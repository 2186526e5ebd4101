"""A worker as it was configured, what probing found, what its load polls say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from gateway.records.words import EngineKind, WorkerId


class TrustState(StrEnum):
    """How far a worker's part of the index is believed; each has a factor in 0..1 on the worker's overlap."""

    TRUSTED = "trusted"
    CATCHING_UP = "catching_up"
    UNCERTAIN = "uncertain"
    BLIND = "blind"


class Severity(StrEnum):
    """How much a finding costs: `info` nothing now, `warning` hits or detail, `error` the worker is not used well at
    all or gives wrong answers."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Finding(NamedTuple):
    """What of a worker's set-up is wrong or could be better. `code` is a stable word, `message` one sentence that says
    what and what it costs, `fix` what to change (the engine's flag, or the key of the configuration)."""

    severity: Severity
    code: str
    message: str
    fix: str


class Role(StrEnum):
    """What a worker does in prefill/decode disaggregation."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class RankChoice(Enum):
    """How the data-parallel ranks behind one URL are used: as the engine allows, each as a worker, or all as one."""

    AUTO = "auto"
    EACH = "each"
    ONE = "one"


class Rank(NamedTuple):
    """One data-parallel rank that gets requests of its own. `member` is the name of the server it belongs to,
    `number` the rank as events, ports and metrics count it, `asked` what its request header has to say: the position
    among the ranks of this server."""

    member: WorkerId
    number: int
    asked: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as configured or discovered. `None` means: learn it by probing.

    `url` has no path and no trailing slash. `kv_events` and `kv_replay` are ZMQ endpoints to connect to
    (`tcp://host:port`), rank 0's where there are several; an empty string switches the feed off. `weight` scales its
    share under blind policies. `tenants` are those whose requests it may have, empty for everybody's. `kv_blocks` is
    the cache of all ranks together. A spec with a `rank` is made from that of its server.
    """

    name: WorkerId
    url: str
    engine: EngineKind = EngineKind.UNKNOWN
    pool: str = "default"
    role: Role = Role.BOTH
    kv_events: str | None = None
    kv_replay: str | None = None
    api_key: str | None = field(default=None, repr=False)
    weight: float = 1.0
    models: tuple[str, ...] = ()
    tenants: frozenset[str] = frozenset()
    block_size: int | None = None
    kv_blocks: int | None = None
    data_parallel_size: int | None = None
    ranks: RankChoice = RankChoice.AUTO
    rank: Rank | None = None

    @property
    def member(self) -> WorkerId:
        """Name of the server: its own, or that of the server it is a rank of."""
        return self.name if self.rank is None else self.rank.member


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one rank of a worker publishes its KV events, as the gateway can reach it."""

    rank: int
    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class LoadEndpoint:
    """Where one rank of a worker publishes its load, as the gateway can reach it."""

    rank: int
    endpoint: str
    topic: str


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What probing a worker found. `models` are the base models it serves, by name;
    `adapters` maps an adapter's name to its base. `kv_blocks` is the cache size in blocks of `block_size`
    tokens, None when unknown. `start_time_unix` is the process start time the worker reports. `findings`
    say what of the worker's set-up costs cache hits, and the fix. `root` is the first base model's
    directory or hub name, as the worker sees it.

    `ranks` are the numbers of the data-parallel ranks behind the URL, `(0,)` without data parallelism; `rank_routing`
    says that a request can name one. `cached_tokens_reported` and `needs_key` are None while nobody knows.
    `keeps_sessions`: it holds on to the prefixes of sessions that requests name. `loads` is empty where load is not
    published. `gateways`: it is one, itself first, then those behind it."""

    engine: EngineKind
    version: str
    models: tuple[str, ...]
    adapters: Mapping[str, str] = field(default_factory=dict)
    block_size: int | None = None
    kv_blocks: int | None = None
    max_model_len: int | None = None
    events: tuple[EventSource, ...] = ()
    start_time_unix: float | None = None
    findings: tuple[Finding, ...] = ()
    root: str | None = None
    ranks: tuple[int, ...] = (0,)
    rank_routing: bool = False
    cached_tokens_reported: bool | None = None
    needs_key: bool | None = None
    keeps_sessions: bool = False
    loads: tuple[LoadEndpoint, ...] = ()
    gateways: tuple[str, ...] = ()


class LoadSource(StrEnum):
    """How a worker's load came here."""

    POLL = "poll"
    SOCKET = "socket"


@dataclass(frozen=True, slots=True)
class LoadSample:
    """What a worker said of its load once: requests running and waiting, share of KV blocks held by running requests
    (0..1; None where it says `kv_tokens` instead: tokens held, with those that waiting requests will need, or nothing),
    and the engine's cumulative prefix-cache counters in tokens where it has them. `adapters` are those in use,
    `adapter_slots` how many it can have on its GPU; empty and None where it does not say."""

    running: float
    waiting: float
    kv_usage: float | None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    kv_blocks: int | None = None
    start_time_unix: float | None = None
    adapters: tuple[str, ...] = ()
    adapter_slots: int | None = None
    kv_tokens: int | None = None
    source: LoadSource = LoadSource.POLL
