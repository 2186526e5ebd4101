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
from gateway.replicas import Exchange, Journal, Peers, StoreAddress
from gateway.router import Router
from gateway.runtime.supervisor import Supervisor
from gateway.settings import Settings
from gateway.telemetry import PeerReading, ReplicaReading

_NUMBER_BITS = 63


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
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        # Never from `rng`, which may be seeded: two replicas of one number would not hear each other.
        number = secrets.randbits(_NUMBER_BITS)
        self.journal = Journal(number, router.fleet, index, on_change=self._wake)
        self.peers = Peers(number, router.fleet, index, router.sessions, ttl_s=ttl_s)
        self.exchange = Exchange(address, self.journal, self.peers, channel=f"{prefix}:replicas", clock=clock, rng=rng)
        self._clock = clock
        router.watch(self.journal)

    def start(self, supervisor: Supervisor) -> None:
        """Speak and listen from now on."""
        supervisor.start("replicas listen", self.exchange.listen)
        supervisor.start("replicas speak", self.exchange.speak)

    def apply(self, *, ttl_s: float) -> None:
        """Another life time, for what is told from now on."""
        self.peers.ttl_s = ttl_s

    def tick(self, now: float) -> None:
        """Time has passed."""
        self.peers.tick(now)

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
    ttl_s = settings.routing.speculative_ttl_s
    return Sharing(address, router, index, prefix=settings.redis.prefix, ttl_s=ttl_s, clock=clock, rng=rng)
