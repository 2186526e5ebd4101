"""Numbers of the index: what a call changed, how far a worker's part has come, what is held and what it takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from gateway.kv.approximate import ApproximateStats
from gateway.kv.tables import TIERS, RankTable, WorkerTable
from gateway.records import BlockKey, Slot, Tier

_INT_BYTES: Final = 32  # a Python int between 2**30 and 2**60; one more digit is within the same allocation size
_ZEROS: Final = [0, 0, 0]

_NONE: Final[Mapping[Tier, int]] = MappingProxyType({})

# Slots of the object, token array, list of copies, list and dictionary entry of its parent, the hash itself.
_ORPHAN_BYTES: Final = 480
_PLACEHOLDER_BYTES: Final = 200  # no tokens, and no parent that knows it


class Tally:
    """Counts of one batch, in blocks of the engine. `stored` and `removed` are by tier, in the order of `TIERS`;
    `adopted` are orphans whose parents became known."""

    __slots__ = ("adopted", "clears", "dropped", "ignored", "orphans", "removed", "repeated", "stored")

    def __init__(self) -> None:
        self.stored = [0, 0, 0, 0]
        self.removed = [0, 0, 0, 0]
        self.repeated = 0
        self.adopted = 0
        self.orphans = 0
        self.dropped = 0
        self.clears = 0
        self.ignored: dict[str, int] = {}

    def ignore(self, reason: str, blocks: int) -> None:
        """Count blocks that were of no use."""
        self.ignored[reason] = self.ignored.get(reason, 0) + blocks


class Applied(NamedTuple):
    """What one call of `apply` changed, in blocks of the engine; maps have no zeros.

    `repeated` are announcements of blocks held already, `orphans` blocks that wait for their parent or their tokens,
    `dropped` old orphans that had to go for them. `ignored` is by reason: `unknown_removal` (announced before
    we listened), `let_go` (removals of blocks dropped here for a limit), `cache_group` (not full attention),
    `block_size` (identity problem), `malformed`, `unbound`. `unfinished`: a great many orphans have found their
    parents; apply again, without events too, to place the rest.
    """

    stored: Mapping[Tier, int]
    removed: Mapping[Tier, int]
    ignored: Mapping[str, int]
    repeated: int = 0
    orphans: int = 0
    dropped: int = 0
    clears: int = 0
    unfinished: bool = False


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The state of the index. `blocks` counts distinct keys by slot and tier; `ignored` is by slot and reason, since
    the slot was bound. `truncated` counts blocks let go because of the cap. `estimated_bytes` covers every table; it is
    an estimate, good to a tenth. `keys` are distinct keys in all tiers, learned ones included."""

    blocks: Mapping[Slot, Mapping[Tier, int]]
    ignored: Mapping[Slot, Mapping[str, int]]
    keys: int
    orphans: int
    placeholders: int
    orphans_dropped: int
    speculative: int
    speculative_truncated: int
    truncated: int
    estimated_bytes: int
    approximate: ApproximateStats


class Mark(NamedTuple):
    """How far one worker's part of the index has come: `epoch` changes when it is bound or purged, `clears` and
    `removed` (blocks) count what its events took away."""

    epoch: int = 0
    clears: int = 0
    removed: int = 0


def _by_tier(counts: list[int]) -> Mapping[Tier, int]:
    if counts[1:] == _ZEROS:
        return {Tier.GPU: counts[0]} if counts[0] else _NONE
    return {tier: count for tier, count in zip(TIERS, counts, strict=True) if count}


def applied(tally: Tally, *, unfinished: bool) -> Applied:
    """What a call of `apply` tells its caller."""
    return Applied(
        _by_tier(tally.stored),
        _by_tier(tally.removed),
        tally.ignored,
        tally.repeated,
        tally.orphans,
        tally.dropped,
        tally.clears,
        unfinished,
    )


def index_stats(
    masks: Sequence[Mapping[BlockKey, int]],
    workers: Mapping[Slot, WorkerTable],
    approximate: ApproximateStats,
    *,
    orphans_dropped: int,
    speculative_truncated: int,
    truncated: int,
) -> IndexStats:
    """The numbers of all tables; costs a walk over workers and ranks, not over blocks."""
    tables = [table for worker in workers.values() for table in worker.ranks.values()]
    tables += [preview.over for worker in workers.values() for preview in worker.previews.values()]
    return IndexStats(
        blocks={slot: dict(zip(TIERS, worker.blocks, strict=True)) for slot, worker in workers.items()},
        ignored={slot: dict(worker.ignored) for slot, worker in workers.items()},
        keys=sum(map(len, masks)),
        orphans=sum(len(table.orphans) - table.placeholders for table in tables),
        placeholders=sum(table.placeholders for table in tables),
        orphans_dropped=orphans_dropped,
        speculative=sum(worker.promises.held for worker in workers.values()),
        speculative_truncated=speculative_truncated,
        truncated=truncated,
        estimated_bytes=_estimated_bytes(masks, workers.values(), tables) + approximate.bytes,
        approximate=approximate,
    )


def _estimated_bytes(
    masks: Sequence[Mapping[BlockKey, int]], workers: Iterable[WorkerTable], tables: Sequence[RankTable]
) -> int:
    """What the tables take; good to a tenth."""
    total = sum(map(sys.getsizeof, masks))
    for worker in workers:
        total += worker.promises.bytes
    for table in tables:
        for held, copies in zip(table.held, table.copies, strict=True):
            # One int for the hash, one for the key; a mask is one int shared by many keys or amortised over
            # the workers in it.
            total += sys.getsizeof(held) + sys.getsizeof(copies) + 2 * _INT_BYTES * len(held)
        total += sum(map(sys.getsizeof, table.heads)) + sys.getsizeof(table.orphans)
        total += table.windows.bytes if table.windows is not None else 0
        total += table.chunks.bytes + sum(lifetimes.bytes for lifetimes in table.lifetimes)
        total += _ORPHAN_BYTES * (len(table.orphans) - table.placeholders) + _PLACEHOLDER_BYTES * table.placeholders
    return total
