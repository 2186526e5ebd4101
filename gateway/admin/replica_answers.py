"""What the admin port tells about the store and the other replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.admin.answer import Answer

if TYPE_CHECKING:
    from gateway.telemetry import PeerReading, ReplicaReading


class PeerAnswer(Answer):
    """Another replica."""

    replica: str
    """Its number, random for each start."""
    silent_s: float
    """Seconds since it was heard; after three it is forgotten."""
    known_s: float
    """Seconds since it was heard first."""
    inflight_requests: int
    """Its open requests, on all workers."""
    placements: int
    """Requests of it whose prefill is not over, with the blocks they will bring."""
    lost: int
    """Messages of it that never came; the next full state made good for them."""

    @classmethod
    def of(cls, peer: PeerReading) -> PeerAnswer:
        """As metrics see it."""
        return cls(
            replica=peer.number,
            silent_s=round(peer.silent_s, 3),
            known_s=round(peer.known_s, 3),
            inflight_requests=peer.requests,
            placements=peer.placements,
            lost=peer.lost,
        )


class ReplicasAnswer(Answer):
    """This replica, its store, and the others heard over it."""

    replica: str | None = None
    """Number of this one; null without a store."""
    store: str | None = None
    """Kind and hosts, without credentials."""
    up: bool = False
    """Messages go through the store and come back."""
    lag_s: float | None = None
    """How long the last state of this replica took through the store and back; null while it is down."""
    error: str | None = None
    """Why it is down."""
    ignored: dict[str, int]
    """Messages and placements of others that were of no use, by reason."""
    peers: list[PeerAnswer]

    @classmethod
    def of(cls, reading: ReplicaReading | None) -> ReplicasAnswer:
        """As metrics see it."""
        if reading is None:
            return cls(ignored={}, peers=[])
        return cls(
            replica=reading.number,
            store=reading.store,
            up=reading.up,
            lag_s=reading.lag_s,
            error=reading.error,
            ignored={reason: count for reason, count in reading.ignored.items() if count},
            peers=[PeerAnswer.of(peer) for peer in reading.peers],
        )
