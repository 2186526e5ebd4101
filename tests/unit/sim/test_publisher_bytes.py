"""Event batches: byte for byte what vLLM 0.32 sent, and readable by the gateway's own decoder in every form."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gateway.kv import events as kv
from gateway.sim.event_bytes import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, Event, encode_batch

GOLDEN = Path(__file__).parents[2] / "golden" / "sim" / "vllm_0.32.0.json"
PAYLOADS = [bytes.fromhex(frames[2]) for frames in json.loads(GOLDEN.read_text())["batches"]]


def event_of(raw: dict[str, object]) -> Event:
    match raw:
        case {
            "type": "BlockStored",
            "block_hashes": list(hashes),
            "token_ids": list(tokens),
            "extra_keys": list(extra),
        }:
            parent = raw["parent_block_hash"]
            assert parent is None or isinstance(parent, int)
            return BlockStored(hashes, parent, tokens, block_size=32, extra_keys=extra)
        case {"type": "BlockRemoved", "block_hashes": list(hashes)}:
            return BlockRemoved(hashes)
    return AllBlocksCleared()


@pytest.mark.parametrize("payload", PAYLOADS)
def test_map_batches_equal_captured_bytes(payload: bytes) -> None:
    unix_s, raw_events, rank = msgspec.msgpack.decode(payload)
    made = encode_batch([event_of(raw) for raw in raw_events], unix_s=unix_s, rank=rank, encoding=Encoding.MAP)
    assert made == payload


@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("salt", [None, "tenant-a"])
def test_the_gateway_reads_every_form(encoding: Encoding, salt: str | None) -> None:
    extra = None if salt is None else [["lora", salt], ["lora"]]
    parent = None if salt is not None else 7  # the salt is in a prompt's first block
    stored = BlockStored([1 << 63, 2], parent, list(range(8)), block_size=4, adapter="lora", extra_keys=extra)
    batch = kv.decode_batch(
        encode_batch([stored, BlockRemoved([7, 8]), AllBlocksCleared()], unix_s=2.5, rank=0, encoding=encoding)
    )
    assert isinstance(batch, kv.KvBatch)
    assert (batch.ts, batch.rank, batch.skipped) == (2.5, 0, ())
    first, *rest = batch.events
    assert isinstance(first, kv.Stored)
    assert (first.hashes, first.parent, first.tokens, first.block_size) == ([1 << 63, 2], parent, list(range(8)), 4)
    assert (first.adapter, first.salt) == ("lora", salt)
    assert [type(event) for event in rest] == [kv.Removed, kv.Removed, kv.Cleared]
