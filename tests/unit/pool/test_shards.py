"""Shards: even, stable, and the same for everybody."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from gateway.pool import Fleet, FleetSettings, ShardSettings, order
from gateway.pool.shards import assign
from gateway.records import EngineKind, WorkerFacts, WorkerId, WorkerSpec


def names(count: int) -> list[WorkerId]:
    return [WorkerId(f"w{number}") for number in range(count)]


@pytest.mark.parametrize(("workers", "count"), [(64, 4), (65, 4), (67, 4), (17, 8), (1024, 16)])
def test_shards_differ_by_at_most_one_worker(workers: int, count: int) -> None:
    sizes = Counter(assign(names(workers), count).values())
    assert sum(sizes.values()) == workers
    assert set(sizes) == set(range(count))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_the_order_of_the_list_says_nothing() -> None:
    shuffled = names(50)
    Random(3).shuffle(shuffled)
    assert assign(shuffled, 5) == assign(names(50), 5)


def test_one_worker_more_moves_few_others() -> None:
    before, after = assign(names(128), 8), assign(names(129), 8)
    assert sum(before[name] != after[name] for name in before) < 128 // 4


def test_every_shard_is_home_to_its_share_and_a_new_one_takes_only_its_own() -> None:
    rng = Random(5)
    keys = [rng.getrandbits(64) for _ in range(4000)]
    homes = Counter(order(key, 8)[0] for key in keys)
    assert all(350 < homes[shard] < 650 for shard in range(8)), homes
    for key in keys:
        eight, nine = order(key, 8), order(key, 9)
        assert sorted(nine) == list(range(9))
        assert [shard for shard in nine if shard != 8] == eight


def test_a_pool_is_split_when_it_is_large_and_follows_who_is_ready() -> None:
    fleet = Fleet(FleetSettings(sharding=ShardSettings(shards=4, least_workers=4)))
    for name in names(15):
        fleet.add(WorkerSpec(name, f"http://{name}"), WorkerFacts(EngineKind.VLLM, "1", ("m",)), 0.0)
    pool = fleet.pools["m"]
    assert len(pool.shards) == 3  # five workers each, none would have four of four
    assert sorted(len(shard.workers) for shard in pool.shards) == [5, 5, 5]
    assert sum(shard.mask for shard in pool.shards) == pool.mask
    homes = {name: pool.shard_of(name) for name in names(15)}

    gone = pool.shards[0].workers[0]
    fleet.drain(gone.id, 1.0, on=True)
    assert sorted(len(shard.workers) for shard in pool.shards) == [4, 5, 5]
    assert {name: pool.shard_of(name) for name in names(15)} == homes


def test_a_pool_that_has_become_small_is_whole_again() -> None:
    fleet = Fleet(FleetSettings(sharding=ShardSettings(shards=4, least_workers=4)))
    for name in names(8):
        fleet.add(WorkerSpec(name, f"http://{name}"), WorkerFacts(EngineKind.VLLM, "1", ("m",)), 0.0)
    fleet.remove(names(8)[7], 2.0)
    assert not fleet.pools["m"].shards
    assert fleet.pools["m"].shard_of(names(8)[0]) is None
