"""Blocks that cannot be placed yet, because their parent is unknown: they wait, and are adopted when it comes.

Rules:
1. A block whose parent is unknown is never placed at the root: it would match prompts that begin otherwise.
2. With a block goes what waits for it, and what waits for that in turn; what is too much for one call is for `go_on`.

Which blocks wait is kept in the rank's own table (`tables.RankTable`); here is what is done about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from gateway.keys import chain, with_extra
from gateway.kv.events import Stored
from gateway.kv.numbers import Tally
from gateway.kv.tables import RankTable, WorkerTable
from gateway.records import BlockKey, EngineHash

_ADOPTED_AT_ONCE: Final = 1_000
"""Orphans placed in one call: some 3 ms."""


class Places(Protocol):
    """Who places blocks (`ingest.Placement`)."""

    def place(
        self,
        worker: WorkerTable,
        table: RankTable,
        tier: int,
        engine_hash: EngineHash,
        keys: Sequence[BlockKey],
        tally: Tally,
    ) -> None:
        """The rank now holds a block."""
        ...

    def widen(self, worker: WorkerTable, table: RankTable) -> None:
        """How many blocks a chunk has became known."""
        ...


def wait(places: Places, worker: WorkerTable, table: RankTable, event: Stored, tier: int, tally: Tally) -> None:
    """A store behind an unknown parent. Blocks of it that are known all the same are placed at once."""
    parent = event.parent
    size = event.block_size
    for position, engine_hash in enumerate(event.hashes):
        keys = table.keys_of(engine_hash)
        if keys:
            places.place(worker, table, tier, engine_hash, keys, tally)
        else:
            tally.orphans += 1
            tally.dropped += table.add_orphan(
                engine_hash,
                tier,
                parent=parent,
                tokens=event.tokens[position * size : (position + 1) * size],
                extra=event.extras[position] if event.extras else None,
                counted=worker.counted,
            )
        parent = engine_hash
    if event.hashes:
        # A block in the middle may have been known: then what follows it needs no waiting.
        for engine_hash in event.hashes:
            if table.key_of(engine_hash) is not None:
                adopt(places, worker, table, engine_hash, tally)


def adopt(places: Places, worker: WorkerTable, table: RankTable, engine_hash: EngineHash, tally: Tally) -> None:
    """`engine_hash` is known now: place what waited for it, and what waits for that in turn; what is too much for
    one call is for `go_on`."""
    known = table.take_orphan(engine_hash)
    if known is not None:
        keys = table.keys_of(engine_hash)
        if keys:
            _place_copies(places, worker, table, engine_hash, known.copies, keys, tally)
            if table.chunks.news:
                places.widen(worker, table)
    seed = table.key_of(engine_hash)
    if seed is not None and table.awaited(engine_hash):
        table.ready.append((engine_hash, seed))
        go_on(places, worker, table, tally)


def go_on(places: Places, worker: WorkerTable, table: RankTable, tally: Tally) -> None:
    """Place orphans whose parents are known, as many as one call may."""
    while table.ready and tally.adopted < _ADOPTED_AT_ONCE:
        parent, seed = table.ready.pop()
        children = table.take_children(parent, _ADOPTED_AT_ONCE - tally.adopted)
        if table.awaited(parent):
            table.ready.append((parent, seed))
        tally.adopted += len(children)
        for child, orphan in children:
            tokens = orphan.tokens
            if tokens is None:
                continue
            span = len(tokens) // worker.block_size
            extras = None if orphan.extra is None else [orphan.extra]
            if orphan.copies[0] and worker.counted:
                table.chunks.stored(parent, [child])
            child_keys = (
                chain(seed, tokens, worker.block_size)
                if extras is None
                else chain_with_extras(seed, tokens, worker.block_size, span, extras)
            )
            _place_copies(places, worker, table, child, orphan.copies, child_keys, tally)
            if table.awaited(child):
                table.ready.append((child, child_keys[-1]))


def _place_copies(
    places: Places,
    worker: WorkerTable,
    table: RankTable,
    engine_hash: EngineHash,
    copies: list[int],
    own: Sequence[BlockKey],
    tally: Tally,
) -> None:
    for tier, count in enumerate(copies):
        keys: Sequence[BlockKey] = own
        if count and tier and engine_hash in table.held[0]:
            keys = chunk_keys(table, tier, engine_hash)
        for _ in range(count):
            places.place(worker, table, tier, engine_hash, keys, tally)


def chunk_keys(table: RankTable, tier: int, engine_hash: EngineHash) -> tuple[BlockKey, ...]:
    """Keys of everything a placeholder stands for: its block, and before it the others of the chunk it ends."""
    keys = table.keys_of(engine_hash)
    on_gpu = table.held[0]
    if engine_hash not in on_gpu:
        return keys
    before = table.chunks.before(engine_hash, table.held[tier])
    if not before:
        return keys
    return (*(key for earlier in before if earlier in on_gpu for key in table.keys_of(earlier)), *keys)


def chain_with_extras(
    seed: BlockKey, tokens: Sequence[int], block_size: int, span: int, extras: Sequence[bytes | None]
) -> list[BlockKey]:
    """`keys.chain` where some blocks also depend on multimodal items; `span` keys for each of the engine's blocks."""
    keys: list[BlockKey] = []
    size = block_size * span
    for position, extra in enumerate(extras):
        block = tokens[position * size : (position + 1) * size]
        if extra is not None:
            seed = with_extra(seed, extra)
        keys += chain(seed, block, block_size)
        seed = keys[-1]
    return keys
