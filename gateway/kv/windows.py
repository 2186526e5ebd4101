"""Sliding windows: where an engine with several cache groups can go on from a prefix that it holds.

A model some of whose layers attend to a window only keeps their blocks in groups of their own, and only those it may
need again: the last ones of a prompt, and those before a place where prompts have parted. Such an engine reuses a
prefix of L blocks when its full-attention group holds all of them and each window group the last ones, as many as the
window reaches back (vLLM `SlidingWindowManager.find_longest_cache_hit`). So a worker that holds a whole shared prefix
may have to compute it once more before it can go on from its end.

Rules:
1. Blocks have the same engine hash in every group of a rank. A window group names some of a store's blocks only, in
   order; which ones, the hashes tell.
2. A worker's bit in `WindowMasks.masks` stands at a key while its GPU mask has the bit too, and every window group of
   the rank holds the block.
3. At most `MAX_WINDOW_BLOCKS` a group and rank are kept, the oldest go first, and at most `MAX_GROUPS` groups. A rank
   that forgets its blocks forgets its groups too: they are told again, unless the engine has none any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from gateway.records import BlockKey, EngineHash, Slot

MAX_WINDOW_BLOCKS: Final = 262_144

MAX_GROUPS: Final = 64
"""Of a rank; engines have a handful."""

_ENTRY_BYTES: Final = 140
"""Place in a dictionary and the hash itself."""


class WindowBlocks:
    """What the window groups of one rank hold, with the copies of each block."""

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[int | None, dict[EngineHash, int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    @property
    def bytes(self) -> int:
        """What they take, about."""
        return _ENTRY_BYTES * len(self)

    def knows(self, group: int | None) -> bool:
        """Whether this group is one of them."""
        return group in self._groups

    @property
    def full(self) -> bool:
        """No more groups are taken."""
        return len(self._groups) >= MAX_GROUPS

    def store(self, group: int | None, engine_hash: EngineHash) -> EngineHash | None:
        """A group holds one copy more. Returns the block that had to go for it, if one had."""
        held = self._groups.setdefault(group, {})
        copies = held.get(engine_hash, 0)
        held[engine_hash] = copies + 1
        if copies or len(held) <= MAX_WINDOW_BLOCKS:
            return None
        oldest = next(iter(held))
        del held[oldest]
        return oldest

    def remove(self, group: int | None, engine_hash: EngineHash) -> bool:
        """A group holds one copy less. True when that was the last one."""
        held = self._groups[group]
        copies = held.get(engine_hash, 0)
        if copies > 1:
            held[engine_hash] = copies - 1
            return False
        return held.pop(engine_hash, None) is not None

    def whole(self, engine_hash: EngineHash) -> bool:
        """Whether every group holds it."""
        return all(engine_hash in held for held in self._groups.values())


class WindowMasks:
    """Who can use a block as one of the last of a prefix: `masks` by key (rule 2). `held` is what the full attention of
    the rank holds, `bit` its worker's."""

    __slots__ = ("masks",)

    def __init__(self) -> None:
        self.masks: dict[BlockKey, int] = {}

    def store(
        self,
        blocks: WindowBlocks,
        group: int | None,
        hashes: Sequence[EngineHash],
        held: Mapping[EngineHash, BlockKey],
        bit: int,
    ) -> None:
        """A window group holds these now."""
        for engine_hash in hashes:
            gone = blocks.store(group, engine_hash)
            if gone is not None and gone in held:
                self.unmark(held[gone], bit)
        self.mark(blocks, hashes, held, bit)

    def remove(
        self,
        blocks: WindowBlocks,
        group: int | None,
        hashes: Sequence[EngineHash],
        held: Mapping[EngineHash, BlockKey],
        bit: int,
    ) -> None:
        """A window group no longer holds one copy of each of these."""
        for engine_hash in hashes:
            if blocks.remove(group, engine_hash) and engine_hash in held:
                self.unmark(held[engine_hash], bit)

    def mark(
        self, blocks: WindowBlocks, hashes: Sequence[EngineHash], held: Mapping[EngineHash, BlockKey], bit: int
    ) -> None:
        """Some group holds these now: note those that all of them hold."""
        for engine_hash in hashes:
            key = held.get(engine_hash)
            if key is not None and blocks.whole(engine_hash):
                self.masks[key] = self.masks.get(key, 0) | bit

    def unmark(self, key: BlockKey, bit: int) -> None:
        """Some group no longer holds it."""
        left = self.masks.get(key, 0) & ~bit
        if left:
            self.masks[key] = left
        else:
            self.masks.pop(key, None)


class Windows(NamedTuple):
    """For an overlap: `masks` by key, and by worker how many of its blocks a window reaches back."""

    masks: Mapping[BlockKey, int]
    reaches: Mapping[Slot, int]

    def marked(self, keys: Sequence[BlockKey]) -> list[tuple[int, int]]:
        """Positions of a chain at which some worker's windows hold the block, the last first, with their masks."""
        held = self.masks.get
        return [(at, mask) for at in range(len(keys) - 1, -1, -1) if (mask := held(keys[at], 0))]


def resumes_at(marked: Sequence[tuple[int, int]], slot: Slot, blocks: int, *, reach: int, span: int) -> int:
    """The longest run, at most `blocks` keys, that a worker can go on from; `marked` as `Windows.marked` gives it, of a
    chain whose keys the worker's full-attention group holds so far. One of its blocks covers `span` keys."""
    bit = 1 << slot
    end = found = 0
    expected = -1
    for at, mask in marked:
        if at >= blocks or not mask & bit:
            continue
        if at != expected:
            end, found = at + 1, 0
        found += 1
        expected = at - span
        if found == reach or expected < 0:
            return end
    return 0
