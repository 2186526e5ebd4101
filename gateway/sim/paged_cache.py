"""Paged KV cache of one simulated worker: which named blocks are held, by how many requests, and what goes first.

Rules (vLLM's block pool, with one copy of each block instead of several):
1. A block held by a request is pinned and never evicted; pins are counted.
2. A block nobody holds stays cached in an idle list, oldest first. A request lets go of its blocks tail first, so
   the tail of a prefix is evicted before its head.
3. Blocks without a name (the partial last block, room for tokens to come) are only counted, as `reserved`.
4. pinned + idle + reserved <= capacity, unless one request alone is larger than the cache.

Names are plain integers and mean nothing here. No clock, no events: callers are told what was evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from gateway.sim.cache import Claim, Released


class PagedCache:
    """A `PrefixCache`. Every operation costs time in the blocks of one request only."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a cache has at least one block")
        self.capacity = capacity
        self._pins: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0

    # ---------------------------------------------------------------- looking

    @property
    def in_use(self) -> int:
        """Blocks that cannot be evicted: pinned and reserved."""
        return len(self._pins) + self._reserved

    @property
    def resident(self) -> int:
        """Named blocks, pinned and idle."""
        return len(self._pins) + len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._pins or block in self._idle

    def held(self, blocks: Sequence[int]) -> int:
        """Length of the leading run of `blocks` that is cached."""
        pins, idle = self._pins, self._idle
        count = 0
        for block in blocks:
            if block not in pins and block not in idle:
                break
            count += 1
        return count

    def fits(self, blocks: Sequence[int], reserved: int) -> bool:
        """See `PrefixCache`."""
        pins, idle = self._pins, self._idle
        held = woken = 0
        for block in blocks:
            if block in pins:
                held += 1
            elif block in idle:
                held += 1
                woken += 1
            else:
                break
        return len(blocks) - held + reserved <= self.capacity - self.in_use - woken

    # ---------------------------------------------------------------- changing

    def claim(self, blocks: Sequence[int], reserved: int) -> tuple[Claim, list[int]]:
        """See `PrefixCache`."""
        pins, idle = self._pins, self._idle
        claim = Claim(list(blocks), self.held(blocks), reserved)
        for block in claim.blocks[: claim.held]:
            self._pin(block)
        over = self.resident + self._reserved + len(claim.blocks) - claim.held + reserved - self.capacity
        evicted = self.evict(max(0, over))
        for position in range(claim.held, len(claim.blocks)):
            block = claim.blocks[position]
            if block not in pins and block not in idle:
                claim.fresh.append(position)
            self._pin(block)
        self._reserved += reserved
        return claim, evicted

    def fill(self, claim: Claim) -> list[int]:
        """See `PrefixCache`."""
        fresh, claim.fresh = claim.fresh, []
        return fresh

    def extend(self, claim: Claim, block: int) -> list[int]:
        """See `PrefixCache`: an answer's blocks are cached as they fill."""
        known = block in self
        self._pin(block)
        claim.blocks.append(block)
        claim.reserved -= 1
        self._reserved -= 1
        return [] if known else [len(claim.blocks) - 1]

    def release(self, claim: Claim, *, uncomputed: bool = False) -> Released:
        """See `PrefixCache`."""
        drop = {claim.blocks[position] for position in claim.fresh} if uncomputed else set()
        dropped: list[int] = []
        pins, idle = self._pins, self._idle
        for block in reversed(claim.blocks):
            count = pins[block] - 1
            if count:
                pins[block] = count
                continue
            del pins[block]
            if block in drop:
                dropped.append(block)
            else:
                idle[block] = None
        self._reserved -= claim.reserved
        claim.reserved = 0
        claim.blocks = []
        claim.fresh = []
        return Released([], dropped)

    def evict(self, count: int | None) -> list[int]:
        """See `PrefixCache`: oldest first."""
        wanted = len(self._idle) if count is None else min(count, len(self._idle))
        return [self._idle.popitem(last=False)[0] for _ in range(wanted)]

    def clear(self) -> list[int]:
        """See `PrefixCache`: oldest first."""
        return self.evict(None)

    def _pin(self, block: int) -> None:
        count = self._pins.get(block)
        if count is None:
            self._idle.pop(block, None)
            self._pins[block] = 1
        else:
            self._pins[block] = count + 1
