"""What a running gateway has seen of its workers: members, hits predicted and delivered, causes of misses, feeds.

Read are the answers of `/admin/workers` and `/metrics` of the admin port; who asks for them is the command. Counts are
since the gateway's start. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from gateway import findings as table
from gateway.errors import UNREADABLE
from gateway.records import Finding, Severity, WorkerId, WorkerSpec
from gateway.upstream.load_text import read_series

MIN_REQUESTS = 20
"""Fewer say nothing about hits."""
MISS_SHARE = 0.05
LOW_TRUST = 0.75


class _Said(msgspec.Struct):
    severity: Severity
    code: str
    message: str
    fix: str


class _Endpoint(msgspec.Struct):
    rank: int
    endpoint: str
    replay_endpoint: str | None = None


class _Feed(msgspec.Struct):
    errors: int = 0
    replays: dict[str, int] = {}


class Member(msgspec.Struct):
    """A worker of `/admin/workers`: the fields that are judged."""

    id: str
    url: str
    state: str
    trust: float
    member: str = ""
    pool: str = "default"
    reason: str | None = None
    index_blocks: dict[str, int] = {}
    events: list[_Endpoint] = []
    feed: _Feed | None = None
    findings: list[_Said] = []

    @property
    def server(self) -> WorkerId:
        """Name of the server it is, or is a data-parallel rank of."""
        return WorkerId(self.member or self.id)

    def spec(self) -> WorkerSpec:
        """Its server as the gateway reaches it. Its API key is not told."""
        first = next((source for source in self.events if source.rank == 0), None)
        return WorkerSpec(
            name=self.server,
            url=self.url,
            pool=self.pool,
            kv_events=first.endpoint if first is not None else None,
            kv_replay=first.replay_endpoint if first is not None else None,
        )


class _Joining(msgspec.Struct):
    id: str
    error: str | None = None


class _Workers(msgspec.Struct):
    workers: list[Member]
    joining: list[_Joining] = []


@dataclass(frozen=True, slots=True)
class Counts:
    """What `/metrics` counts of one worker."""

    requests: float = 0
    available: float = 0
    predicted: float = 0
    promised: float = 0
    reported: float = 0
    delivered: float = 0
    predictions: float = 0
    misses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatewaySeen:
    """A gateway's servers, and its findings about each worker (what its probes found: about each server); `problem`
    when it could not be asked."""

    servers: tuple[WorkerSpec, ...]
    findings: Mapping[WorkerId, list[Finding]]
    problem: Finding | None = None


def read_gateway(workers: bytes, metrics: bytes) -> GatewaySeen:
    """From the answers of `/admin/workers` and `/metrics`."""
    try:
        said = msgspec.json.decode(workers, type=_Workers)
    except UNREADABLE as error:
        return unseen(f"/admin/workers answered something unexpected ({error}); is this kvgate's admin port?")
    findings: dict[WorkerId, list[Finding]] = {}
    specs: dict[WorkerId, WorkerSpec] = {}
    for member in said.workers:
        findings.setdefault(WorkerId(member.id), []).extend(check_member(member, read_counts(metrics, member.id)))
        of_server = findings.setdefault(member.server, [])
        of_server += [Finding(*msgspec.structs.astuple(found)) for found in member.findings]
        # Ranks come in the order of their numbers; the endpoints of rank 0 stand for all.
        specs.setdefault(member.server, member.spec())
    for joining in said.joining:
        findings[WorkerId(joining.id)] = [table.NOT_JOINED.found(problem=joining.error or "it is being asked")]
    return GatewaySeen(tuple(specs.values()), {name: list(dict.fromkeys(many)) for name, many in findings.items()})


def unseen(problem: str) -> GatewaySeen:
    """A gateway that could not be asked."""
    return GatewaySeen((), {}, table.GATEWAY_UNREACHABLE.found(problem=problem))


def read_counts(metrics: bytes, worker: str) -> Counts:
    """The counters of one worker from the text of `/metrics`."""

    def total(name: str) -> float:
        return sum(one.value for one in read_series(metrics, name) if one.labels.get("worker") == worker)

    misses: dict[str, float] = {}
    for one in read_series(metrics, "kvgate_route_misses_total"):
        if one.labels.get("worker") == worker and one.value:
            misses[one.labels.get("cause", "")] = one.value
    return Counts(
        requests=total("kvgate_requests_total"),
        available=total("kvgate_available_tokens_total"),
        predicted=total("kvgate_predicted_tokens_total"),
        promised=total("kvgate_promised_tokens_total"),
        reported=total("kvgate_reported_prompt_tokens_total"),
        delivered=total("kvgate_delivered_tokens_total"),
        predictions=total("kvgate_route_predictions_total"),
        misses=misses,
    )


def check_member(member: Member, counts: Counts) -> Iterable[Finding]:
    """What a gateway's own numbers say about one worker."""
    if member.state not in ("ready", "degraded"):
        yield table.NOT_READY.found(state=member.state, reason=member.reason or "no reason told")
    blocks = sum(member.index_blocks.values())
    # A prompt that comes again at once matches what was sent, whatever the worker announced: that shows nothing.
    matched = counts.predicted > counts.promised or counts.available > counts.predicted
    if blocks and counts.requests >= MIN_REQUESTS and not matched:
        if counts.delivered:
            said = f", though {counts.delivered:.0f} tokens came from its cache"
            yield table.ZERO_MATCHES.found(blocks=blocks, requests=int(counts.requests), delivered=said)
        elif not counts.reported:
            said = "; whether it had hits it does not report"
            yield table.ZERO_MATCHES.found(blocks=blocks, requests=int(counts.requests), delivered=said)
    missed = sum(counts.misses.values())
    if counts.predictions >= MIN_REQUESTS and missed / counts.predictions > MISS_SHARE:
        cause = max(counts.misses, key=lambda name: counts.misses[name])
        yield table.ROUTE_MISSES.found(
            share=missed / counts.predictions, predictions=int(counts.predictions), cause=cause
        )
    if member.trust < LOW_TRUST and member.events:
        yield table.LOW_TRUST.found(trust=member.trust)
    if member.feed is not None:
        lost = member.feed.replays.get("unavailable", 0)
        if member.feed.errors or lost:
            yield table.FEED_ERRORS.found(errors=member.feed.errors, lost=lost)
