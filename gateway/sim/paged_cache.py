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
from dataclasses import dataclass, field


@dataclass(slots=True)
class Claim:
    """What one request holds: its named blocks in order, and `reserved` blocks without a name.

    `held` is how many leading blocks were cached when it was made; `fresh` are the positions of blocks that were
    nowhere in the cache and have still to be computed, in order.
    """

    blocks: list[int]
    held: int
    reserved: int
    fresh: list[int] = field(default_factory=list)


class PagedCache:
    """`capacity` is in blocks. Every operation costs time in the blocks of one request only."""

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
        """Whether `claim` would leave everything that is pinned or reserved in place."""
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
        """Pin `blocks` and count `reserved` more; idle blocks make room. Returns the claim and what was evicted.

        Does not refuse: ask `fits` first, or accept that a request larger than the cache overruns it.
        """
        pins, idle = self._pins, self._idle
        claim = Claim(list(blocks), self.held(blocks), reserved)
        for block in claim.blocks[: claim.held]:
            self._pin(block)
        over = self.resident + self._reserved + len(claim.blocks) - claim.held + reserved - self.capacity
        evicted: list[int] = []
        while over > 0 and idle:
            evicted.append(idle.popitem(last=False)[0])
            over -= 1
        for position in range(claim.held, len(claim.blocks)):
            block = claim.blocks[position]
            if block not in pins and block not in idle:
                claim.fresh.append(position)
            self._pin(block)
        self._reserved += reserved
        return claim, evicted

    def name(self, claim: Claim, block: int) -> bool:
        """One reserved block of `claim` became full and has a name now. False when that block was cached already."""
        known = block in self
        self._pin(block)
        claim.blocks.append(block)
        claim.reserved -= 1
        self._reserved -= 1
        return not known

    def release(self, claim: Claim, *, uncomputed: bool = False) -> list[int]:
        """Let go of a claim. Its blocks stay cached, except, with `uncomputed`, the fresh ones nobody else holds.

        Returns the blocks that were dropped.
        """
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
        claim.blocks.clear()
        claim.fresh.clear()
        return dropped

    def clear(self) -> list[int]:
        """Forget every idle block; returns them, oldest first."""
        gone = list(self._idle)
        self._idle.clear()
        return gone

    def _pin(self, block: int) -> None:
        count = self._pins.get(block)
        if count is None:
            self._idle.pop(block, None)
            self._pins[block] = 1
        else:
            self._pins[block] = count + 1
