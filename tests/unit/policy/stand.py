"""A worker as policies see it, with every number in the test's hand."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.records import Slot, Standing, WorkerId

_NAME = WorkerId("w")
_SLOT = Slot(0)


@dataclass
class Stand:
    """A worker as policies see it."""

    id: WorkerId = _NAME
    slot: Slot = _SLOT
    weight: float = 1.0
    picked: int = 0
    inflight_requests: int = 0
    inflight_tokens: int = 0
    pending_s: float = 0.0
    head_s: float = 0.0
    head_since: float = 0.0
    slowdown: float = 1.0
    foreign_s: float = 0.0
    foreign_since: float = 0.0
    foreign_requests: float = 0.0
    kv_tokens: int = 0
    kv_capacity: int = 0
    unindexed_tokens: int = 0
    evict_discount: float = 0.0
    idle_since_s: float = 0.0
    regret_s: float = 0.0

    @property
    def standing(self) -> Standing:
        """As `Worker` makes it."""
        requests = self.inflight_requests + self.foreign_requests
        return (
            self.slowdown, self.pending_s, self.head_s, self.head_since, self.foreign_s, self.foreign_since, requests,
            self.regret_s, self.kv_tokens, self.kv_capacity, self.unindexed_tokens, self.evict_discount,
            self.idle_since_s,
        )  # fmt: skip
