"""One server that was asked for, and its workers in the fleet: what `membership` keeps of them.

Rules:
1. A member has one seat, or one for each of its data-parallel ranks; none before it has joined.
2. Whether answers report cached tokens is learned from answers where the server does not say it: one that does is
   proof. Some releases leave the count out when it is 0, so a server is taken for silent only after several chats that
   should have hit and reported nothing. A restart may have changed it.

Nothing here waits or does I/O.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gateway.findings import HITS_NOT_REPORTED, METRICS_OFF, PATH_SILENT
from gateway.prefix import PromptHasher
from gateway.records import (
    Endpoint,
    EngineKind,
    EventSource,
    Finding,
    LoadEndpoint,
    Outcome,
    Slot,
    TrustState,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.upstream.kv_feed import KvFeed, worst_trust
from gateway.upstream.load import LoadPoller
from gateway.upstream.load_socket import LoadSocket

WHOLE_EVERY: Final = 6

_PASSING: Final = frozenset((PATH_SILENT.code, METRICS_OFF.code))
"""Findings that the next probe may not make again."""

_SILENT_ANSWERS: Final = 8
"""Chats that should have hit and reported nothing, before a server is said not to report."""


class Tasks(Protocol):
    """Where background work runs (`runtime.Supervisor`)."""

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run in the background; restarted when it fails."""
        ...

    async def stop(self, name: str) -> None:
        """Cancel and wait; unknown names are fine."""
        ...


@dataclass(slots=True, eq=False)
class Seat:
    """One worker of a member: the server, or one rank of it. `block_size` is what the index was told."""

    spec: WorkerSpec
    slot: Slot
    block_size: int = 0
    feeds: dict[EventSource, KvFeed] = field(default_factory=dict)
    tightened: bool = False
    """Its refresh is, so the load of its server is polled more often."""

    def feed_name(self, source: EventSource) -> str:
        """Name of the task that follows one of its feeds."""
        return f"feed {self.spec.name} {source.rank} {source.endpoint}"

    @property
    def trust(self) -> TrustState:
        """The worst state among its feeds; without any nothing is heard of its cache."""
        return worst_trust(feed.trust for feed in self.feeds.values())

    def served(self, outcome: Outcome, block_size: int) -> None:
        """A request was answered: the feed must tell of the blocks computed for it, `block_size` being the engine's.
        The last token is never taken from a cache. With several feeds nobody knows whose request it was."""
        if outcome.delivered_tokens is not None and len(self.feeds) == 1:
            held = outcome.delivered_tokens // block_size
            computed = max(0, outcome.prompt_tokens - 1) // block_size - held
            for feed in self.feeds.values():
                feed.served(computed, outcome.started_at)


@dataclass(slots=True, eq=False)
class Member:
    """One server that was asked for. `error` says why it has not joined, or why the last refresh failed."""

    spec: WorkerSpec
    seats: dict[WorkerId, Seat] = field(default_factory=dict)
    facts: WorkerFacts | None = None
    poller: LoadPoller | None = None
    load_socket: LoadSocket | None = None
    loads_named: tuple[LoadEndpoint, ...] = ()
    """Where it says that its load is published, as others were told."""
    error: str | None = None
    leaving: bool = False
    away: bool = False
    hasher: PromptHasher | None = None
    compared: bool = False
    """Token ids have been compared with the worker's, as far as they can be."""
    differences: tuple[Finding, ...] = ()
    """What the comparison found."""
    not_compared: str | None = None
    """Why the comparison is still to be made."""
    gateways: tuple[str, ...] = ()
    """Those it is and leads to, as it said last, whether it was let in or not."""
    reported: bool | None = None
    """Its answers say how much was cached; None while nobody knows."""
    silent_answers: int = 0
    probed: WorkerFacts | None = None
    """What the last whole probe found, before answers showed more."""
    confirmed: bool = False
    """A load poll since the last probe has shown that its process is the one of `probed`."""
    short_probes: int = 0
    """Since the last whole one."""
    withheld: str | None = None
    """Why what runs it wants no new requests there."""
    look: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: probe at once."""

    @property
    def feeds(self) -> list[KvFeed]:
        """Of all its workers."""
        return [feed for seat in self.seats.values() for feed in seat.feeds.values()]

    @property
    def caught_up(self) -> bool:
        """Joined, and every feed shows what its rank published."""
        return bool(self.seats) and all(feed.caught_up for feed in self.feeds)

    def may_be_short(self, *, asked_for: bool) -> bool:
        """The next probe need only ask what may change while a process runs: `asked_for` ones, and those after anything
        odd, ask for all of it; so does every `WHOLE_EVERY`th. Only vLLM tells its start with every load."""
        known = self.probed
        return (
            known is not None
            and known.engine is EngineKind.VLLM
            and self.confirmed
            and not asked_for
            and self.error is None
            and self.short_probes < WHOLE_EVERY - 1
            and not _PASSING.intersection(finding.code for finding in known.findings)
        )

    def by_rank(self) -> dict[int | None, WorkerId]:
        """Who is behind the URL, as a load poll tells them apart."""
        return {seat.spec.rank.number if seat.spec.rank else None: name for name, seat in self.seats.items()}

    def began_anew(self) -> None:
        """Its load socket shows a new process: counters and what else it said are looked at soon."""
        if self.poller is not None:
            self.poller.restarted()
        self.look.set()

    def restarted(self, start_time_unix: float | None) -> None:
        """The server was away or began anew: what it holds and how it was started may have changed. Where it tells when
        its process started, feeds know what of theirs is older; else they learn it anew."""
        self.reported, self.silent_answers = None, 0
        if self.load_socket is not None:
            self.load_socket.begin_anew()
        for feed in self.feeds:
            if start_time_unix is not None:
                feed.process_started(start_time_unix)
            else:
                feed.resync()

    def answered(self, outcome: Outcome) -> None:
        """A request of one of its workers was answered (rule 2)."""
        if self.reported:
            return
        if outcome.delivered_tokens is not None:
            self.reported = True
        elif outcome.predicted_tokens and outcome.endpoint is Endpoint.CHAT:
            self.silent_answers += 1
            if self.silent_answers == _SILENT_ANSWERS:
                self.reported = False

    def with_reports(self, facts: WorkerFacts) -> WorkerFacts:
        """Facts with what answers have shown, where the server itself is silent about it."""
        if facts.cached_tokens_reported is not None or self.reported is None:
            return facts
        findings = facts.findings if self.reported else (*facts.findings, HITS_NOT_REPORTED.found(facts.engine))
        return replace(facts, cached_tokens_reported=self.reported, findings=findings)


def cut(facts: WorkerFacts) -> tuple[object, ...]:
    """What decides how a server cuts prompts into tokens."""
    return facts.engine, facts.version, facts.models, facts.root, facts.start_time_unix
