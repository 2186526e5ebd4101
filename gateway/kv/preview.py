"""Batches shown before their turn: what a rank announces while earlier batches of it are missing.

Rules:
1. A preview never changes the rank's own table but for hiding: stores go to a table laid over it, a removal of a block
   of the rank's own takes it out and notes how to put it back.
2. Before the next batch in order is applied, everything hidden is put back, so that it finds the table as it should be.
3. What is laid over goes when every previewed batch has been applied, or with the rank's own blocks.

So a preview may be wrong (the missing batches may say otherwise), but it leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.kv.events import KvEvent, Removed, Stored
from gateway.kv.ingest import Placement
from gateway.kv.numbers import Tally
from gateway.kv.tables import TIER_INDEX, TIERS, RankTable, WorkerTable
from gateway.records import BlockKey, EngineHash


class _Hidden(NamedTuple):
    """One copy of a block taken out: its keys, and what is remembered of its place in a chunk."""

    tier: int
    engine_hash: EngineHash
    keys: tuple[BlockKey, ...]
    parent: tuple[EngineHash | None] | None


class Preview:
    """What is shown of one rank before its turn."""

    __slots__ = ("_hidden", "_table", "over")

    def __init__(self, table: RankTable, orphan_limit: int) -> None:
        self._table = table
        self.over = RankTable(orphan_limit, below=table)
        self._hidden: list[_Hidden] = []

    def show(self, placement: Placement, worker: WorkerTable, events: Sequence[KvEvent]) -> None:
        """Show events. A clear hides nothing: the feed then needs no preview."""
        tally = Tally()
        if self.over.ready:
            placement.go_on(worker, self.over, tally)
        for event in events:
            if type(event) is Stored:
                placement.apply(worker, self.over, (event,), tally)
            elif type(event) is Removed and self._table.measures(event.group, None):
                self._remove(placement, worker, event, tally)

    def put_back(self, placement: Placement, worker: WorkerTable, most: int | None = None) -> bool:
        """Undo what was hidden, the last first, at most so many copies of blocks. False when nothing was."""
        tally = Tally()
        some = bool(self._hidden)
        for _ in range(len(self._hidden) if most is None else min(most, len(self._hidden))):
            hidden = self._hidden.pop()
            placement.place(worker, self._table, hidden.tier, hidden.engine_hash, hidden.keys, tally)
            self._table.chunks.put_back(hidden.engine_hash, hidden.parent)
        return some

    def _remove(self, placement: Placement, worker: WorkerTable, event: Removed, tally: Tally) -> None:
        tier = TIER_INDEX[event.tier]
        for engine_hash in event.hashes:
            one = (Removed([engine_hash], TIERS[tier], event.group),)
            shown = engine_hash in self.over.held[tier]
            if shown:
                placement.apply(worker, self.over, one, tally)
            if engine_hash in self._table.held[tier] and not (shown and worker.counted):
                own = self._table.heads[tier].get(engine_hash, ())
                keys = (*own, self._table.held[tier][engine_hash])
                self._hidden.append(_Hidden(tier, engine_hash, keys, self._table.chunks.parent(engine_hash)))
                placement.apply(worker, self._table, one, tally)
