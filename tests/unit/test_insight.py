"""What prompts have in common: where they part, what drift costs, which prefixes are hot, and all of it bounded."""

from __future__ import annotations

from random import Random

import pytest

from gateway.insight import HEAD_TOKENS, POSITIONS, PrefixInsight
from gateway.records import BlockKey, Chain, PrefixBlocks, PrefixMode

SIZE = 16
CUT = 2 ** (1 / 3)
"""Positions are exact to a cut."""


class Prompts:
    """Keys of made-up prompts: each call of `new` gives blocks that nobody has seen."""

    def __init__(self) -> None:
        self._rng = Random(1)

    def new(self, tokens: int) -> list[BlockKey]:
        return [BlockKey(self._rng.getrandbits(64)) for _ in range(tokens // SIZE)]


def blocks(keys: list[BlockKey]) -> PrefixBlocks:
    return PrefixBlocks((Chain(keys, len(keys) * SIZE),), len(keys) * SIZE, SIZE)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


def test_prompts_part_behind_their_system_prompt(prompts: Prompts) -> None:
    insight = PrefixInsight()
    system = prompts.new(2048)
    for _ in range(50):
        insight.observe("llama", blocks(system + prompts.new(512)))
    (seen,) = insight.applications()
    assert (seen.model, seen.head, seen.requests) == ("llama", system[HEAD_TOKENS // SIZE - 1], 50)
    assert seen.stable_tokens is not None
    assert 2048 / CUT < seen.stable_tokens <= 2048
    assert (seen.drifted, seen.drift_tokens) == (0, 0)
    assert seen.prompt_tokens == 50 * 2560
    assert seen.shared_tokens == 49 * seen.stable_tokens
    assert insight.models["llama"].new_heads == 1


def test_drift_is_what_leaves_the_way_early(prompts: Prompts) -> None:
    """Every fifth prompt has the date in its system prompt at token 256."""
    insight = PrefixInsight()
    system = prompts.new(2048)
    for number in range(100):
        dated = system[: 256 // SIZE] + prompts.new(2048 - 256)
        insight.observe("llama", blocks((dated if number % 5 == 4 else system) + prompts.new(512)))
    (seen,) = insight.applications()
    assert seen.stable_tokens is not None
    assert seen.stable_tokens > 2048 / CUT
    assert 18 <= seen.drifted <= 20  # the first ones come before anything is usual
    assert seen.drift_tokens == seen.drifted * (seen.stable_tokens - 256)
    assert sum(seen.positions) == seen.positions[POSITIONS.index(256)] == seen.drifted
    totals = insight.models["llama"]
    assert (totals.drifted, totals.drift_tokens) == (seen.drifted, seen.drift_tokens)
    assert totals.position_tokens == 256 * seen.drifted


def test_chats_that_go_on_do_not_drift_and_are_not_what_is_stable(prompts: Prompts) -> None:
    insight = PrefixInsight()
    system = prompts.new(1024)
    for _ in range(40):
        chat = system + prompts.new(512)
        for _ in range(6):
            insight.observe("llama", blocks(chat))
            chat = chat + prompts.new(512)
    (seen,) = insight.applications()
    assert seen.stable_tokens is not None
    assert seen.stable_tokens <= 1024
    assert seen.drifted == 0


def test_another_way_that_others_went_before_is_no_drift(prompts: Prompts) -> None:
    """Two tasks behind one beginning: only the first prompt of the second task has parted early."""
    insight = PrefixInsight()
    start = prompts.new(128)
    long, short = start + prompts.new(4096), start + prompts.new(512)
    for _ in range(30):
        insight.observe("llama", blocks(long + prompts.new(256)))
    for _ in range(30):
        insight.observe("llama", blocks(short + prompts.new(256)))
    (seen,) = insight.applications()
    assert seen.drifted <= 1


def test_a_prompt_that_ends_early_has_lost_nothing(prompts: Prompts) -> None:
    insight = PrefixInsight()
    system = prompts.new(2048)
    for _ in range(20):
        insight.observe("llama", blocks(system + prompts.new(512)))
    insight.observe("llama", blocks(system[: 512 // SIZE]))
    assert insight.models["llama"].drift_tokens == 0


def test_models_do_not_share(prompts: Prompts) -> None:
    insight = PrefixInsight()
    prompt = prompts.new(1024)
    insight.observe("llama", blocks(prompt))
    insight.observe("qwen", blocks(prompt))
    assert [insight.models[model].new_heads for model in ("llama", "qwen")] == [1, 1]
    assert len(insight.applications()) == 2


def test_hot_prefixes_by_reuse_times_tokens(prompts: Prompts) -> None:
    insight = PrefixInsight()
    long, often = prompts.new(2048), prompts.new(256)
    for _ in range(10):
        insight.observe("llama", blocks(long + prompts.new(256)))
    for _ in range(40):
        insight.observe("llama", blocks(often + prompts.new(256)))
    first, second = insight.hottest(2)
    assert first.key in long
    assert (first.reuse, second.reuse) == (9, 39)
    assert first.key == long[first.tokens // SIZE - 1]
    assert second.key in often
    assert insight.hottest(1) == [first]


def test_short_and_unknown_prompts_say_nothing(prompts: Prompts) -> None:
    insight = PrefixInsight()
    insight.observe("llama", PrefixBlocks((), 400, SIZE, PrefixMode.NONE, "no_tokenizer"))
    assert insight.models == {}
    insight.observe("llama", blocks(prompts.new(48)))
    assert (insight.models["llama"].short, insight.applications()) == (1, [])


def test_what_is_shared_outlives_a_flood_of_strangers(prompts: Prompts) -> None:
    insight = PrefixInsight(max_cuts=500, max_applications=20)
    system = prompts.new(2048)
    for number in range(2000):
        insight.observe("llama", blocks(prompts.new(1024)))
        if number % 20 == 0:
            insight.observe("llama", blocks(system + prompts.new(256)))
    assert len(insight) <= 500
    applications = insight.applications()
    assert len(applications) <= 20
    ours = next(seen for seen in applications if seen.head == system[HEAD_TOKENS // SIZE - 1])
    assert ours.requests == 100
    assert ours.drifted == 0


def test_models_are_bounded(prompts: Prompts) -> None:
    insight = PrefixInsight(max_models=3)
    for number in range(5):
        insight.observe(f"m{number}", blocks(prompts.new(1024)))
    assert list(insight.models) == ["m2", "m3", "m4"]


def test_what_is_stable_can_change(prompts: Prompts) -> None:
    """A new release of the application has a longer system prompt; the old one is forgotten."""
    insight = PrefixInsight()
    start = prompts.new(64)
    old, new = start + prompts.new(8192), start + prompts.new(1024)
    for _ in range(600):
        insight.observe("llama", blocks(old + prompts.new(64)))
    for _ in range(30_000):
        insight.observe("llama", blocks(new + prompts.new(64)))
    (seen,) = insight.applications()
    assert seen.stable_tokens is not None
    assert seen.stable_tokens <= 1024 + 64


def test_block_sizes_that_keep_changing_are_no_leak(prompts: Prompts) -> None:
    insight = PrefixInsight()
    for size in range(1, 100):
        keys = prompts.new(64 * SIZE)
        insight.observe("llama", PrefixBlocks((Chain(keys, len(keys) * size),), len(keys) * size, size))
    assert insight.models["llama"].requests == 99
