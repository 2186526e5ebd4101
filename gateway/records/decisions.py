"""Why a request went where it went, and how it ended.

What every request makes anew is a `Struct`: made in a fourth of a frozen dataclass's time, and, since it is part of no
cycle, of no interest to the garbage collector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field

from gateway.records.requests import PrefixMode
from gateway.records.words import Endpoint, Tier, WorkerId

Standing = tuple[float, float, float, float, float, float, float, float, int, int, int, float, float]
"""What a decision in seconds reads of a worker, in the order of `Worker`'s fields: `slowdown`, `pending_s`, `head_s`,
`head_since`, `foreign_s`, `foreign_since`, requests there (ours and others'), `regret_s`, `kv_tokens`,
`kv_capacity`, `unindexed_tokens`, `evict_discount`, `idle_since_s`. One tuple, made anew when one of them changes: it
is read sixty times where it is made once, and a decision that keeps it can be explained later."""


class Terms(NamedTuple):
    """One worker's cost for one request, in seconds (`docs/concepts/score.md`); lowest `cost` wins.

    `hit_s` is the prefill time the overlap saves (shown, already contained in `own_s`), `wait_s` the time until
    the prefill could start, `own_s` the prefill itself, `decode_s`, `evict_s` and `kv_s` the three load prices.
    `repeat_s` is the price of computing what others compute at this moment, `adapter_s` that of adapters which the
    worker would have to load, `regret_s` what was lost by leaving prefixes on a slow worker; `affinity_s` and `idle_s`
    are credits.
    Policies that do not price in seconds leave every term at 0 and put their own figure in `cost`.
    """

    cost: float
    hit_s: float = 0.0
    wait_s: float = 0.0
    own_s: float = 0.0
    decode_s: float = 0.0
    evict_s: float = 0.0
    kv_s: float = 0.0
    affinity_s: float = 0.0
    repeat_s: float = 0.0
    idle_s: float = 0.0
    adapter_s: float = 0.0
    regret_s: float = 0.0


class Candidate(NamedTuple):
    """One worker that was considered: its usable overlap in tokens, how far it was believed, its terms."""

    worker: WorkerId
    overlap_tokens: int
    trust: float
    terms: Terms


class Decision(Struct, frozen=True, gc=False):
    """Why a request went where it went. `predicted_tokens` is the chosen worker's overlap, `available_tokens`
    the best overlap in the pool; both 0 when the tokens are unknown. `excluded` names workers that were not
    considered, with the reason. `affinity` is `none`, `kept`, `new`, or `moved_` and why (`docs/concepts/pools.md`).
    In a pool that is split, `shard` is that of the worker and `home_shard` that of the prefix."""

    request_id: str
    model: str
    pool: str
    policy: str
    worker: WorkerId
    predicted_tokens: int
    available_tokens: int
    prompt_tokens: int
    block_size: int
    mode: PrefixMode
    candidates: Sequence[Candidate]
    excluded: tuple[tuple[WorkerId, str], ...] = ()
    affinity: str = "none"
    reason: str | None = None
    decided_at: float = 0.0
    slow_tokens: Mapping[Tier, int] = field(default_factory=dict)
    """The part of `predicted_tokens` that lies in slower tiers only, by tier."""
    shard: int | None = None
    home_shard: int | None = None
    beside: WorkerId | None = None
    """The worker that has the request already and is late: this one gets a second copy of it."""


# --------------------------------------------------------------------------- outcome


class Result(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    WORKER_FAILED = "worker_failed"
    TIMED_OUT = "timed_out"
    REFUSED = "refused"
    SHUT_DOWN = "shut_down"
    HEDGED = "hedged"
    """Not a request's end but one of its two workers': the other one is waited for, or nobody is."""


class Hedged(StrEnum):
    """What became of a request's second copy: it was answered first, the first worker was faster, it failed, or the
    request ended before either answered."""

    WON = "won"
    LOST = "lost"
    FAILED = "failed"
    ENDED = "ended"


class MissCause(StrEnum):
    """Why a predicted hit was not delivered (`docs/concepts/trust.md`)."""

    STALE_INDEX = "stale_index"
    IDENTITY = "identity"
    EVICTED = "evicted"
    SPILLED = "spilled"
    AFFINITY = "affinity"
    RETRY = "retry"
    UNKNOWN = "unknown"


class Usage(NamedTuple):
    """What the worker reported. `cached_tokens` is None when it reports no cached tokens at all."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class StageTimes(NamedTuple):
    """Seconds the gateway itself spent before the worker had the request."""

    parse_s: float = 0.0
    prefix_s: float = 0.0
    route_s: float = 0.0
    queue_s: float = 0.0
    connect_s: float = 0.0


class Trace(NamedTuple):
    """Where a request stands in a distributed trace (W3C Trace Context): hexadecimal ids, the caller's span or None,
    and whether spans are to be recorded. `span_id` names the gateway's own span, the parent of the worker's."""

    trace_id: str
    span_id: str
    parent_id: str | None
    sampled: bool


class Ending(Struct, frozen=True, gc=False):
    """What the edge saw of a request's end; the lease turns it into the outcome.

    `status` is the HTTP status the client got (499 when it was gone before any). `chunks` counts body pieces of
    a stream. `first_byte_at` is when the first body byte of a successful answer arrived, `last_byte_at` the last.
    """

    result: Result
    status: int
    ended_at: float
    usage: Usage | None = None
    chunks: int = 0
    first_byte_at: float | None = None
    last_byte_at: float | None = None
    error_code: str | None = None
    trace: Trace | None = None


class Outcome(Struct, frozen=True, gc=False):
    """The one record of how a request ended: metrics, log line and calibration are made of it.

    `worker` is None when no worker was chosen. `missed_tokens` is predicted minus delivered where that is a
    route miss (above one block and 10 %), else 0; `delivered_tokens` is None when the worker did not say.
    """

    request_id: str
    endpoint: Endpoint | None
    model: str
    pool: str
    worker: WorkerId | None
    result: Result
    status: int
    stream: bool
    started_at: float
    ended_at: float
    prompt_tokens: int = 0
    available_tokens: int = 0
    predicted_tokens: int = 0
    promised_tokens: int = 0
    """The part of `predicted_tokens` that rests on what was sent there a moment ago: no event has told of it yet."""
    delivered_tokens: int | None = None
    completion_tokens: int | None = None
    missed_tokens: int = 0
    miss_cause: MissCause | None = None
    ttft_s: float | None = None
    inter_token_s: float | None = None
    chunks: int = 0
    retries: int = 0
    hedged: Hedged | None = None
    """What became of its second copy, where it had one."""
    slow_tokens: Mapping[Tier, int] = field(default_factory=dict)
    affinity: str = "none"
    mode: PrefixMode = PrefixMode.NONE
    stages: StageTimes = field(default_factory=StageTimes)
    error_code: str | None = None
    tenant: str | None = None
    trace: Trace | None = None
