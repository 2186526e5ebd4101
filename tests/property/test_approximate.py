"""Learned blocks against a naive model: a set of blocks with their last use a worker, and a set of announced ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import keys
from gateway.kv import ApproximateSettings, KvIndex
from gateway.kv.events import Stored
from gateway.records import Chain, EngineHash, PrefixBlocks, PrefixMode, Slot

SIZE = 4
SLOTS = (Slot(0), Slot(1))
CAPACITY_BLOCKS = 12
TTL_S = 50.0

# Prompts over a small alphabet share heads often. Each step: who, what, of which kind, how much later.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(SLOTS), prompts, st.booleans(), st.integers(0, 20)),
        st.tuples(st.just("restart"), st.sampled_from(SLOTS), prompts, st.booleans(), st.integers(0, 20)),
        st.tuples(st.just("announce"), st.sampled_from(SLOTS), prompts, st.just(False), st.integers(0, 5)),
        st.tuples(st.just("purge"), st.sampled_from(SLOTS), prompts, st.just(False), st.integers(0, 5)),
        st.tuples(st.just("wait"), st.sampled_from(SLOTS), prompts, st.booleans(), st.integers(0, 60)),
    ),
    max_size=30,
)


def blocks_of(words: list[int], *, text: bool) -> PrefixBlocks:
    tokens = [word for word in words for _ in range(SIZE)]
    seed = keys.namespace("text" if text else None)
    mode = PrefixMode.APPROXIMATE if text else PrefixMode.EXACT
    return PrefixBlocks((Chain(keys.chain(seed, tokens, SIZE), len(tokens) + 1),), len(tokens) + 1, SIZE, mode)


class Naive:
    """One worker: every block with its last use; equal times are told apart by the order of use."""

    def __init__(self) -> None:
        self.used: dict[int, tuple[float, int]] = {}
        self.text: set[int] = set()
        self.announced: set[int] = set()
        self.heard = False
        self.count = 0

    def ask(self, blocks: PrefixBlocks, now: float, *, text: bool) -> None:
        if self.heard and not text:
            return
        if text:
            self.text.update(blocks.chains[0].keys)
        for key in reversed(blocks.chains[0].keys):
            self.count += 1
            self.used[key] = (now, self.count)
        self.fit(now)

    def announce(self, blocks: PrefixBlocks) -> None:
        if not self.heard:
            self.used = {key: at for key, at in self.used.items() if key in self.text}
        self.heard = True
        self.announced.update(blocks.chains[0].keys)

    def fit(self, now: float) -> None:
        self.used = {key: at for key, at in self.used.items() if at[0] > now - TTL_S}
        while len(self.used) > CAPACITY_BLOCKS:
            del self.used[min(self.used, key=lambda key: self.used[key])]

    def run(self, blocks: PrefixBlocks) -> int:
        length = 0
        for key in blocks.chains[0].keys:
            if key not in self.used and key not in self.announced:
                break
            length += 1
        return length


@settings(max_examples=150)
@given(steps)
def test_learned_blocks_equal_the_naive_model(
    steps: list[tuple[str, Slot, list[int], bool, int]],
) -> None:
    index = KvIndex(approximate=ApproximateSettings(ttl_s=TTL_S))
    naive = {slot: Naive() for slot in SLOTS}
    for slot in SLOTS:
        index.bind(slot, block_size=SIZE)
    now = 0.0
    for what, slot, words, text, later in steps:
        now += later + 0.001  # no two at the same time: among equals either may go
        blocks = blocks_of(words, text=text)
        if what == "ask":
            index.remember(slot, blocks, CAPACITY_BLOCKS * SIZE, now)
            naive[slot].ask(blocks, now, text=text)
        elif what == "announce":
            tokens = [word for word in words for _ in range(SIZE)]
            hashes = [EngineHash(int(key)) for key in blocks.chains[0].keys]
            index.apply(slot, 0, [Stored(hashes, None, tokens, SIZE)])
            naive[slot].announce(blocks)
        elif what == "purge":
            index.purge(slot)
            naive[slot].announced.clear()
        elif what == "restart":
            index.forget(slot)
            index.purge(slot)
            naive[slot] = Naive()
        index.expire(now)
        for model in naive.values():
            model.fit(now)
        for kind in (False, True):
            asked = blocks_of(words, text=kind)
            found = index.overlap(asked, 0b11).tokens_of(SLOTS)
            assert [tokens // SIZE for tokens in found] == [naive[each].run(asked) for each in SLOTS]
        assert [index.learned(each) for each in SLOTS] == [len(naive[each].used) for each in SLOTS]
        # What is held of a chain is always its beginning: nothing is known behind a hole.
        held = {key for model in naive.values() for key in (*model.used, *model.announced)}
        assert index.stats().keys == len(held)
    for slot in SLOTS:
        index.release(slot)
    assert (index.stats().keys, index.stats().approximate.blocks) == (0, 0)
