"""What this process shares with the other replicas of its fleet, where a store is configured.

Rules:
1. Without a store nothing of it exists, and no request pays for it.
2. Nothing here is waited for when the process starts: it serves from what it knows, and what others tell comes in.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from random import Random

from gateway.kv import KvIndex
from gateway.replicas import Exchange, Journal, Peers, Shelf
from gateway.router import Router
from gateway.runtime.supervisor import Supervisor
from gateway.runtime.warmth import Warmth
from gateway.settings import Settings
from gateway.store_address import StoreAddress
from gateway.telemetry import PeerReading, ReplicaReading
from gateway.upstream.membership import Membership

_NUMBER_BITS = 63
SHELF_LIFE_PERIODS = 20
"""Periods that what is left for others stays: ten minutes, for a whole fleet that is begun anew."""


class Sharing:
    """Made once; `start` begins, `tick` is called about twice a second, `stop` before the tasks end."""

    def __init__(
        self,
        address: StoreAddress,
        router: Router,
        index: KvIndex,
        *,
        prefix: str,
        ttl_s: float,
        snapshot_s: float,
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        # Never from `rng`, which may be seeded: two replicas of one number would not hear each other.
        number = secrets.randbits(_NUMBER_BITS)
        self.journal = Journal(number, router.fleet, index, on_change=self._wake)
        self.peers = Peers(number, router.fleet, index, router.sessions, ttl_s=ttl_s)
        self.exchange = Exchange(address, self.journal, self.peers, channel=f"{prefix}:replicas", clock=clock, rng=rng)
        self._clock = clock
        shelf = Shelf(address, prefix=prefix, life_s=SHELF_LIFE_PERIODS * snapshot_s)
        self.warmth = Warmth(shelf, router.fleet, index, snapshot_s=snapshot_s)
        router.watch(self.journal)

    def start(self, supervisor: Supervisor, membership: Membership) -> None:
        """Speak and listen from now on, and begin feeds from what others left."""
        membership.feeds.before = self.warmth.warm
        supervisor.start("warm start", lambda: self.warmth.keep(membership))
        supervisor.start("replicas listen", self.exchange.listen)
        supervisor.start("replicas speak", self.exchange.speak)

    def apply(self, *, ttl_s: float) -> None:
        """Another life time, for what is told from now on."""
        self.peers.ttl_s = ttl_s

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.peers.tick(now)
        self.warmth.tick()

    async def stop(self) -> None:
        """Say goodbye."""
        await self.exchange.bye()

    def reading(self) -> ReplicaReading:
        """For metrics and the admin port."""
        exchange, now = self.exchange, self._clock()
        counts = exchange.counts
        return ReplicaReading(
            number=f"{self.journal.replica:016x}",
            store=str(exchange.address),
            up=exchange.up,
            lag_s=exchange.lag_s,
            error=exchange.error,
            messages={"sent": counts["sent"], "heard": counts["heard"]},
            bytes={"sent": counts["sent_bytes"], "heard": counts["heard_bytes"]},
            ignored=self.peers.ignored + Counter({why: counts[why] for why in ("version", "size", "malformed")}),
            untold=self.journal.untold,
            copies=dict(self.warmth.results),
            peers=tuple(
                PeerReading(
                    f"{number:016x}",
                    now - peer.heard_at,
                    now - peer.joined_at,
                    peer.requests,
                    len(peer.open),
                    peer.lost,
                )
                for number, peer in self.peers.peers.items()
            ),
        )

    def _wake(self) -> None:
        self.exchange.wake()


def share(
    settings: Settings, router: Router, index: KvIndex, *, clock: Callable[[], float], rng: Random
) -> Sharing | None:
    """What a process with these settings shares; None where they name no store."""
    address = settings.redis.address()
    if address is None:
        return None
    return Sharing(
        address,
        router,
        index,
        prefix=settings.redis.prefix,
        ttl_s=settings.routing.speculative_ttl_s,
        snapshot_s=settings.redis.snapshot_s,
        clock=clock,
        rng=rng,
    )
