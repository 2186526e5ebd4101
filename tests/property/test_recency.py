"""Order of use by pieces against one by single blocks: what is known, since when, what goes and in which order."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.kv.recency import Recency
from gateway.records import BlockKey

# Prompts over a small alphabet share heads often, and leave each other in the middle.
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("touch"), prompts, st.integers(0, 1)),
        st.tuples(st.just("go on"), prompts, st.integers(0, 1)),
        st.tuples(st.just("drop"), st.just([0]), st.integers(1, 6)),
    ),
    max_size=60,
)


def chain(words: list[int]) -> list[BlockKey]:
    """A key names all before it."""
    return [BlockKey(int("1" + "".join(map(str, words[: at + 1])))) for at in range(len(words))]


def naive_uses(known: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple((at + 1, used) for at, used in enumerate(known) if at + 1 == len(known) or known[at + 1] != used)


@settings(max_examples=400)
@given(steps)
def test_pieces_keep_the_order_of_single_blocks(steps: list[tuple[str, list[int], int]]) -> None:
    order, naive = Recency(), OrderedDict[BlockKey, float]()
    now, words = 0.0, [0]
    for what, given_words, number in steps:
        if what == "drop":
            if naive:
                gone = order.drop(number)
                assert 0 < len(gone) <= number
                oldest = [naive.popitem(last=False) for _ in gone]
                assert gone[::-1] == [key for key, _ in oldest]
                assert {at for _, at in oldest} == {oldest[0][1]}
        else:
            words = [*words, *given_words][:40] if what == "go on" else given_words
            now += number
            keys = chain(words)
            held = [naive[key] for key in keys if key in naive]
            assert order.touch(keys, now) == (len(held), naive_uses(held)[:16])
            naive.update(dict.fromkeys(keys, now))
            for key in reversed(keys):
                naive.move_to_end(key)
        assert list(order) == list(naive)
        assert order.blocks == len(naive)
        assert order.oldest_at == (next(iter(naive.values())) if naive else None)
        assert order.blocks <= order.weight <= 2 * order.blocks


def test_a_chat_that_goes_on_stays_few_pieces() -> None:
    """Its beginning, which others share, and its own part."""
    order = Recency()
    head = [0] * 32
    for turn in range(1, 20):
        for chat in (1, 2, 3):
            order.touch(chain([*head, *[chat] * turn]), float(turn))
    assert (order.blocks, order.weight) == (32 + 3 * 19, 32 + 3 * 19 + 4)


def test_what_is_evicted_leaves_nothing_behind() -> None:
    order = Recency()
    for seed in range(50):
        order.touch(chain([0, 0, 0, seed % 7, seed, 1]), float(seed))
    while order.blocks:
        order.drop(2)
    assert (list(order), order.weight, order.bytes, order.oldest_at) == ([], 0, 0, None)
