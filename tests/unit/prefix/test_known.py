"""Token keys found by the text of a prompt that an engine has tokenised."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import keys
from gateway.prefix import KnownPrompts
from gateway.prefix.text import BLOCK_BYTES, text_blocks
from gateway.records import PrefixBlocks, PrefixMode, TextPrompt

SIZE = 16
SEED = keys.namespace()
RATIO = 4.0


def text_of(words: str, *, salt: str | None = None) -> PrefixBlocks:
    return text_blocks(TextPrompt((words,)), adapter=None, salt=salt, bytes_a_token=RATIO, reason="no_tokenizer")


def ids_of(words: str) -> list[int]:
    """An engine with tokens of four letters."""
    return [int.from_bytes(words[at : at + 4].encode()) for at in range(0, len(words), 4)]


def tell(known: KnownPrompts, words: str, *, size: int = SIZE) -> None:
    known.learn(text_of(words), SEED, ids_of(words), block_size=size)


def found(known: KnownPrompts, words: str, *, size: int = SIZE) -> PrefixBlocks:
    return known.find(text_of(words), block_size=size, bytes_a_token=RATIO)


def true_keys(words: str) -> list[int]:
    return [int(key) for key in keys.chain(SEED, ids_of(words), SIZE)]


def words(seed: str, length: int) -> str:
    return "".join(f"{seed}{number:05d} " for number in range(length // 7 + 1))[:length]


def test_nothing_is_known_before_an_engine_told() -> None:
    blocks = found(KnownPrompts(), words("a", 4096))
    assert (blocks.mode, blocks.chains[0].keys, blocks.tokens) == (PrefixMode.ENGINE, [], 1024)
    assert blocks.text == text_of(words("a", 4096))


def test_the_next_turn_finds_all_of_the_turn_before() -> None:
    known, first = KnownPrompts(), words("a", 5000)
    tell(known, first)
    second = first + words("b", 3000)
    blocks = found(known, second)
    (chain,) = blocks.chains
    assert list(chain.keys) == true_keys(first) == true_keys(second)[: len(chain.keys)]
    assert abs(blocks.tokens - 2000) <= 64
    assert known.wants(text_of(second), block_size=SIZE)
    assert not known.wants(text_of(first), block_size=SIZE)


def test_where_two_prompts_part_is_known_exactly() -> None:
    known, head = KnownPrompts(), words("system", 16 * BLOCK_BYTES)
    tell(known, head + words("a", 2000))
    # One prompt only: an estimate, a little low.
    estimated = len(found(known, head + words("b", 2000)).chains[0].keys)
    assert 0.8 * len(true_keys(head)) < estimated <= len(true_keys(head))
    tell(known, head + words("b", 2000))
    assert list(found(known, head + words("c", 2000)).chains[0].keys) == true_keys(head)
    # Both go on being known to their ends.
    for seed in "ab":
        assert list(found(known, head + words(seed, 2000)).chains[0].keys) == true_keys(head + words(seed, 2000))


def test_other_texts_and_namespaces_find_nothing() -> None:
    known = KnownPrompts()
    tell(known, words("a", 4096))
    assert found(known, words("b", 4096)).chains[0].keys == []
    salted = known.find(text_of(words("a", 4096), salt="s"), block_size=SIZE, bytes_a_token=RATIO)
    assert salted.chains[0].keys == []


def test_another_block_size_starts_anew() -> None:
    known, text = KnownPrompts(), words("a", 4096)
    tell(known, text)
    assert found(known, text, size=32).chains[0].keys == []
    assert known.wants(text_of(text), block_size=32)
    tell(known, text, size=32)
    assert len(found(known, text, size=32).chains[0].keys) == 32
    assert found(known, text).chains[0].keys == []


def test_memory_is_bounded_and_the_oldest_prompt_goes_first() -> None:
    known = KnownPrompts(max_bytes=100_000)
    for number in range(60):
        tell(known, words(f"p{number}", 4096))
        assert known.stats().bytes <= 100_000
    assert known.stats().evictions > 0
    assert found(known, words("p0", 4096)).chains[0].keys == []
    assert list(found(known, words("p59", 4096)).chains[0].keys) == true_keys(words("p59", 4096))


def test_bytes_return_to_nothing() -> None:
    known = KnownPrompts(max_bytes=0)
    for seed in "abc":
        tell(known, words(seed, 4096))
    assert (known.stats().bytes, known.stats().entries) == (0, 0)


def test_a_prompt_shorter_than_a_block_is_not_kept() -> None:
    known = KnownPrompts()
    tell(known, "short")
    assert known.stats().bytes == 0
    assert not known.wants(text_of("short"), block_size=SIZE)


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12), st.integers(1_000, 40_000))
def test_what_is_found_is_always_the_beginning_of_some_told_prompt(told: list[list[int]], limit: int) -> None:
    """Pieces of 320 letters: prompts part inside of blocks. However they mix, a find gives keys of a prompt that has
    the same text, never more than a block of text beyond what both have in common."""
    known = KnownPrompts(max_bytes=limit)
    prompts = ["".join(words(f"{piece}", 320) for piece in pieces) for pieces in told]
    for prompt in prompts:
        tell(known, prompt)
        assert 0 <= known.stats().bytes <= limit
        for asked in prompts:
            got = [int(key) for key in found(known, asked).chains[0].keys]
            mine = true_keys(asked)
            pairs = zip(got, mine, strict=False)
            same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(got), len(mine)))
            assert len(got) - same <= BLOCK_BYTES // 4 // SIZE + 1
            assert not got or any(true_keys(other)[: len(got)] == got for other in prompts)
