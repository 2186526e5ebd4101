"""The cap on the index's memory: which announced blocks are let go when there are too many.

Rules:
1. The cap is kept in blocks, at the most bytes one can take. Half-filled tables give no memory back when entries go, so
   measured bytes could not be steered by.
2. The worker with the most blocks gives way, so none is left with less than a fair share while another has more.
3. Of a worker, what was announced longest ago goes first, in slices, the end of each slice before its beginning: cold
   chains lose their tail first, and go as wholes. Blocks that requests asked for of late are spared and count as
   announced anew. Blocks that wait for their parents go before all others.
4. What was let go is unknown until the engine announces it again: fewer hits are predicted, never wrong ones. Its
   removal, still to come, is told apart from those of blocks never announced (`RankTable.let_go`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Final

from gateway.kv.ingest import Placement
from gateway.kv.tables import ORPHAN_BLOCKS, RankTable, WorkerTable
from gateway.records import BlockKey, EngineHash

BYTES_A_BLOCK: Final = 224
"""The most a resident block takes: two integers of 32 bytes (engine hash, key), an entry in a table of each kind at its
emptiest (60 bytes), a mask of its own (40)."""

_SLICE: Final = 8192
"""Oldest blocks looked at together; they are dropped a few at a time."""

_MOST: Final = 4096
"""Blocks dropped in one call, some 3 ms."""

_ROOM: Final = 256
"""This part of the cap is made free beyond need: finding the fullest worker costs as much as applying many events."""

_WATCH_FROM: Final = 0.75
"""Share of the cap from which on it is remembered what requests ask for."""


def blocks_within(max_bytes: int) -> int:
    """The cap in blocks; at least one."""
    return max(1, max_bytes // BYTES_A_BLOCK)


class Truncation:
    """Keeps what all workers' tables take (`total`, in blocks as `WorkerTable.weight` counts) under `limit`. The index
    tells when a table has changed and which prefixes are asked for."""

    __slots__ = ("_asked", "_asked_before", "_placement", "_slices", "limit", "total", "truncated")

    def __init__(self, placement: Placement, max_bytes: int) -> None:
        self.limit = blocks_within(max_bytes)
        self.total = 0
        self.truncated = 0
        self._placement = placement
        self._asked: set[BlockKey] = set()
        self._asked_before: set[BlockKey] = set()
        self._slices: dict[int, tuple[RankTable, int, list[EngineHash]]] = {}
        """By worker's bit: what is left of the slice being dropped."""

    @property
    def watches(self) -> bool:
        """Whether `ask` should be told: the cap is near."""
        return self.total > self.limit * _WATCH_FROM

    def ask(self, keys: Sequence[BlockKey]) -> None:
        """A request was sent to a worker that has these blocks."""
        if len(self._asked) + len(keys) > self.limit // 8:
            self._asked_before, self._asked = self._asked, set()
        self._asked.update(keys)

    def forget(self, bit: int) -> None:
        """The worker's tables were emptied."""
        self._slices.pop(bit, None)

    def weigh(self, worker: WorkerTable, workers: Collection[WorkerTable], learned: int) -> None:
        """The worker's tables have changed; `learned` is what learned blocks take beside those of all
        `workers`, in blocks of theirs."""
        weight = worker.weight()
        self.total += weight - worker.weighed
        worker.weighed = weight
        if self.total + learned > self.limit:
            self.keep(workers, self.total + learned)
            for other in workers:
                other.weighed = other.weight()
            self.total = sum(other.weighed for other in workers)

    def keep(self, workers: Iterable[WorkerTable], total: int) -> int:
        """Drop what is too much, at most `_MOST` blocks; the rest with the next call. Returns how many went."""
        if total <= self.limit:
            return 0
        wanted = min(total - self.limit + self.limit // _ROOM, _MOST)
        fullest = max(workers, key=WorkerTable.weight)
        dropped = self._drop_orphans(fullest, wanted)
        while dropped < wanted:
            taken = self._drop(fullest, wanted - dropped)
            if not taken:
                break
            dropped += taken
        self.truncated += dropped
        return dropped

    def _drop_orphans(self, worker: WorkerTable, wanted: int) -> int:
        dropped = 0
        for table in worker.ranks.values():
            for engine_hash in list(islice(table.orphans, max(0, -(-(wanted - dropped) // ORPHAN_BLOCKS)))):
                table.drop_orphan(engine_hash)
                dropped += ORPHAN_BLOCKS
        return dropped

    def _drop(self, worker: WorkerTable, wanted: int) -> int:
        """Work on the worker's slice; 0 only when it holds nothing."""
        current = self._slices.get(worker.bit) or _oldest(worker)
        if current is None:
            return 0
        table, tier, hashes = current
        held = table.held[tier]
        dropped = 0
        spared: deque[EngineHash] = deque()
        while hashes and dropped < wanted:
            engine_hash = hashes.pop()
            key = held.get(engine_hash)
            if key is None:
                continue  # the engine was faster
            if key in self._asked or key in self._asked_before:
                spared.append(engine_hash)
            else:
                dropped += self._let_go(worker, table, tier, engine_hash)
        if not dropped and not hashes:
            # Everything is asked for: then the oldest of it all the same.
            while spared and dropped < wanted:
                dropped += self._let_go(worker, table, tier, spared.popleft())
        for engine_hash in reversed(spared):
            held[engine_hash] = held.pop(engine_hash)
        if hashes:
            self._slices[worker.bit] = current
        else:
            self._slices.pop(worker.bit, None)
        return dropped

    def _let_go(self, worker: WorkerTable, table: RankTable, tier: int, engine_hash: EngineHash) -> int:
        if engine_hash not in table.lifetimes[tier]:  # else nobody will ever remove it
            table.let_go += 1 + table.copies[tier].get(engine_hash, 0)
        return self._placement.let_go(worker, table, tier, engine_hash)


def _oldest(worker: WorkerTable) -> tuple[RankTable, int, list[EngineHash]] | None:
    """What the worker's fullest table has had longest, oldest first."""
    fullest: tuple[RankTable, int] | None = None
    size = 0
    for table in worker.ranks.values():
        for tier, held in enumerate(table.held):
            if len(held) > size:
                fullest, size = (table, tier), len(held)
    if fullest is None:
        return None
    table, tier = fullest
    return table, tier, list(islice(table.held[tier], _SLICE))
