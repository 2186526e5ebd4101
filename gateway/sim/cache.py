"""What the prefix caches of simulated engines share: a request's claim, the face both have, and the tier below the GPU.

`paged_cache` is vLLM's block pool, `radix_cache` SGLang's tree. Names of blocks are plain integers that stand for a
block and everything before it; they mean nothing here. No clock, no events: callers are told what changed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


@dataclass(slots=True)
class Claim:
    """What one request holds: its named blocks in order, and `reserved` blocks without a name.

    `held` is how many leading blocks were cached when it was made; `fresh` are the positions of blocks that were
    nowhere in the cache and have still to be computed, in order. `at` is the tree node a radix cache keeps for it.
    """

    blocks: list[int]
    held: int
    reserved: int
    fresh: list[int] = field(default_factory=list)
    at: object = None


class Released(NamedTuple):
    """What letting go of a claim changed: positions of its blocks that are cached since, names that are gone."""

    stored: list[int]
    dropped: list[int]


class PrefixCache(Protocol):
    """`capacity` is in blocks. Every operation costs time in the blocks of one request, or in what it evicts."""

    @property
    def capacity(self) -> int: ...

    @property
    def in_use(self) -> int:
        """Blocks that cannot be evicted: pinned and reserved."""

    @property
    def resident(self) -> int:
        """Named blocks, pinned and idle."""

    def held(self, blocks: Sequence[int]) -> int:
        """Length of the leading run of `blocks` that is cached."""

    def fits(self, blocks: Sequence[int], reserved: int) -> bool:
        """Whether `claim` would leave everything that is pinned or reserved in place."""

    def claim(self, blocks: Sequence[int], reserved: int) -> tuple[Claim, list[int]]:
        """Hold `blocks` and room for `reserved` more; idle blocks make room. Returns the claim and what was evicted.

        Does not refuse: ask `fits` first, or accept that a request larger than the cache overruns it.
        """

    def fill(self, claim: Claim) -> list[int]:
        """The prompt of a claim is computed: positions of its blocks that are cached since."""

    def extend(self, claim: Claim, block: int) -> list[int]:
        """One reserved block of `claim` became full and has a name now. Its position when it is cached since."""

    def release(self, claim: Claim, *, uncomputed: bool = False) -> Released:
        """Let go of a claim. Its blocks stay cached, except, with `uncomputed`, those nobody else holds that were
        still to be computed."""

    def evict(self, count: int | None) -> list[int]:
        """Drop idle blocks as if room were needed, `count` at least where there are so many, None for all."""

    def clear(self) -> list[int]:
        """Forget every idle block; returns them."""


class HostTier:
    """A tier below the GPU that gets a copy of every block as it is computed and keeps the newest.

    `capacity` is in blocks; blocks come and go in chunks of `chunk` consecutive ones, aligned at the start of the
    prompt and named by their last block, as vLLM's OffloadingConnector keeps them. SGLang's host tier is the same with
    chunks of one page.
    """

    def __init__(self, capacity: int, *, chunk: int = 1) -> None:
        if chunk < 1 or capacity < chunk:
            raise ValueError("a host tier has room for a chunk of at least one block")
        self.chunk = chunk
        self.capacity = capacity
        self._most = capacity // chunk
        self._chunks: OrderedDict[int, None] = OrderedDict()

    @property
    def resident(self) -> int:
        """Blocks held."""
        return len(self._chunks) * self.chunk

    def run(self, blocks: Sequence[int], start: int) -> int:
        """How many blocks from position `start` on are here without a hole; the chunks they are in become new."""
        size = self.chunk
        end = start
        for last in range(start // size * size + size - 1, len(blocks), size):
            if blocks[last] not in self._chunks:
                break
            self._chunks.move_to_end(blocks[last])
            end = last + 1
        return max(0, end - start)

    def store(self, blocks: Sequence[int], positions: Sequence[int]) -> tuple[list[int], list[int]]:
        """Blocks at `positions` were computed: keep the chunks they complete. Returns positions of the last blocks of
        chunks that are new here, and the names of chunks that had to go."""
        stored: list[int] = []
        for position in positions:
            if (position + 1) % self.chunk:
                continue
            if blocks[position] not in self._chunks:
                stored.append(position)
            self._chunks[blocks[position]] = None
            self._chunks.move_to_end(blocks[position])
        gone = self.evict(max(0, len(self._chunks) - self._most))
        return stored, gone

    def evict(self, chunks: int | None) -> list[int]:
        """Drop the oldest chunks, None for all; returns their names."""
        count = len(self._chunks) if chunks is None else min(chunks, len(self._chunks))
        return [self._chunks.popitem(last=False)[0] for _ in range(count)]
