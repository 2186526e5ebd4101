"""Index: ingest rate, time of a lookup, memory per resident block. No sockets; times are CPU of the process.

Where the Python of an environment with ai-dynamo-runtime is given, its radix tree does the same work in the same run
(`benchmarks.radix_peer`). `run` and `lookups` return figures; printing and comparing is the caller's business.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from benchmarks.radix_peer import BLOCK_SIZE, CELLS, CHAIN, INGESTED, RESIDENT, chains, cpu_us, held_prompt
from gateway.keys import chain, namespace
from gateway.kv.events import KvBatch, Stored, decode_batch
from gateway.kv.index import KvIndex
from gateway.records import Chain, EngineHash, PrefixBlocks, Slot, Tier


def run(*, repeats: int = 5, peer: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Figures by name; the unit is the end of the name. Rates and times are the best of `repeats`."""
    figures = {
        "ingest_one_block_events_blocks_per_s": _ingest(1, repeats),
        "ingest_merged_events_blocks_per_s": _ingest(CHAIN, repeats),
        **_overlap(),
        "memory_own_blocks_bytes_per_block": _memory(workers=1, blocks=RESIDENT, same=False),
        "memory_common_blocks_bytes_per_block": _memory(workers=4, blocks=22_016, same=True),
    }
    if peer is not None:
        figures |= {
            "dynamo_ingest_one_block_events_blocks_per_s": peer["ingest_one_block"],
            "dynamo_ingest_merged_events_blocks_per_s": peer["ingest_merged"],
            "dynamo_memory_own_blocks_bytes_per_block": peer["memory_bytes_per_block"],
        }
    return figures


def lookups(*, peer: Mapping[str, Any] | None = None) -> dict[str, dict[str, object]]:
    """Microseconds of one lookup by length of the prompt and size of the fleet; every worker holds another length of
    the prompt. The prompt's keys are given: hashing is the same work on both sides and measured in `prefix`."""
    rows: dict[str, dict[str, object]] = {}
    for tokens, workers in CELLS:
        took = _lookup(tokens, workers)
        row: dict[str, object] = {"kvgate_us": took}
        if peer is not None:
            beside = float(peer["lookup_us"][f"{tokens} {workers}"])
            row |= {"dynamo_us": beside, "ratio": took / beside}
        rows[f"{tokens:,} tokens, {workers} workers"] = row
    return rows


def _lookup(tokens: int, workers: int) -> float:
    prompt, lengths = held_prompt(tokens, workers)
    index = KvIndex()
    rng = random.Random(1)
    for slot, length in enumerate(lengths):
        index.bind(Slot(slot), block_size=BLOCK_SIZE)
        names = [EngineHash(rng.getrandbits(64)) for _ in range(length)]
        index.apply(Slot(slot), 0, [Stored(names, None, prompt[: length * BLOCK_SIZE], BLOCK_SIZE)])
    blocks = _blocks(prompt)
    slots, mask = [Slot(slot) for slot in range(workers)], (1 << workers) - 1

    def look_up() -> list[int]:
        return index.overlap(blocks, mask).tokens_of(slots)

    if look_up() != [length * BLOCK_SIZE for length in lengths]:
        raise AssertionError("the index did not take every block")
    return cpu_us(look_up)


def payloads(blocks: int, per_event: int, *, seed: int, events_per_batch: int = 8) -> list[bytes]:
    """Batches as vLLM encodes them: chains of 512 blocks, `per_event` blocks an event."""
    events = []
    for names, tokens in chains(blocks, seed=seed):
        for first in range(0, CHAIN, per_event):
            last = first + per_event
            events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": names[first:last],
                    "parent_block_hash": names[first - 1] if first else None,
                    "token_ids": tokens[first * BLOCK_SIZE : last * BLOCK_SIZE],
                    "block_size": BLOCK_SIZE,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * per_event,
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }
            )
    step = events_per_batch if per_event == 1 else 1
    return [msgspec.msgpack.encode([1.0, events[at : at + step], 0]) for at in range(0, len(events), step)]


def _blocks(tokens: list[int]) -> PrefixBlocks:
    return PrefixBlocks((Chain(chain(namespace(), tokens, BLOCK_SIZE), len(tokens)),), len(tokens), BLOCK_SIZE)


def _fill(index: KvIndex, slot: int, messages: list[bytes]) -> None:
    for message in messages:
        batch = decode_batch(message)
        if isinstance(batch, KvBatch):
            index.apply(Slot(slot), 0, batch.events)


def _ingest(per_event: int, repeats: int) -> float:
    messages = payloads(INGESTED, per_event, seed=1)
    best = float("inf")
    for _ in range(repeats):
        index = KvIndex()
        index.bind(Slot(0), block_size=BLOCK_SIZE)
        began = time.process_time()
        _fill(index, 0, messages)
        best = min(best, time.process_time() - began)
        if index.resident(Slot(0), Tier.GPU) != INGESTED:
            raise AssertionError("the index did not take every block")
    return INGESTED / best


def _overlap() -> dict[str, float]:
    workers = 64
    tokens = [random.Random(2).randrange(150_000) for _ in range(512 * BLOCK_SIZE + 1)]
    prompt = _blocks(tokens)
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
        found[f"overlap_512_blocks_64_workers_{label}_us"] = cpu_us(overlap)
        if holders < workers:
            found["speculate_and_retract_512_blocks_us"] = cpu_us(partial(_come_and_go, index, prompt))
            for slot in range(holders, workers):
                index.speculate(Slot(slot), prompt)
            found["overlap_512_blocks_64_workers_speculative_us"] = cpu_us(overlap)
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


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name:56} {value:>14,.1f}")
    for label, row in lookups().items():
        print(label, row)
