"""One rank's blocks as they are now, to be kept elsewhere and put back into the index of another process.

Rules:
1. Taken at once, from tables whose feed has applied everything up to one batch; what is done with the copy is no
   business of the loop.
2. What it holds is a true part of the engine's cache at that batch: blocks that wait for a parent, and those of a
   connector that never says what it drops, are left out.
3. It is put back in steps, into an empty rank of the same key size. Whether the engine is still the same process is for
   the feed to find out (`FeedState.resume`).
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from gateway.kv.ingest import Placement
from gateway.kv.numbers import Tally
from gateway.kv.tables import TIERS, RankTable, WorkerTable
from gateway.records import BlockKey, EngineHash

MAX_BLOCKS: Final = 1_000_000
"""Of one rank: 16 MB as bytes. A cache of more is learned from the replay alone."""


class TierBlocks(NamedTuple):
    """Blocks of one tier: the key of each, copies beyond the first, and the earlier keys of those that stand for
    several."""

    held: Mapping[EngineHash, BlockKey]
    copies: Mapping[EngineHash, int]
    heads: Mapping[EngineHash, tuple[BlockKey, ...]]


class RankBlocks(NamedTuple):
    """`size` is that of the keys in tokens, `span` how many of them one block of the engine covers, `counted` whether
    the engine counts copies. `groups` says which cache groups tell of reusable prefixes, `kinds` those that do."""

    size: int
    span: int
    counted: bool
    groups: Mapping[int | None, bool]
    kinds: Mapping[int | None, str]
    tiers: tuple[TierBlocks, ...]

    @property
    def blocks(self) -> int:
        """In all tiers."""
        return sum(len(tier.held) for tier in self.tiers)


def taken(worker: WorkerTable, table: RankTable) -> RankBlocks | None:
    """A copy; None when there are too many blocks, and for an engine with sliding windows: what those groups hold is
    told by the replay alone. About 30 ns a block."""
    if sum(map(len, table.held)) > MAX_BLOCKS or table.windows is not None:
        return None
    tiers = []
    for held, copies, heads, lifetimes in zip(table.held, table.copies, table.heads, table.lifetimes, strict=True):
        kept = held.copy() if not len(lifetimes) else {h: key for h, key in held.items() if h not in lifetimes}
        tiers.append(TierBlocks(kept, copies.copy(), heads.copy()))
    groups, kinds = table.groups_told()
    return RankBlocks(worker.block_size, worker.span, worker.counted, groups, kinds, tuple(tiers))


def putting_back(
    placement: Placement, worker: WorkerTable, table: RankTable, blocks: RankBlocks, most: int
) -> Generator[int, None, None]:
    """Place a copy's blocks, at most so many in a step; yields how many."""
    table.tell_groups(blocks.groups, blocks.kinds)
    tally = Tally()
    for tier, (held, copies, heads) in zip(range(len(TIERS)), blocks.tiers, strict=True):
        rest = iter(held.items())
        while batch := list(islice(rest, most)):
            plain = [(name, key) for name, key in batch if name not in heads] if heads else batch
            placement.place_all(worker, table, tier, [name for name, _ in plain], [key for _, key in plain], tally)
            if heads:
                for name, key in batch:
                    if name in heads:
                        placement.place(worker, table, tier, name, (*heads[name], key), tally)
            for name, _ in batch:
                if name in copies:
                    table.copies[tier][name] = copies[name]
            yield len(batch)
    if blocks.span > 1:
        worker.span = blocks.span
