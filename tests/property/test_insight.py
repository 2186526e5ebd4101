"""Whatever prompts come, in whatever order: counts agree with each other and bounds hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.insight import PrefixInsight
from gateway.keys import chain, namespace
from gateway.records import Chain, PrefixBlocks

SIZE = 16
prompt = st.lists(st.integers(0, 2), min_size=0, max_size=12).map(
    lambda parts: [token for part in parts for token in [part] * 64]
)


@given(st.lists(st.tuples(st.sampled_from(("a", "b")), prompt), max_size=60), st.integers(1, 40))
def test_counts_agree(asked: list[tuple[str, list[int]]], most: int) -> None:
    insight = PrefixInsight(max_cuts=most, max_applications=3)
    for model, tokens in asked:
        keys = chain(namespace(), tokens, SIZE)
        insight.observe(model, PrefixBlocks((Chain(keys, len(tokens)),), len(tokens), SIZE))
        assert len(insight) <= most
    assert sum(seen.requests for seen in insight.models.values()) == len(asked)
    for seen in insight.models.values():
        assert seen.shared_tokens + seen.drift_tokens <= seen.prompt_tokens
        assert sum(seen.positions) == seen.drifted
    assert len(insight.applications()) <= 3
    for one in insight.applications():
        assert one.shared_tokens + one.drift_tokens <= one.prompt_tokens
        assert sum(one.positions) == one.drifted
    hot = insight.hottest(10)
    saved = [prefix.reuse * prefix.tokens for prefix in hot]
    assert saved == sorted(saved, reverse=True)


@given(st.lists(prompt, min_size=1, max_size=30))
def test_what_is_shared_was_there_before(asked: list[list[int]]) -> None:
    """With room for all, the shared part of a prompt is the longest cut it has in common with an earlier one."""
    insight = PrefixInsight()
    seen: list[list[int]] = []
    shared = 0
    for tokens in asked:
        keys = chain(namespace(), tokens, SIZE)
        common = max((_common(tokens, other) for other in seen), default=0)
        insight.observe("m", PrefixBlocks((Chain(keys, len(tokens)),), len(tokens), SIZE))
        added = insight.models["m"].shared_tokens - shared
        shared += added
        assert added <= common
        assert added >= common / 1.5 or common < 64
        seen.append(tokens)


def _common(one: list[int], other: list[int]) -> int:
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return at
    return min(len(one), len(other))
