"""Which blocks count, and for whom.

Where a case is about what an engine says, the test speaks for the engine; where it is about what an engine does, a
simulated engine does it, and predicted is held against delivered.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gateway.kv.index import DEFAULT_ORPHAN_LIMIT
from gateway.records import Tier
from gateway.sim.event_bytes import Encoding
from gateway.sim.releases import Dialect
from gateway.sim.server import EngineSettings
from tests.integration.rig import fast, rig, until
from tests.integration.truth import (
    BLOCK,
    DIALECTS,
    Answered,
    ask,
    in_step,
    metric,
    predicted,
    prompt,
    removed,
    resident,
    slot,
    stored,
    told,
    warm,
)

P = prompt(1, 12)
NAMES = list(range(1, 13))


# ---------------------------------------------------------------- removals


async def test_a_removal_touches_its_own_worker_only() -> None:
    async with told(2) as (r, events):
        for publisher in events:
            publisher.publish(stored(NAMES, P))
        await until(lambda: resident(r, "w1") == resident(r, "w2") == 12)
        events[0].publish(removed(*NAMES[5:]))
        await until(lambda: resident(r, "w1") == 5)
        assert await predicted(r, P) == {"w1": 5 * BLOCK, "w2": 12 * BLOCK}


async def test_a_removal_touches_its_own_tier_only() -> None:
    async with told() as (r, (events,)):
        events.publish(stored(NAMES, P), stored(NAMES, P, medium="CPU"))
        await until(lambda: resident(r, "w1", Tier.CPU) == 12)
        events.publish(removed(*NAMES[8:]))
        await until(lambda: resident(r, "w1") == 8)
        assert resident(r, "w1", Tier.CPU) == 12
        assert await predicted(r, P) == {"w1": 12 * BLOCK}
        # The medium is folded: `cpu` and `CPU` are one.
        events.publish(removed(*NAMES[10:], medium="cpu"))
        await until(lambda: resident(r, "w1", Tier.CPU) == 10)
        assert await predicted(r, P) == {"w1": 10 * BLOCK}
        events.publish(removed(*NAMES[:8]))
        await until(lambda: resident(r, "w1") == 0)
        assert await predicted(r, P) == {"w1": 10 * BLOCK}


async def test_a_tail_stored_again_without_its_head_gives_nothing() -> None:
    async with told() as (r, (events,)):
        events.publish(stored(NAMES, P))
        await until(lambda: resident(r, "w1") == 12)
        events.publish(removed(*reversed(NAMES)))
        await until(lambda: resident(r, "w1") == 0)
        events.publish(stored(NAMES[4:], P[4 * BLOCK :], NAMES[3]))
        await until(lambda: r.gateway.index.stats().orphans == 8)
        assert await predicted(r, P) == {"w1": 0}
        events.publish(stored(NAMES[:4], P[: 4 * BLOCK]))
        await until(lambda: resident(r, "w1") == 12)
        assert await predicted(r, P) == {"w1": 12 * BLOCK}


async def test_a_second_copy_survives_the_removal_of_the_first() -> None:
    async with told() as (r, (events,)):
        events.publish(stored(NAMES, P))
        events.publish(stored(NAMES[3:6], P[3 * BLOCK : 6 * BLOCK], NAMES[2]))
        events.publish(removed(*NAMES[3:8]))
        await until(lambda: resident(r, "w1") == 10)
        assert await predicted(r, P) == {"w1": 6 * BLOCK}
        events.publish(removed(NAMES[3]))
        await until(lambda: resident(r, "w1") == 9)
        assert await predicted(r, P) == {"w1": 3 * BLOCK}


# ---------------------------------------------------------------- chains and orphans


async def test_a_chain_goes_on_behind_its_last_block() -> None:
    async with told() as (r, (events,)):
        events.publish(stored(NAMES[:8], P[: 8 * BLOCK]))
        events.publish(stored(NAMES[8:], P[8 * BLOCK :], NAMES[7]))
        await until(lambda: resident(r, "w1") == 12)
        assert await predicted(r, P) == {"w1": 12 * BLOCK}


async def test_a_child_alone_predicts_nothing_until_its_head_is_told() -> None:
    """A gateway that began late, at an engine without replay, hears of the child only."""
    async with told(layout="off") as (r, (events,)):
        events.seq = 40
        events.publish(stored(NAMES[8:], P[8 * BLOCK :], NAMES[7]))
        await until(lambda: r.gateway.index.stats().orphans == 4)
        assert await predicted(r, P) == {"w1": 0}
        assert await predicted(r, P[8 * BLOCK :]) == {"w1": 0}, "an unknown parent is not the root"
        assert await metric(r, "kvgate_index_orphans") == 4
        events.publish(stored(NAMES[:8], P[: 8 * BLOCK]))
        await until(lambda: resident(r, "w1") == 12)
        assert await predicted(r, P) == {"w1": 12 * BLOCK}
        assert await metric(r, "kvgate_index_orphans") == 0


async def test_a_hundred_thousand_orphans_are_bounded() -> None:
    orphans = 100_000
    async with told() as (r, (events,)):
        child = P[BLOCK : 2 * BLOCK]
        for first in range(0, orphans, 500):
            events.publish(*(stored([10**6 + n], child, 10**9 + n) for n in range(first, first + 500)))
        stats = r.gateway.index.stats
        await until(lambda: stats().orphans + stats().orphans_dropped == orphans, within_s=60)
        assert stats().orphans <= DEFAULT_ORPHAN_LIMIT
        # The youngest are kept: they become usable with their head. The oldest had to go, which is counted.
        events.publish(stored([10**9 + orphans - 1], P[:BLOCK]))
        await until(lambda: resident(r, "w1") == 2)
        assert await predicted(r, P) == {"w1": 2 * BLOCK}
        assert await metric(r, "kvgate_index_truncated_total") >= orphans - DEFAULT_ORPHAN_LIMIT


# ---------------------------------------------------------------- one system prompt everywhere


@DIALECTS
async def test_sixteen_conversations_behind_one_system_prompt_find_their_workers(dialect: Dialect) -> None:
    system = prompt(50, 64)
    # At the rig's usual speed ten blocks are computed in less time than what the score calls equal.
    async with rig(16, engine=fast(dialect=dialect, speed=2.0)) as r:
        conversations = {e.settings.name: prompt(100 + n, 10, after=system) for n, e in enumerate(r.engines)}
        for engine in r.engines:
            await warm(r, engine, conversations[engine.settings.name])
        await in_step(r)
        answers = await asyncio.gather(
            *(ask(r, prompt(200 + n, 1, after=tokens)) for n, tokens in enumerate(conversations.values()))
        )
        assert [answer.worker for answer in answers] == list(conversations)
        assert {(answer.predicted, answer.delivered) for answer in answers} == {(74 * BLOCK, 74 * BLOCK)}


# ---------------------------------------------------------------- identity


async def again(settings: EngineSettings, first: dict[str, Any], then: dict[str, Any], **gateway: Any) -> Answered:
    """A prompt is warmed with the options `first`, then asked with the options `then`."""
    async with rig(1, engine=settings, settings=gateway) as r:
        await warm(r, r.engines[0], P, **first)
        await until(lambda: r.announced > 0)
        return await ask(r, P, **then)


@DIALECTS
async def test_blocks_of_32_where_16_is_configured(dialect: Dialect) -> None:
    answer = await again(fast(dialect=dialect, block_size=32), {}, {}, models=[{"name": "demo", "block_size": 16}])
    assert answer == ("w1", 12 * BLOCK, 12 * BLOCK)


ENGINES = {
    "vllm, maps": fast(encoding=Encoding.MAP),
    "vllm, arrays": fast(encoding=Encoding.ARRAY),
    "sglang": fast(dialect=Dialect.SGLANG),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("first", "then", "shared"),
    [
        ({}, {}, True),
        ({"model": "sql"}, {"model": "sql"}, True),
        ({"model": "sql"}, {}, False),
        ({}, {"model": "sql"}, False),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({}, {"cache_salt": "a"}, False),
        ({"model": "sql", "cache_salt": "a"}, {"model": "sql", "cache_salt": "a"}, True),
        ({"model": "sql", "cache_salt": "a"}, {"cache_salt": "a"}, False),
    ],
)
async def test_adapters_and_salts(first: dict[str, Any], then: dict[str, Any], shared: bool, engine: str) -> None:
    answer = await again(replace(ENGINES[engine], adapters=("sql",)), first, then)
    assert answer.predicted == answer.delivered == (12 * BLOCK if shared else 0)


@pytest.mark.parametrize(
    ("first", "then", "shared"),
    [
        ({"lora_path": "sql"}, {"lora_path": "sql"}, True),
        ({"lora_path": "sql"}, {"model": "sql"}, True),
        ({"lora_path": "sql"}, {}, False),
        ({}, {"lora_path": "sql"}, False),
    ],
)
async def test_an_adapter_named_beside_the_model(first: dict[str, Any], then: dict[str, Any], shared: bool) -> None:
    answer = await again(replace(ENGINES["sglang"], adapters=("sql",)), first, then)
    assert answer.predicted == answer.delivered == (12 * BLOCK if shared else 0)


async def test_images_are_never_matched_by_their_text() -> None:
    """Blocks that an image entered are held, but no request is taken to have them by its text tokens alone."""
    async with told() as (r, (events,)):
        images: list[list[Any] | None] = [None] * 12
        images[4] = [["a3f1c0de" * 8, 2]]
        events.publish(stored(NAMES, P, extra_keys=images))
        await until(lambda: resident(r, "w1") == 12)
        assert await predicted(r, P) == {"w1": 4 * BLOCK}


def wide(names: list[int]) -> list[bytes]:
    """The names as SHA-256 digests."""
    return [b"\xaa" * 24 + name.to_bytes(8, "big") for name in names]


VARIANTS: dict[str, tuple[list[dict[str, Any]], int]] = {
    "parent 0": ([stored(NAMES, P, 0)], 12),
    "parent null": ([stored(NAMES, P, None)], 12),
    "signed": ([stored([name - 2**63 for name in NAMES], P), stored([99], prompt(9, 1), 12 - 2**63)], 13),
    "bytes": ([stored(wide(NAMES[:8]), P[: 8 * BLOCK]), stored(wide(NAMES[8:]), P[8 * BLOCK :], wide([8])[0])], 12),  # type: ignore[arg-type]
    "bytes removed as integers": ([stored(wide(NAMES), P), removed(*NAMES[6:])], 6),  # type: ignore[arg-type]
    "unknown fields": ([stored(NAMES, P, locality="LOCAL", ownership={"x": [1]}, session_id="s", new=7.5)], 12),
    "unknown events": ([{"type": "BlockMoved", "block_hashes": [1]}, stored(NAMES, P)], 12),
    "sliding window mixed in": (
        [
            stored(NAMES, P, group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(NAMES, P, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=32),
            removed(*NAMES[:10], group_idx=1),
        ],
        12,
    ),
    "only the window is told": (
        [
            stored(NAMES[:6], P[: 6 * BLOCK], group_idx=0, kv_cache_spec_kind="full_attention"),
            stored(NAMES[10:], P[10 * BLOCK :], NAMES[9], group_idx=1, kv_cache_spec_kind="sliding_window"),
        ],
        6,
    ),
    "twice the block size": ([stored(NAMES[:6], P, size=32)], 12),
}


@pytest.mark.parametrize("variant", VARIANTS)
async def test_what_engines_call_their_blocks(variant: str) -> None:
    events, blocks = VARIANTS[variant]
    async with told() as (r, (publisher,)):
        publisher.publish(*events)
        await until(lambda: resident(r, "w1") == blocks)
        assert await predicted(r, P) == {"w1": min(blocks, 12) * BLOCK}


async def test_a_size_that_cannot_be_matched_is_named() -> None:
    """Blocks of 24 in keys of 16: no hit can be found, and metrics and status say why."""
    async with told() as (r, (publisher,)):
        publisher.publish(stored(NAMES[:8], P, size=24))
        ignored = {"worker": "w1", "reason": "block_size"}
        await until(lambda: r.gateway.index.stats().ignored[slot(r, "w1")].get("block_size") == 8)
        assert await predicted(r, P) == {"w1": 0}
        assert await metric(r, "kvgate_kv_blocks_ignored_total", **ignored) == 8
        (row,) = (await r.admin("/admin/workers"))["workers"]
        assert row["feed"]["ignored"] == {"block_size": 8}
