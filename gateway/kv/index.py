"""The index: which worker holds which prefix blocks, in which tier.

What it owns: masks of workers by block key for each tier, the tables that turn each rank's engine hashes into
keys, orphans, and speculative blocks. Invariants are stated where they are kept: `ingest` (placing and removing),
`tables` (names, copies, orphans), `speculation`, `overlap`.

Rules for callers:
1. The index is an estimate. It never raises for what a worker announces; it counts.
2. Everything is synchronous and in memory. Nothing here knows time; the router decides how long a speculation lives.
3. A slot is bound before its events count and released when its worker goes; speculations of a released slot end.
4. Ranks that requests cannot name share a slot: the worker's bit stays until no rank of it holds the block. Which rank
   serves a request is the worker's choice, so the overlap of such a worker is what its best rank might hold.
5. What a worker without events holds is learned from the requests sent to it (`remember`), where the index was given
   `ApproximateSettings`; the same masks say so, and a worker's first event ends it (`approximate`).
6. A worker whose block size is k times that of the index's keys fills k keys with each of its blocks, and its overlap
   is floored to its own size. Any other size cannot be matched; its blocks are counted as `block_size` problems.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from functools import reduce
from math import ceil
from operator import or_
from types import MappingProxyType
from typing import Final

from gateway.kv.approximate import LEARNED_BYTES, ApproximateBlocks, ApproximateSettings, ApproximateStats, Remembered
from gateway.kv.events import KvEvent
from gateway.kv.ingest import Placement
from gateway.kv.numbers import Applied, IndexStats, Mark, Tally, applied, index_stats
from gateway.kv.overlap import Overlaps
from gateway.kv.preview import Preview
from gateway.kv.runs import run_on, run_within
from gateway.kv.snapshot import RankBlocks, putting_back, taken
from gateway.kv.speculation import ChainTail, Part, Promises, Speculation, SpeculativeBlocks
from gateway.kv.tables import TIER_INDEX, RankTable, WorkerTable
from gateway.kv.truncation import BYTES_A_BLOCK, Truncation, blocks_within
from gateway.kv.windows import Windows
from gateway.records import BlockKey, EngineKind, PrefixBlocks, PrefixMode, Slot, Tier

DEFAULT_ORPHAN_LIMIT: Final = 16_384
"""Orphans kept per rank: some 8 MB a rank at worst, and far more than a rank announces before its heads are known."""

DEFAULT_SPECULATIVE_LIMIT: Final = 500_000
"""Speculative keys kept for a worker: 500 prompts of 16k tokens on their way to it at a block size of 16."""

DEFAULT_OFFLOAD_TTL_S: Final = 3600.0
"""Shared stores are large, and what is used is announced again; an hour is a guess on the short side."""

_EXPIRED_AT_ONCE: Final = 5_000  # some 5 ms; the rest waits for the next turn
_NO_SPANS: Final[Mapping[Slot, int]] = MappingProxyType({})


class KvIndex:
    """See the module's docstring. All methods are cheap but `purge` and `release`, which cost their own blocks."""

    def __init__(
        self,
        *,
        orphan_limit: int = DEFAULT_ORPHAN_LIMIT,
        speculative_limit: int = DEFAULT_SPECULATIVE_LIMIT,
        approximate: ApproximateSettings | None = None,
        max_bytes: int | None = None,
        offload_ttl_s: float = DEFAULT_OFFLOAD_TTL_S,
    ) -> None:
        """Without `approximate` nothing is learned from routing; without `max_bytes` there is no cap. `offload_ttl_s`
        is how long blocks count that nobody will ever remove (`gateway.kv.offload`)."""
        self._placement = Placement(offload_ttl_s)
        self._truncation = Truncation(self._placement, max_bytes) if max_bytes is not None else None
        self._hidden = 0
        self._speculative = SpeculativeBlocks(speculative_limit)
        self._approximate = ApproximateBlocks(self._placement.masks[0], approximate) if approximate else None
        self._workers: dict[Slot, WorkerTable] = {}
        self._spans: dict[Slot, int] = {}
        self._reaches: dict[Slot, int] = {}
        self._windows = Windows(self._placement.windows.masks, self._reaches)
        self._orphan_limit = orphan_limit
        self._orphans_dropped = self._epochs = 0

    def apply_limits(self, *, max_bytes: int, approximate: ApproximateSettings, offload_ttl_s: float) -> None:
        """Other limits than those it was made with, where it has such limits; a smaller cap is reached with the events
        to come, a life time holds for what is announced from now on."""
        if self._truncation is not None:
            self._truncation.limit = blocks_within(max_bytes)
        if self._approximate is not None:
            self._approximate.settings = approximate
        self._placement.lifetime_s = offload_ttl_s

    # ------------------------------------------------------------------ workers

    def bind(self, slot: Slot, *, block_size: int, engine: EngineKind = EngineKind.VLLM) -> None:
        """A worker takes the slot. `block_size` is that of its pool's keys.

        SGLang announces a page it holds as often as it likes; every other engine is taken to count copies as vLLM
        does. A slot that is bound already is released first.
        """
        if block_size < 1:
            raise ValueError("block_size is at least 1")
        self.release(slot)
        promises = Promises(1 << slot, self._speculative.heads, self._placement.masks[0])
        worker = WorkerTable(slot, promises, block_size=block_size, counted=engine is not EngineKind.SGLANG)
        self._workers[slot] = worker
        self._begin_epoch(worker)

    def release(self, slot: Slot) -> None:
        """The worker is gone; its slot may be bound again. Unknown slots are fine."""
        worker = self._workers.get(slot)
        if worker is None:
            return
        self.purge(slot)
        self._hidden &= ~worker.bit
        if self._truncation is not None:
            self._truncation.total -= worker.weighed
        worker.promises.clear()
        if self._approximate is not None:
            self._approximate.release(worker.bit)
        self._spans.pop(slot, None)
        self._reaches.pop(slot, None)
        del self._workers[slot]

    # ------------------------------------------------------------------ events

    def apply(self, slot: Slot, rank: int, events: Sequence[KvEvent]) -> Applied:
        """Apply events of one rank in order. Events for a slot that is not bound are counted as ignored."""
        worker = self._workers.get(slot)
        if worker is None:
            return Applied({}, {}, {"unbound": len(events)})
        if not worker.heard and events:
            self._hear(worker)
        table = worker.ranks.get(rank)
        if table is None:
            table = worker.ranks[rank] = RankTable(self._orphan_limit)
        preview = worker.previews.get(rank) if worker.previews else None
        if preview is not None:
            preview.put_back(self._placement, worker)
        tally = Tally()
        if table.ready:
            self._placement.go_on(worker, table, tally)
        self._placement.apply(worker, table, events, tally)
        self._weigh(worker)
        if worker.span > 1:
            self._spans[slot] = worker.span
        elif self._spans:
            self._spans.pop(slot, None)
        if worker.window:
            self._fit_windows(worker)
        if tally.ignored:
            worker.ignored.update(tally.ignored)
        worker.clears += tally.clears
        worker.removed += sum(tally.removed)
        self._orphans_dropped += tally.dropped
        return applied(tally, unfinished=bool(table.ready))

    def preview(self, slot: Slot, rank: int, events: Sequence[KvEvent]) -> None:
        """Show what later events of a rank say while earlier ones are missing, until `end_preview`; they come again
        through `apply`, in order."""
        worker = self._workers.get(slot)
        if worker is None:
            return
        if not worker.heard:
            self._hear(worker)
        preview = worker.previews.get(rank)
        if preview is None:
            table = worker.ranks.setdefault(rank, RankTable(self._orphan_limit))
            preview = worker.previews[rank] = Preview(table, self._orphan_limit)
        preview.show(self._placement, worker, events)
        self._weigh(worker)

    def _hear(self, worker: WorkerTable) -> None:
        """The worker announces: before any of its blocks is placed, what was learned of token keys goes. A key is
        announced or learned, never both, since each takes the worker's bit away when it ends."""
        worker.heard = True
        if self._approximate is not None:
            learned = self._approximate.worker(worker.bit)
            self._approximate.forget(learned, text=learned.instead)
            worker.learned_blocks = learned.held_tokens // worker.block_size

    def hearing(self, slot: Slot, *, most: int | None = None) -> Generator[int, None, None]:
        """The worker is about to announce for the first time: drop what was learned in its stead, in steps as `purging`
        does it. The first `apply` or `preview` does what is left of it at once."""
        worker = self._workers.get(slot)
        approximate = self._approximate
        if worker is None or worker.heard or approximate is None:
            return
        learned = approximate.worker(worker.bit)
        text = learned.instead
        self._hide(worker)
        try:
            while not worker.heard and (learned.tokens.blocks or (text and learned.text.blocks)):
                yield approximate.forget(learned, text=text, most=most)
        finally:
            if self._workers.get(slot) is worker and not worker.heard:
                self._hear(worker)
            self._show(worker)

    def end_preview(self, slot: Slot, rank: int) -> None:
        """Everything shown before its turn has been applied. Fine without a preview; costs the blocks shown."""
        for _ in self.ending_preview(slot, rank):
            pass

    def ending_preview(
        self, slot: Slot, rank: int, *, most: int | None = None, keep_shown: bool = False
    ) -> Generator[int, None, None]:
        """`end_preview` in steps, as `purging` does it; those in which blocks come back that were hidden yield 0. With
        `keep_shown` there are no others: the next `apply` needs them back, and else does it at once."""
        worker = self._workers.get(slot)
        preview = None if worker is None else worker.previews.get(rank)
        if worker is None or preview is None:
            return
        try:
            while preview.put_back(self._placement, worker, most):
                yield 0
            while not keep_shown and any(preview.over.held):
                yield self._placement.purge(worker, preview.over, most)
        finally:
            preview.put_back(self._placement, worker)
            if not keep_shown:
                self._placement.purge(worker, preview.over)
                if worker.previews.get(rank) is preview:
                    del worker.previews[rank]
            if self._workers.get(slot) is worker:
                self._weigh(worker)

    def _weigh(self, worker: WorkerTable) -> None:
        """The worker's tables have changed: see that all together keep within the cap."""
        if self._truncation is not None:
            learned = self._approximate.weight * LEARNED_BYTES if self._approximate is not None else 0
            self._truncation.weigh(worker, self._workers.values(), learned // BYTES_A_BLOCK)

    def purge(self, slot: Slot, rank: int | None = None) -> int:
        """Forget one rank's blocks, or all of the worker's. Returns how many (rank, tier, block) entries went.

        Speculations stay: the requests they stand for are still on their way.
        """
        return sum(self.purging(slot, rank))

    def purging(
        self, slot: Slot, rank: int | None = None, *, most: int | None = None, cleared: bool = False
    ) -> Generator[int, None, None]:
        """`purge` in steps of at most `most` entries, for who must serve others in between; yields how many went.

        Until the last step the worker holds nothing for `overlap`. Apply no events of the rank before that. To `close`
        it early does the rest at once; only dropped it would not, when compiled. `cleared`: the engine said so itself.
        """
        worker = self._workers.get(slot)
        if worker is None:
            return
        if cleared:
            worker.clears += 1
            if not worker.heard:
                self._hear(worker)
        else:
            self._begin_epoch(worker)
        if self._truncation is not None:
            self._truncation.forget(worker.bit)
        ranks = list(worker.ranks) if rank is None else [rank]
        tables = [worker.ranks[number] for number in ranks if number in worker.ranks]
        self._hide(worker)
        try:
            for number in ranks:
                yield from self.ending_preview(slot, number, most=most)
            for table in tables:
                while any(table.held):
                    yield self._placement.purge(worker, table, most)
        finally:
            for number in ranks:
                self.end_preview(slot, number)
            for table in tables:
                self._placement.purge(worker, table)
            if self._workers.get(slot) is worker:
                self._weigh(worker)
                self._fit_windows(worker)
            self._show(worker)

    def _fit_windows(self, worker: WorkerTable) -> None:
        """How far its windows reach back, as long as some rank of it has any."""
        if all(table.windows is None for table in worker.ranks.values()):
            worker.window = 0
            self._reaches.pop(worker.slot, None)
        else:
            blocks = ceil((worker.window - 1) / (worker.block_size * max(1, worker.span)))
            self._reaches[worker.slot] = max(1, blocks)

    def _hide(self, worker: WorkerTable) -> None:
        """The worker holds nothing for `overlap` until `_show` has been called as often."""
        worker.hidden += 1
        self._hidden |= worker.bit

    def _show(self, worker: WorkerTable) -> None:
        worker.hidden -= 1
        if not worker.hidden and self._workers.get(worker.slot) is worker:
            self._hidden &= ~worker.bit

    def announced(self, slot: Slot, key: BlockKey) -> bool:
        """Whether the worker's events say that it holds this block, in any tier; a promise is no announcement."""
        worker = self._workers.get(slot)
        return worker is not None and any(masks.get(key, 0) & worker.bit for masks in self._placement.masks)

    def mark(self, slot: Slot) -> Mark:
        """Compare two of one slot to see what happened in between; an unbound slot has the zero mark."""
        worker = self._workers.get(slot)
        return Mark() if worker is None else Mark(worker.epoch, worker.clears, worker.removed)

    def snapshot(self, slot: Slot, rank: int) -> RankBlocks | None:
        """A copy of what a rank announced; None while it is being changed in steps, or when it is too much."""
        worker = self._workers.get(slot)
        table = None if worker is None else worker.ranks.get(rank)
        if worker is None or table is None or worker.hidden or table.ready or rank in worker.previews:
            return None
        return taken(worker, table)

    def restoring(self, slot: Slot, rank: int, blocks: RankBlocks, *, most: int) -> Generator[int, None, bool]:
        """Put a copy into an empty rank, in steps, as `purging` takes it out; returns whether all of it is there. What
        is begun and not ended has to be purged."""
        worker = self._workers.get(slot)
        if worker is None or (worker.block_size, worker.counted) != (blocks.size, blocks.counted):
            return False
        table = worker.ranks.setdefault(rank, RankTable(self._orphan_limit))
        if any(table.held):
            return False
        if not worker.heard:
            self._hear(worker)
        for step in putting_back(self._placement, worker, table, blocks, most):
            if worker.span > 1:
                self._spans[slot] = worker.span
            self._weigh(worker)
            yield step
            if self._workers.get(slot) is not worker:
                return False
        return True

    def _begin_epoch(self, worker: WorkerTable) -> None:
        self._epochs += 1
        worker.epoch = self._epochs

    # ------------------------------------------------------------------ requests

    def overlap(self, blocks: PrefixBlocks, slots: int) -> Overlaps:
        """What each candidate holds of a request; `slots` is the bit mask of candidates."""
        return Overlaps(
            blocks,
            slots & ~self._hidden if self._hidden else slots,
            masks=self._placement.masks,
            heads=self._speculative.heads,
            slow_slots=self._placement.slow_slots,
            # Blocks of text are no whole number of the engine's: there is nothing to round to.
            spans=_NO_SPANS if blocks.mode is PrefixMode.APPROXIMATE else self._spans,
            windows=None if blocks.mode is PrefixMode.APPROXIMATE or not self._reaches else self._windows,
        )

    def speculate(self, slot: Slot, blocks: PrefixBlocks, overlaps: Overlaps | None = None) -> Speculation:
        """The worker will hold these blocks soon: enter those beyond its announced run. An unbound slot enters none.

        `overlaps` of the same request, when the index has not changed since, save a walk.
        """
        worker = self._workers.get(slot)
        if worker is None:
            return Speculation(None, [])
        parts: list[Part] = []
        gpu = self._placement.masks[0]
        run = None if overlaps is None else overlaps.run(slot)
        for keys, _ in blocks.chains:
            length = run_on(keys, 0, worker.bit, gpu, self._speculative.heads) if run is None else run
            self._speculative.promise(worker.promises, keys, length, parts)
            if self._truncation is not None and self._truncation.watches:
                self._truncation.ask(keys[:length])
        return Speculation(worker.promises, parts)

    def speculate_end(self, slot: Slot, keys: Sequence[BlockKey], first: int) -> Speculation:
        """As `speculate`, where only the end of a chain is known: `keys` are its blocks from number `first` on."""
        worker = self._workers.get(slot)
        if worker is None:
            return Speculation(None, [])
        parts: list[Part] = []
        chain = ChainTail(first, keys) if first else keys
        run = run_within(chain, first, worker.promises, self._placement.masks[0], self._speculative.heads)
        self._speculative.promise(worker.promises, chain, run, parts, first=first)
        return Speculation(worker.promises, parts)

    def retract(self, speculation: Speculation) -> None:
        """End a speculation; idempotent, also after its slot was released or bound anew."""
        self._speculative.retract(speculation)

    def remember(
        self, slot: Slot, blocks: PrefixBlocks, capacity: int, now: float, *, promised: Sequence[Speculation] = ()
    ) -> Remembered | None:
        """The worker, of `capacity` tokens (0: unknown), has prefilled a request: learn its blocks, and end
        what was `promised` of them, where its events do not tell; None where they do."""
        worker = self._workers.get(slot)
        if worker is None or self._approximate is None or worker.hidden:
            return None
        # Announced blocks of a process that is gone are the feed's to drop; until then nothing is learned beside them,
        # nor beside those that a preview hides.
        if blocks.mode is not PrefixMode.APPROXIMATE and (worker.heard or worker.previews or any(worker.blocks)):
            return None
        learned = self._approximate.worker(worker.bit)
        for speculation in promised:
            self._speculative.retract(speculation)
        if blocks.text is not None:  # of token ids an engine told only the beginning is known
            blocks, learned.instead = blocks.text, True
        remembered = self._approximate.remember(learned, blocks, capacity, worker.promises, now)
        worker.learned_blocks = learned.held_tokens // worker.block_size
        return remembered

    def contradict(self, slot: Slot, known: Remembered, *, delivered: float, sent_at: float, now: float) -> bool:
        """The worker reported `delivered` cached tokens for a request that was remembered, sent at `sent_at`. True
        when that shows that it has evicted something (`ApproximateBlocks.contradict`)."""
        worker = self._workers.get(slot)
        if worker is None or self._approximate is None:
            return False
        learned = self._approximate.worker(worker.bit)
        return self._approximate.contradict(learned, known, delivered=delivered, sent_at=sent_at, now=now)

    def forget(self, slot: Slot) -> int:
        """The worker's process is another one, or may be, or its feed has ended: what was learned of it goes, and it is
        learned anew once nothing that it announced is left (that is the feed's to drop). Returns how many blocks went.
        """
        return sum(self.forgetting(slot))

    def forgetting(self, slot: Slot, *, most: int | None = None) -> Generator[int, None, None]:
        """`forget` in steps, as `purging` does it; until the last one nothing is learned of the worker."""
        worker = self._workers.get(slot)
        if worker is None:
            return
        worker.heard = False
        worker.learned_blocks = 0
        approximate = self._approximate
        if approximate is None:
            return
        learned = approximate.worker(worker.bit)
        self._hide(worker)
        try:
            while learned.blocks and self._workers.get(slot) is worker:
                yield approximate.forget(learned, most=most)
        finally:
            if self._workers.get(slot) is worker:
                approximate.forget(learned)
            self._show(worker)

    def expire(self, now: float) -> None:
        """About twice a second: blocks that nobody removes and learned ones end with their life time."""
        for worker in self._placement.expire(self._workers.values(), now, _EXPIRED_AT_ONCE):
            self._weigh(worker)
        if self._approximate is not None:
            self._approximate.expire(now)
            for worker in self._workers.values():
                worker.learned_blocks = self._approximate.worker(worker.bit).held_tokens // worker.block_size

    def learned(self, slot: Slot) -> int:
        """Blocks learned from routing, of token keys and of text keys."""
        worker = self._workers.get(slot)
        return 0 if worker is None or self._approximate is None else self._approximate.worker(worker.bit).blocks

    def announces(self, slot: Slot) -> bool:
        """Whether events of this worker have come: what it holds is then read from them."""
        worker = self._workers.get(slot)
        return worker is not None and worker.heard

    # ------------------------------------------------------------------ numbers

    def holders(self, key: BlockKey) -> int:
        """The workers that hold this block in any tier, or were promised it, as bits of their slots."""
        promised = (worker.bit for worker in self._workers.values() if key in worker.promises)
        return reduce(or_, promised, reduce(or_, (masks.get(key, 0) for masks in self._placement.masks)))

    def resident(self, slot: Slot, tier: Tier) -> int:
        """Distinct keys the worker holds in a tier."""
        worker = self._workers.get(slot)
        return 0 if worker is None else worker.blocks[TIER_INDEX[tier]]

    @property
    def slow_slots(self) -> int:
        """The workers that hold anything in a slower tier, as bits of their slots."""
        return self._placement.slow_slots

    def gpu_tokens(self, slots: Sequence[Slot]) -> list[int]:
        """Tokens in blocks on GPU, announced or learned, for many workers at once, in their order."""
        workers = self._workers
        return [
            (worker.blocks[0] + worker.learned_blocks) * worker.block_size if (worker := workers.get(slot)) else 0
            for slot in slots
        ]

    def stats(self) -> IndexStats:
        """Numbers for metrics and the admin port; costs a walk over workers and ranks, not over blocks."""
        return index_stats(
            self._placement.masks,
            self._workers,
            self._approximate.stats() if self._approximate is not None else ApproximateStats(0, 0, {}),
            orphans_dropped=self._orphans_dropped,
            speculative_truncated=self._speculative.truncated,
            truncated=self._truncation.truncated if self._truncation is not None else 0,
        )

    def engine_hashes(self, slot: Slot, rank: int, tier: Tier) -> frozenset[int]:
        """Names of the blocks a rank holds in a tier, as the engine gave them (folded). For checks; copies them."""
        worker = self._workers.get(slot)
        table = None if worker is None else worker.ranks.get(rank)
        return frozenset() if table is None else frozenset(table.held[TIER_INDEX[tier]])
