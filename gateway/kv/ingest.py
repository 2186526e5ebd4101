"""Applying KV events: from announced blocks to the masks the overlap is read from.

Rules:
1. Residency is (worker, rank, tier, engine hash); a mask has a worker's bit for a key while any of its ranks holds a
   block of that key in that tier. A removal touches its own worker, rank and tier only.
2. A block gets its key from its parent's key and its tokens. A block whose parent is unknown is never placed at the
   root; it waits as an orphan until the parent is announced, together with everything behind it (`orphans`).
3. A store in a slower tier that does not say what else entered its hashes (vLLM's connectors leave `extra_keys` out)
   is joined by engine hash only: computed from its tokens it could match across salts or adapters.
4. Events are applied in order; what cannot be used is counted by reason and costs nothing else.
5. Work is proportional to the blocks named; purging costs the blocks of that rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from struct import error as StructError
from typing import Final

from gateway.keys import chain, digest
from gateway.kv.events import KvEvent, Removed, Stored
from gateway.kv.numbers import Tally
from gateway.kv.offload import MAX_FLEETING, MOST_EXCESS
from gateway.kv.orphans import adopt, chain_with_extras, chunk_keys, go_on, wait
from gateway.kv.tables import TIER_INDEX, TIERS, RankTable, WorkerTable
from gateway.kv.windows import WindowBlocks, WindowMasks
from gateway.records import BlockKey, EngineHash, Tier

_WIDENED: Final = 64
"""Chunks that get their other blocks once it is known how many they have: the newest, usually the first two."""

_GPU: Final = Tier.GPU  # hashing an enum member runs Python code; the usual tier is compared instead


class Placement:
    """Masks of workers by block key, one dictionary a tier, and the code that changes them. `now` is the time of the
    last `expire` in seconds; what is fleeting lives for `lifetime_s` from there."""

    __slots__ = ("lifetime_s", "masks", "now", "slow_slots", "windows")

    def __init__(self, lifetime_s: float) -> None:
        self.lifetime_s = lifetime_s
        self.now = 0.0
        self.masks: list[dict[BlockKey, int]] = [{}, {}, {}, {}]
        self.windows = WindowMasks()
        self.slow_slots = 0

    def apply(self, worker: WorkerTable, table: RankTable, events: Sequence[KvEvent], tally: Tally) -> None:
        """Apply one rank's events in order, and count them."""
        for event in events:
            if type(event) is Stored:  # `match` costs 100 ns more for each event
                self._store(worker, table, event, tally)
            elif type(event) is Removed:
                self._remove(worker, table, event, tally)
            else:
                tally.clears += 1
                self.purge(worker, table)

    def purge(self, worker: WorkerTable, table: RankTable, most: int | None = None) -> int:
        """Forget one rank's blocks in every tier, at most `most` of them, those announced last first. Returns how many
        went; with the last of them goes what waits for a parent."""
        left = sys.maxsize if most is None else most
        for tier, held in enumerate(table.held):
            heads = table.heads[tier]
            while held and left:
                engine_hash, key = held.popitem()
                left -= 1
                if heads:
                    for head in heads.pop(engine_hash, ()):
                        self._drop(worker, tier, head)
                self._drop(worker, tier, key)
        if not any(table.held):
            table.clear()
        return (sys.maxsize if most is None else most) - left

    def let_go(self, worker: WorkerTable, table: RankTable, tier: int, engine_hash: EngineHash) -> int:
        """Forget a block in one tier, however many copies of it there are. Returns how many keys it stood for."""
        key = table.held[tier].pop(engine_hash)
        table.copies[tier].pop(engine_hash, None)
        table.lifetimes[tier].forget(engine_hash)
        heads = table.heads[tier].get(engine_hash, ())
        self._unplace(worker, table, tier, engine_hash, key)
        return 1 + len(heads)

    def expire(self, workers: Iterable[WorkerTable], now: float, most: int) -> list[WorkerTable]:
        """Time has passed: at most so many blocks whose life is over go. Returns the workers that have lost some."""
        self.now = now
        lost = []
        for worker in workers:
            before = most
            for table in worker.ranks.values():
                for tier in range(len(TIERS)):
                    most -= self._end(worker, table, tier, most)
            if most < before:
                lost.append(worker)
        return lost

    def _end(self, worker: WorkerTable, table: RankTable, tier: int, most: int) -> int:
        """At most so many blocks whose life is over go. Returns how many."""
        over = table.lifetimes[tier].over(self.now, most)
        for engine_hash in over:
            if engine_hash in table.held[tier]:
                self.let_go(worker, table, tier, engine_hash)
            while table.remove_orphan_copy(engine_hash, tier):
                pass
        return len(over)

    # ------------------------------------------------------------------ stores

    def _store(self, worker: WorkerTable, table: RankTable, event: Stored, tally: Tally) -> None:
        hashes = event.hashes
        if table.usual_kinds.get(event.group, "") != event.kind and not table.measures(event.group, event.kind):
            self._store_windows(worker, table, event, tally)
            return
        tier = 0 if event.tier is _GPU else TIER_INDEX[event.tier]
        tokens = event.tokens
        if event.fleeting:
            lifetimes = table.lifetimes[tier]
            lifetimes.announced(hashes, self.now + self.lifetime_s)
            if len(lifetimes) > MAX_FLEETING + MOST_EXCESS:
                self._end(worker, table, tier, MOST_EXCESS)
        if not tokens or (tier and worker.counted and not event.keyed and not _own_names(event)):
            self._join(worker, table, event, tier, tally)
            return
        if len(hashes) == 1 and tier == 0 and self._store_one(worker, table, event, tally):
            return
        span = 1
        if event.block_size != worker.block_size:
            span, rest = divmod(event.block_size, worker.block_size)
            if rest or not span:
                tally.ignore("block_size", len(hashes))
                return
        if len(tokens) != len(hashes) * event.block_size:
            tally.ignore("malformed", len(hashes))
            return
        parent = event.parent
        seed = worker.root(event.adapter, event.salt) if parent is None else table.held[0].get(parent)
        try:
            if seed is None and parent is not None:
                seed = table.key_of(parent)
            if seed is None:
                wait(self, worker, table, event, tier, tally)
                return
            if event.extras is None:
                keys = chain(seed, tokens, worker.block_size)
            else:
                keys = chain_with_extras(seed, tokens, worker.block_size, span, event.extras)
        except (TypeError, ValueError):
            tally.ignore("malformed", len(hashes))  # token ids that are no token ids
            return
        if tier == 0:
            worker.span = span  # an engine that was started anew may have another block size
        if span == 1:
            self.place_all(worker, table, tier, hashes, keys, tally)
        else:
            for position, engine_hash in enumerate(hashes):
                part = keys[position * span : (position + 1) * span]
                self.place(worker, table, tier, engine_hash, part, tally)
        if tier == 0 and worker.counted:
            table.chunks.stored(parent, hashes)
        if table.orphans:
            for engine_hash in hashes:
                adopt(self, worker, table, engine_hash, tally)

    def _store_one(self, worker: WorkerTable, table: RankTable, event: Stored, tally: Tally) -> bool:
        """The usual event of an engine that merges none: one new block on GPU in the keys' own size, its parent known.
        The same as the long way in two thirds of its time; False, and nothing done, for anything else."""
        tokens, parent, held = event.tokens, event.parent, table.held[0]
        (engine_hash,) = event.hashes
        size = worker.block_size
        if event.block_size != size or len(tokens) != size or event.extras is not None or engine_hash in held:
            return False
        if table.windows is not None:
            return False
        seed = held.get(parent) if parent is not None else worker.root(event.adapter, event.salt)
        if seed is None or table.orphans:
            return False
        try:
            key = digest(worker.pack(seed, *tokens))
        except StructError:
            return False  # wide or no token ids at all: the long way tells
        held[engine_hash] = key
        worker.span = 1
        tally.stored[0] += 1
        masks, bit = self.masks[0], worker.bit
        mask = masks.get(key)
        if mask is None:
            masks[key] = bit
        elif not mask & bit:
            masks[key] = mask | bit
        else:
            worker.shared[0][key] = worker.shared[0].get(key, 0) + 1
            worker.blocks[0] -= 1
        worker.blocks[0] += 1
        if worker.promises.held:
            worker.promises.confirm_one(key)
        if worker.counted:
            table.chunks.stored(parent, event.hashes)
        return True

    def place_all(
        self,
        worker: WorkerTable,
        table: RankTable,
        tier: int,
        hashes: list[EngineHash],
        keys: list[BlockKey],
        tally: Tally,
    ) -> None:
        """`place` for many blocks of one key each: the loop that decides the rate of ingest."""
        held = table.held[tier]
        masks = self.masks[tier]
        bit = worker.bit
        stored = shared = 0
        for engine_hash, key in zip(hashes, keys, strict=True):
            if engine_hash in held:
                self._repeat(worker, table, tier, engine_hash, tally)
                continue
            held[engine_hash] = key
            stored += 1
            mask = masks.get(key)
            if mask is None:
                masks[key] = bit
            elif not mask & bit:
                masks[key] = mask | bit
            else:
                shared += 1
                worker.shared[tier][key] = worker.shared[tier].get(key, 0) + 1
        tally.stored[tier] += stored
        worker.blocks[tier] += stored - shared
        if tier == 0 and worker.promises.held:
            worker.promises.confirm(keys)
        if tier and worker.blocks[tier]:
            self.slow_slots |= bit
        elif table.windows is not None:
            self.windows.mark(table.windows, hashes, held, bit)

    def place(
        self,
        worker: WorkerTable,
        table: RankTable,
        tier: int,
        engine_hash: EngineHash,
        keys: Sequence[BlockKey],
        tally: Tally,
    ) -> None:
        """The rank now holds the block `engine_hash`, which stands for `keys` (the last one is its own)."""
        held = table.held[tier]
        if engine_hash in held:
            self._repeat(worker, table, tier, engine_hash, tally)
            return
        held[engine_hash] = keys[-1]
        if len(keys) > 1:
            table.heads[tier][engine_hash] = tuple(keys[:-1])
        tally.stored[tier] += 1
        self._hold(worker, tier, keys)
        if tier == 0 and table.windows is not None:
            self.windows.mark(table.windows, (engine_hash,), held, worker.bit)

    def _hold(self, worker: WorkerTable, tier: int, keys: Sequence[BlockKey]) -> None:
        """One holder more of each of `keys`."""
        masks = self.masks[tier]
        bit = worker.bit
        for key in keys:
            mask = masks.get(key, 0)
            if mask & bit:
                worker.shared[tier][key] = worker.shared[tier].get(key, 0) + 1
            else:
                masks[key] = mask | bit
                worker.blocks[tier] += 1
        if tier:
            self.slow_slots |= bit
        elif worker.promises.held:
            worker.promises.confirm(keys)

    def _repeat(self, worker: WorkerTable, table: RankTable, tier: int, engine_hash: EngineHash, tally: Tally) -> None:
        tally.repeated += 1
        if worker.counted and engine_hash not in table.lifetimes[tier]:
            copies = table.copies[tier]
            copies[engine_hash] = copies.get(engine_hash, 0) + 1

    def _join(self, worker: WorkerTable, table: RankTable, event: Stored, tier: int, tally: Tally) -> None:
        """A store whose keys must come from what the rank announced before, by engine hash."""
        alone = bool(event.tokens)  # then every block of a chunk is named
        if event.block_size and not alone:
            size, rest = divmod(event.block_size, worker.block_size * max(1, worker.span))
            if size and not rest:
                table.chunks.told(size)
        for engine_hash in event.hashes:
            keys = table.keys_of(engine_hash) if alone else chunk_keys(table, tier, engine_hash)
            if not keys:
                tally.orphans += 1
                tally.dropped += table.add_orphan(
                    engine_hash, tier, parent=None, tokens=None, extra=None, counted=worker.counted
                )
            else:
                self.place(worker, table, tier, engine_hash, keys, tally)
        if table.chunks.news:
            self.widen(worker, table)

    def widen(self, worker: WorkerTable, table: RankTable) -> None:
        """How many blocks a chunk has became known: chunks that were told before get theirs."""
        table.chunks.news = False
        for tier in range(1, len(TIERS)):
            heads = table.heads[tier]
            for end in list(islice(reversed(table.held[tier]), _WIDENED)):
                if end not in heads and (earlier := chunk_keys(table, tier, end)[:-1]):
                    heads[end] = earlier
                    self._hold(worker, tier, earlier)

    def go_on(self, worker: WorkerTable, table: RankTable, tally: Tally) -> None:
        """Place orphans whose parents are known, as many as one call may."""
        go_on(self, worker, table, tally)

    # ------------------------------------------------------------------ removals

    def _remove(self, worker: WorkerTable, table: RankTable, event: Removed, tally: Tally) -> None:
        if not table.measures(event.group, None):
            self._remove_windows(worker, table, event, tally)
            return
        tier = 0 if event.tier is _GPU else TIER_INDEX[event.tier]
        held = table.held[tier]
        copies = table.copies[tier]
        for engine_hash in event.hashes:
            if copies and engine_hash in copies:
                left = copies[engine_hash] - 1
                if left:
                    copies[engine_hash] = left
                else:
                    del copies[engine_hash]
                continue
            key = held.pop(engine_hash, None)
            if key is None:
                if table.remove_orphan_copy(engine_hash, tier):
                    continue
                if table.let_go:
                    table.let_go -= 1
                    tally.ignore("let_go", 1)
                else:
                    tally.ignore("unknown_removal", 1)  # normal: announced before we listened
                continue
            tally.removed[tier] += 1
            if tier:
                table.lifetimes[tier].forget(engine_hash)
            self._unplace(worker, table, tier, engine_hash, key)

    def _unplace(
        self, worker: WorkerTable, table: RankTable, tier: int, engine_hash: EngineHash, key: BlockKey
    ) -> None:
        """What `engine_hash` stood for in a tier it is no longer held in."""
        heads = table.heads[tier]
        if heads:
            for head in heads.pop(engine_hash, ()):
                self._drop(worker, tier, head)
        self._drop(worker, tier, key)
        if table.chunks.follows and table.key_of(engine_hash) is None:
            table.chunks.forget(engine_hash)

    def _drop(self, worker: WorkerTable, tier: int, key: BlockKey) -> None:
        """One holder of `key` less; the worker's bit goes with the last one."""
        shared = worker.shared[tier]
        if shared and key in shared:
            left = shared[key] - 1
            if left:
                shared[key] = left
            else:
                del shared[key]
            return
        masks = self.masks[tier]
        bit = worker.bit
        mask = masks[key]
        if mask == bit:
            del masks[key]
        else:
            masks[key] = mask ^ bit
        worker.blocks[tier] -= 1
        if tier == 0:
            if worker.promises.held:
                worker.promises.confirm_one(key)
            if self.windows.masks:
                self.windows.unmark(key, bit)
        if tier and not any(worker.blocks[1:]):
            self.slow_slots &= ~bit

    # ------------------------------------------------------------------ sliding windows

    def _store_windows(self, worker: WorkerTable, table: RankTable, event: Stored, tally: Tally) -> None:
        """Blocks of a group that does not measure prefixes; those of sliding windows say where one can go on."""
        if not event.window or event.tier is not _GPU or table.below is not None:
            tally.ignore("cache_group", len(event.hashes))
            return
        if table.windows is None:
            table.windows = WindowBlocks()
        if table.windows.full and not table.windows.knows(event.group):
            tally.ignore("cache_group", len(event.hashes))
            return
        worker.window = max(worker.window, event.window)
        self.windows.store(table.windows, event.group, event.hashes, table.held[0], worker.bit)

    def _remove_windows(self, worker: WorkerTable, table: RankTable, event: Removed, tally: Tally) -> None:
        if table.windows is None or event.tier is not _GPU or not table.windows.knows(event.group):
            tally.ignore("cache_group", len(event.hashes))
            return
        self.windows.remove(table.windows, event.group, event.hashes, table.held[0], worker.bit)


def _own_names(event: Stored) -> bool:
    """Whether the blocks have names of their own beside those on GPU, as LMCache's chunks do: joining finds nothing.
    LMCache tells no cache group, and its own hits ask for the tokens alone."""
    return event.fleeting and event.group is None
