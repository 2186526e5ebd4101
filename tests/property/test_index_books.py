"""The books of the index agree after every step: masks, counts of blocks and of further holders follow from the tables
of what was announced, shown before its turn, promised and learned, and a key is only one of announced, promised and
learned for a worker. Purges, ends of previews and forgetting stand open for any time; a small cap drops blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gateway.keys import chain, namespace
from gateway.kv import ApproximateSettings, KvIndex
from gateway.kv.events import KvEvent, Removed, Stored
from gateway.kv.speculation import Speculation, Stretch
from gateway.kv.tables import TIERS
from gateway.kv.truncation import BYTES_A_BLOCK
from gateway.records import BlockKey, Chain, EngineHash, EngineKind, PrefixBlocks, PrefixMode, Slot, Tier

SIZE = 2
ENGINES = (EngineKind.VLLM, EngineKind.SGLANG)
ALL = 0b11
HEAD = [1, 2, 3, 4, 5, 6]
PROMPTS = [HEAD, [*HEAD, 7, 8, 9, 10], [*HEAD, 7, 8, 11, 12, 13, 14]]

slots = st.integers(0, len(ENGINES) - 1).map(Slot)
ranks = st.integers(0, 1)
prompts = st.sampled_from(PROMPTS)


def names(prompt: list[int], rank: int) -> list[EngineHash]:
    return [EngineHash(key ^ rank) for key in chain(namespace(), prompt, SIZE)]


class Books(RuleBasedStateMachine):
    @initialize(
        cap=st.sampled_from([None, 12]), promised=st.sampled_from([4, 1000]), learned=st.sampled_from([6, 1000])
    )
    def begin(self, cap: int | None, promised: int, learned: int) -> None:
        self.index = KvIndex(
            orphan_limit=4,
            speculative_limit=promised,
            approximate=ApproximateSettings(ttl_s=20.0, default_tokens=40, limit=learned),
            max_bytes=None if cap is None else cap * BYTES_A_BLOCK,
            offload_ttl_s=10.0,
        )
        for number, engine in enumerate(ENGINES):
            self.index.bind(Slot(number), block_size=SIZE, engine=engine)
        self.now = 0.0
        self.speculations: list[Speculation] = []
        self.open: list[tuple[Generator[int, None, None], set[tuple[Slot, int]]]] = []

    def _busy(self, slot: Slot, rank: int) -> bool:
        """No events of a rank come while it is being purged."""
        return any((slot, rank) in places for _, places in self.open)

    @rule(
        slot=slots, rank=ranks, prompt=prompts, span=st.tuples(st.sampled_from([0, 0, 0, 1, 3]), st.integers(1, 6)),
        tier=st.sampled_from([Tier.GPU, Tier.GPU, Tier.CPU]), fleeting=st.booleans(), shown=st.booleans(),
    )  # fmt: skip
    def store(
        self, slot: Slot, rank: int, prompt: list[int], span: tuple[int, int], tier: Tier, fleeting: bool, shown: bool
    ) -> None:
        hashes = names(prompt, rank)
        start = min(span[0], len(hashes) - 1)
        some = hashes[start : start + span[1]]
        tokens = prompt[start * SIZE : (start + len(some)) * SIZE]
        parent = hashes[start - 1] if start else None
        fleeting = fleeting and tier is not Tier.GPU
        event = Stored(some, parent, tokens, SIZE, tier, keyed=True, fleeting=fleeting)
        self._say(slot, rank, event, shown=shown)

    @rule(slot=slots, rank=ranks, prompt=prompts, chosen=st.sets(st.integers(0, 5)), shown=st.booleans())
    def remove(self, slot: Slot, rank: int, prompt: list[int], chosen: set[int], shown: bool) -> None:
        hashes = names(prompt, rank)
        self._say(slot, rank, Removed([hashes[at] for at in chosen if at < len(hashes)], Tier.GPU), shown=shown)

    def _say(self, slot: Slot, rank: int, event: KvEvent, *, shown: bool) -> None:
        if self._busy(slot, rank):
            return
        if shown:
            self.index.preview(slot, rank, [event])
        else:
            self.index.apply(slot, rank, [event])

    @rule(slot=slots, prompt=prompts, text=st.booleans(), fresh=st.booleans())
    def decide(self, slot: Slot, prompt: list[int], text: bool, fresh: bool) -> None:
        blocks = request(prompt, text=text)
        overlaps = self.index.overlap(blocks, ALL)
        self.speculations.append(self.index.speculate(slot, blocks, overlaps if fresh else None))

    @rule(at=st.integers(0, 30))
    def retract(self, at: int) -> None:
        if self.speculations:
            self.index.retract(self.speculations.pop(at % len(self.speculations)))

    @rule(slot=slots, prompt=prompts, text=st.booleans(), capacity=st.sampled_from([0, 8]))
    def prefilled(self, slot: Slot, prompt: list[int], text: bool, capacity: int) -> None:
        self.index.remember(slot, request(prompt, text=text), capacity, self.now)

    @rule(slot=slots, rank=st.none() | ranks, cleared=st.booleans(), most=st.integers(1, 3))
    def purge(self, slot: Slot, rank: int | None, cleared: bool, most: int) -> None:
        places = {(slot, number) for number in ((0, 1) if rank is None else (rank,))}
        if not any(self._busy(*place) for place in places):
            self._begin(self.index.purging(slot, rank, most=most, cleared=cleared), places)

    @rule(slot=slots, rank=ranks, most=st.integers(1, 3))
    def end_preview(self, slot: Slot, rank: int, most: int) -> None:
        if not self._busy(slot, rank):
            self._begin(self.index.ending_preview(slot, rank, most=most), {(slot, rank)})

    @rule(slot=slots, most=st.integers(1, 3))
    def forget(self, slot: Slot, most: int) -> None:
        self._begin(self.index.forgetting(slot, most=most), set())

    def _begin(self, steps: Generator[int, None, None], places: set[tuple[Slot, int]]) -> None:
        if next(steps, None) is not None:
            self.open.append((steps, places))

    @rule(at=st.integers(0, 30), give_up=st.booleans())
    def step(self, at: int, give_up: bool) -> None:
        if not self.open:
            return
        steps, places = self.open.pop(at % len(self.open))
        if give_up:
            steps.close()
        elif next(steps, None) is not None:
            self.open.append((steps, places))

    @rule(seconds=st.sampled_from([1.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.index.expire(self.now)

    @rule(slot=slots)
    def leave_and_join(self, slot: Slot) -> None:
        self.index.bind(slot, block_size=SIZE, engine=ENGINES[slot])

    @invariant()
    def agree(self) -> None:
        masks: list[Counter[BlockKey]] = [Counter() for _ in TIERS]
        stretches: set[Stretch] = set()
        for slot, worker in self.index._workers.items():
            bit = 1 << slot
            tables = [*worker.ranks.values(), *(preview.over for preview in worker.previews.values())]
            for tier in range(len(TIERS)):
                holders = Counter(
                    key
                    for table in tables
                    for name, last in table.held[tier].items()
                    for key in (*table.heads[tier].get(name, ()), last)
                )
                assert worker.blocks[tier] == len(holders)
                assert worker.shared[tier] == {key: count - 1 for key, count in holders.items() if count > 1}
                masks[tier].update(dict.fromkeys(holders, bit))
            assert self.index._approximate is not None
            learned = self.index._approximate.worker(bit)
            promises = worker.promises
            live = [stretch for here in promises._starts.values() for stretch in here]
            stretches.update(live)
            assert all(stretch.start == start for start, here in promises._starts.items() for stretch in here)
            assert promises.held == len(promises._keys()) == sum(len(stretch.keys) for stretch in live)
            assert all(promises._by_key[key] is stretch for stretch in live for key in stretch.keys)
            assert promises._ends == {stretch.last: stretch for stretch in live}
            assert not any(masks[0][stretch.first] & bit for stretch in live)
            # A key of two kinds would count twice, and then the mask is another.
            masks[0].update(dict.fromkeys([*learned.tokens, *learned.text], bit))
        assert self.index._placement.masks == masks
        heads = self.index._speculative.heads
        assert {stretch for here in heads.values() for stretch in here} == stretches
        assert all(stretch.keys[0] == key for key, here in heads.items() for stretch in here)

    def teardown(self) -> None:
        for steps, _ in self.open:
            steps.close()
        for number in range(len(ENGINES)):
            self.index.release(Slot(number))
        stats = self.index.stats()
        assert (stats.keys, stats.orphans, stats.placeholders, stats.speculative, stats.approximate.blocks) == (0,) * 5
        truncation = self.index._truncation
        assert (self.index._hidden, self.index._placement.slow_slots) == (0, 0)
        assert truncation is None or truncation.total == 0


def request(prompt: list[int], *, text: bool) -> PrefixBlocks:
    keys = chain(namespace("text" if text else None), prompt, SIZE)
    mode = PrefixMode.APPROXIMATE if text else PrefixMode.EXACT
    return PrefixBlocks((Chain(keys, len(prompt) + 1),), len(prompt) + 1, SIZE, mode)


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=80)
