"""Sections of a request's way: `routing`, `index`, `timeouts`, `retries`."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway.records import Endpoint
from gateway.settings.section import Seconds, Section, why

Weight = Literal["auto"] | Annotated[float, Field(ge=0, le=1_000, allow_inf_nan=False)]

PolicyName = Literal["seconds", "least_load", "round_robin", "random", "p2c", "prefix_hash"]
POLICIES: tuple[str, ...] = get_args(PolicyName)


class AffinitySettings(Section):
    """Where a request's session id is read, and how long a session is remembered."""

    header: str = Field("x-session-id", description="Request header that carries the session id.")
    body_field: str | None = Field(None, description="Top-level body field that carries it, when the header is absent.")
    ttl_s: Seconds = Field(
        3600,
        description="A session without requests is forgotten after this long.",
        json_schema_extra=why("people come back within the hour; cached blocks rarely live longer"),
    )
    max_sessions: int = Field(
        1_000_000,
        ge=0,
        description="Sessions remembered; the oldest go first.",
        json_schema_extra=why("some hundred bytes each"),
    )
    credit_s: float = Field(
        0.02,
        ge=0,
        le=60,
        description="Seconds by which a session's last worker is preferred; 0: not at all.",
        json_schema_extra=why(
            "a hundred or two tokens of prefill; binding sessions harder costs 3 to 4 % of the time to first token"
        ),
    )


class RoutingSettings(Section):
    """How a worker is chosen: `score = alpha*hit - beta*queue - gamma*load`, in seconds."""

    policy: PolicyName = Field("seconds", description="The policy; `seconds` is the cache-aware one.")
    alpha: Weight = Field("auto", description="Scales what a hit saves; auto is 1 on learned rates.")
    beta: Weight = Field("auto", description="Scales the wait; auto is 1.")
    gamma: Weight = Field("auto", description="Scales the prices of decode, eviction and occupancy; auto is 1.")
    hold_s: float = Field(
        0.2,
        ge=0,
        le=60,
        allow_inf_nan=False,
        description="A request waits at the gateway rather than on a worker that is busy for longer; 0: only when "
        "every worker has as many requests as it should have.",
        json_schema_extra=why("measured: 0.05 to 0.4 are alike; a worker always has its next request at hand"),
    )
    speculative_ttl_s: Seconds = Field(
        2,
        description="How long a sent prompt counts as held without an event.",
        json_schema_extra=why("engines announce a block within a second of computing it"),
    )
    affinity: AffinitySettings = AffinitySettings()
    shards: int = Field(
        1,
        ge=1,
        le=64,
        description="Slices of a large pool; a decision looks at the one that is home to its prefix.",
        json_schema_extra=why("splitting pays in very large pools only (docs/concepts/pools.md)"),
    )
    shard_workers: int = Field(
        16,
        ge=2,
        le=1024,
        description="Least workers of a shard: a smaller pool has fewer.",
        json_schema_extra=why("fewer share load too unevenly"),
    )
    spill_margin_s: float = Field(
        0.1,
        ge=0,
        le=3600,
        description="A request leaves its home shard for one that is cheaper by more than this.",
        json_schema_extra=why("keeps 97 % of the gain or more on every trace measured (docs/concepts/pools.md)"),
    )

    @model_validator(mode="after")
    def _in_seconds(self) -> RoutingSettings:
        if self.shards > 1 and self.policy != "seconds":
            raise ValueError("`shards` compares costs in seconds: leave it out, or use the policy `seconds`")
        return self


class AdmissionSettings(Section):
    """Requests that wait at the gateway because no worker can start them (`docs/concepts/queue.md`)."""

    max_inflight: Literal["auto"] | Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        "auto",
        description="Requests a worker should have at a time; auto learns it from what the worker ran when it had no "
        "room for more.",
    )
    queue_size: int = Field(
        1000,
        ge=1,
        le=1_000_000,
        description="Requests that may wait for one model; more get 429 with Retry-After.",
        json_schema_extra=why("more than a fleet works off while anybody still waits for an answer"),
    )
    queue_timeout_s: Seconds = Field(
        60,
        description="How long one may wait; then it gets 503 with Retry-After.",
        json_schema_extra=why("people are gone by then; batch clients come again"),
    )


class IndexSettings(Section):
    """What is known of the workers' caches."""

    max_bytes: int = Field(
        2_147_483_648,
        ge=1_048_576,
        description="Memory for the index; above it the coldest blocks of the fullest worker are let go.",
        json_schema_extra=why("9.6 million blocks at the most bytes one takes"),
    )
    route_miss_threshold: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="Share of a worker's predicted hits that may be missed; above it its refresh is tightened.",
        json_schema_extra=why("evictions between decision and prefill alone cause fewer misses"),
    )
    approximate_ttl_s: Seconds = Field(
        600,
        description="How long a block learned from routing (a worker without events) counts without being used.",
        json_schema_extra=why("twice the time over which the value of an idle block falls to 1/e, measured on traces"),
    )
    approximate_tokens: int = Field(
        262_144,
        ge=1024,
        le=1 << 40,
        description="Cache of a worker that does not report its size, in tokens.",
        json_schema_extra=why("an 8B model on a card of 40 GB"),
    )
    offload_ttl_s: Seconds = Field(
        3600,
        description="How long a block counts in a store that never says what it drops (LMCache, Mooncake, offload to "
        "disk or objects), since it was last announced.",
    )


class PhaseSettings(Section):
    """What differs from `timeouts` for one path or model."""

    connect_s: Seconds | None = None
    send_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    idle_s: Seconds | None = None
    total_s: Seconds | None = None

    def changes(self) -> dict[str, float]:
        """Those that are given, by name."""
        return self.model_dump(exclude_none=True)


class TimeoutSettings(Section):
    """Deadlines of the phases on the worker's side (`docs/concepts/life-of-a-request.md`)."""

    connect_s: Seconds = Field(
        2,
        description="Connection to a worker.",
        json_schema_extra=why(
            "a host that is there answers in milliseconds; a lost packet is sent again after a second"
        ),
    )
    send_s: Seconds = Field(
        30,
        description="Until the worker has taken a request that it does not take at once.",
        json_schema_extra=why("a worker that reads takes a body at once"),
    )
    first_byte_s: Seconds = Field(
        120,
        description="From the request sent until the answer begins, a stream with the first byte of its body.",
        json_schema_extra=why("the prefill of a very long prompt, behind a queue"),
    )
    idle_s: Seconds = Field(
        60,
        description="Between two pieces of an answer, and for a client that takes nothing.",
        json_schema_extra=why("a decode step takes well below a second; a minute of silence is a stuck engine"),
    )
    total_s: Seconds = Field(
        1800,
        description="The whole request, retries included; a client's header `x-request-timeout-s` may shorten it.",
        json_schema_extra=why("the longest answers of reasoning models"),
    )
    paths: dict[Endpoint, PhaseSettings] = Field(
        {}, description="What differs by path: `{/v1/embeddings: {first_byte_s: 10, total_s: 30}}`."
    )
    models: dict[str, PhaseSettings] = Field({}, description="What differs by served model name; wins over the path's.")


def _a_share(given: object) -> object:
    if isinstance(given, int | float) and given > 1:
        raise ValueError(f"expected a share, not {given:g}: 95 % is 0.95")
    return given


def _off_or_a_tail(percentile: float) -> float:
    if 0 < percentile < 0.5:
        raise ValueError("expected 0 (off), or a share from 0.5 to 0.999 such as 0.95")
    return percentile


Percentile = Annotated[
    float, Field(ge=0, le=0.999, allow_inf_nan=False), BeforeValidator(_a_share), AfterValidator(_off_or_a_tail)
]


class HedgeSettings(Section):
    """What differs from `retries` for one path or model."""

    hedge_percentile: Percentile | None = None
    hedge_floor_s: Seconds | None = None


class RetrySettings(Section):
    """Other workers tried before the first byte, because one failed or because it is late."""

    max: int = Field(
        2,
        ge=0,
        le=10,
        description="Further workers tried when one cannot be reached, breaks or is busy.",
        json_schema_extra=why("three workers that fail in a row are no accident; more tries only add load"),
    )
    budget_ratio: float = Field(
        0.2,
        ge=0,
        le=1,
        description="Retries after failures, as a share of a pool's requests in the last 10 s; ten more are always "
        "allowed. Moving on from a worker that has no room (429, 503 with Retry-After) is not counted.",
        json_schema_extra=why("bounds what an outage adds to the load of the others at a fifth"),
    )
    hedge_percentile: Percentile = Field(
        0,
        description="A request whose answer has not begun goes to a second worker too once it has taken longer, "
        "measured by what was expected of it, than this share of its pool's requests (0.95: all but the slowest "
        "twentieth); the first answer counts. 0: never. It is one of `max` and charged to the budget "
        "(`docs/guides/hedging.md`).",
        json_schema_extra=why("a second copy is computed twice: worth it only where single workers stall"),
    )
    hedge_floor_s: Seconds = Field(
        0.5,
        description="And not before this long.",
        json_schema_extra=why("nobody notices less, and a few milliseconds late is late too for a small prompt"),
    )
    paths: dict[Endpoint, HedgeSettings] = Field(
        {}, description="What differs by path: `{/v1/embeddings: {hedge_percentile: 0.99, hedge_floor_s: 0.1}}`."
    )
    models: dict[str, HedgeSettings] = Field({}, description="What differs by served model name; wins over the path's.")

    @model_validator(mode="after")
    def _second_worker_allowed(self) -> RetrySettings:
        shares = [change.hedge_percentile for change in (*self.paths.values(), *self.models.values())]
        if not self.max and any((self.hedge_percentile, *shares)):
            raise ValueError("a second worker (`hedge_percentile`) is one of `max`: allow at least 1")
        return self
