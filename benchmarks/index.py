"""Index: ingest rate, overlap time, memory per resident block. One core, no sockets.

`run()` returns figures; printing and comparing is the caller's business.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

import msgspec

from gateway.keys import chain, namespace
from gateway.kv.events import KvBatch, Stored, decode_batch
from gateway.kv.index import KvIndex
from gateway.records import Chain, EngineHash, PrefixBlocks, Slot, Tier

BLOCK_SIZE = 16
MODEL = "m"


def run(*, repeats: int = 5) -> dict[str, float]:
    """Figures by name; the unit is the end of the name. Rates and times are the best of `repeats`."""
    return {
        "ingest_one_block_events_blocks_per_s": _ingest(1, repeats),
        "ingest_merged_events_blocks_per_s": _ingest(512, repeats),
        **_overlap(repeats * 40),
        "memory_own_blocks_bytes_per_block": _memory(workers=1, blocks=90_112, same=False),
        "memory_common_blocks_bytes_per_block": _memory(workers=4, blocks=22_016, same=True),
    }


def payloads(blocks: int, per_event: int, *, seed: int, events_per_batch: int = 8) -> list[bytes]:
    """Batches as vLLM encodes them: chains of 512 blocks, `per_event` blocks an event."""
    rng = random.Random(seed)
    events = []
    parent: int | None = None
    for first in range(0, blocks, per_event):
        if first % 512 == 0:
            parent = None
        hashes = [rng.getrandbits(64) for _ in range(per_event)]
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": [rng.randrange(150_000) for _ in range(per_event * BLOCK_SIZE)],
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [None] * per_event,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        parent = hashes[-1]
    step = events_per_batch if per_event == 1 else 1
    return [msgspec.msgpack.encode([1.0, events[at : at + step], 0]) for at in range(0, len(events), step)]


def _fill(index: KvIndex, slot: int, messages: list[bytes]) -> None:
    for message in messages:
        batch = decode_batch(message)
        if isinstance(batch, KvBatch):
            index.apply(Slot(slot), 0, batch.events)


def _ingest(per_event: int, repeats: int) -> float:
    blocks = 51_200
    messages = payloads(blocks, per_event, seed=1)
    best = float("inf")
    for _ in range(repeats):
        index = KvIndex()
        index.bind(Slot(0), block_size=BLOCK_SIZE)
        started = time.perf_counter()
        _fill(index, 0, messages)
        best = min(best, time.perf_counter() - started)
        if index.resident(Slot(0), Tier.GPU) != blocks:
            raise AssertionError("the index did not take every block")
    return blocks / best


def _overlap(repeats: int) -> dict[str, float]:
    workers = 64
    tokens = [random.Random(2).randrange(150_000) for _ in range(512 * BLOCK_SIZE + 1)]
    prompt = PrefixBlocks((Chain(chain(namespace(), tokens, BLOCK_SIZE), len(tokens)),), len(tokens), BLOCK_SIZE)
    everyone = (1 << workers) - 1
    found: dict[str, float] = {}
    for label, holders in (("all_hold", workers), ("few_hold", 4)):
        rng = random.Random(3)
        index = KvIndex()
        for slot in range(workers):
            index.bind(Slot(slot), block_size=BLOCK_SIZE)
            _fill(index, slot, payloads(2_048, 512, seed=10 + slot))
            if slot < holders:
                names = [EngineHash(rng.getrandbits(64)) for _ in range(512)]
                index.apply(Slot(slot), 0, [Stored(names, None, tokens[:-1], BLOCK_SIZE)])
        overlap = partial(index.overlap, prompt, everyone)
        found[f"overlap_512_blocks_64_workers_{label}_us"] = _best(overlap, repeats)
        if holders < workers:
            found["speculate_and_retract_512_blocks_us"] = _best(partial(_come_and_go, index, prompt), repeats)
            for slot in range(holders, workers):
                index.speculate(Slot(slot), prompt)
            found["overlap_512_blocks_64_workers_speculative_us"] = _best(overlap, repeats)
    return found


def _come_and_go(index: KvIndex, prompt: PrefixBlocks) -> None:
    index.retract(index.speculate(Slot(63), prompt))


def _memory(*, workers: int, blocks: int, same: bool) -> float:
    """Traced bytes of the index per (worker, block), all tables included. The numbers of blocks used are just above
    those at which Python's dictionaries grow: the worst case."""
    gc.collect()
    tracemalloc.start()
    try:
        index = KvIndex()
        before = tracemalloc.get_traced_memory()[0]
        for slot in range(workers):
            index.bind(Slot(slot), block_size=BLOCK_SIZE)
            _fill(index, slot, payloads(blocks, 512, seed=1 if same else slot))
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
        resident = sum(index.resident(Slot(slot), Tier.GPU) for slot in range(workers))
        return used / resident
    finally:
        tracemalloc.stop()


def _best(action: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name:56} {value:>14,.1f}")
