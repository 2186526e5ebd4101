"""Shards: slices of a large pool, one of which is home to a prefix, so that a decision looks at that slice only.

Rules:
1. A worker's shard depends on names and on how many workers there are, not on who is ready: a worker that is ejected
   for a while leaves the others where they are. Shards differ by at most one worker in size (rendezvous hashing with
   bounded loads).
2. A prefix's order of shards is a rendezvous order of its leading blocks, the same in every replica. When the number of
   shards changes by one, only the share of the new shard moves.
3. Shards are soft: who is asked after home is the router's choice (`routing.spill_margin_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.pool.worker import Worker
from gateway.records import Slot, WorkerId


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """`shards` is how many a pool is split into at most, 1 for never; none gets fewer than `least_workers`."""

    shards: int = 1
    least_workers: int = 16

    def count(self, workers: int) -> int:
        """Shards of a pool of so many workers."""
        return max(1, min(self.shards, workers // self.least_workers))


class Shard(NamedTuple):
    """Workers that may get requests now and are looked at together: a shard, or the whole pool. `slots` and `names` are
    theirs, in their order, `mask` the slots as bits, `places` the positions by name."""

    workers: tuple[Worker, ...]
    slots: tuple[Slot, ...]
    mask: int
    names: tuple[WorkerId, ...]
    places: Mapping[WorkerId, int]

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> Shard:
        """Those workers."""
        slots = tuple(worker.slot for worker in workers)
        names = tuple(worker.id for worker in workers)
        places = {name: place for place, name in enumerate(names)}
        return cls(tuple(workers), slots, sum(1 << slot for slot in slots), names, places)


NOBODY = Shard((), (), 0, (), {})


def assign(workers: Sequence[WorkerId], count: int) -> dict[WorkerId, int]:
    """The shard of each worker, 0 to `count` - 1."""
    even, spare = divmod(len(workers), count)
    filled = [0] * count
    found: dict[WorkerId, int] = {}
    names = {worker: worker.encode("utf-8", "surrogatepass") for worker in workers}
    for worker in sorted(workers, key=lambda worker: (xxh3_64_intdigest(names[worker]), worker)):
        for shard in _order(names[worker], count):
            if filled[shard] < even + (spare > 0):
                spare -= filled[shard] == even
                filled[shard] += 1
                found[worker] = shard
                break
    return found


def order(leading: int, count: int) -> list[int]:
    """Shards in the order in which they are asked for a prefix: home first. `leading` names its leading blocks."""
    return _order(leading.to_bytes(8, "little"), count)


def _order(key: bytes, count: int) -> list[int]:
    return sorted(range(count), key=lambda shard: xxh3_64_intdigest(key, shard))
