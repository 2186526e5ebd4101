"""What a simulated SGLang worker publishes, beside the bytes and the names of pages of real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.records import Tier
from gateway.sim.event_bytes import AllBlocksCleared, BlockRemoved, BlockStored, Event, encode_sglang_batch
from gateway.sim.releases import sglang_names

HERE = Path(__file__).parent
TIERS = {None: Tier.GPU, "GPU": Tier.GPU, "CPU_PINNED": Tier.CPU}

# First release of each form.
FORMS = {
    "sglang_0.4.8_stored_pages": (0, 4, 8),
    "sglang_0.5.6_stored_pages": (0, 5, 6),
    "sglang_0.5.9_stored_medium": (0, 5, 9),
    "sglang_0.5.11_hicache": (0, 5, 11),
    "sglang_0.5.17_full_arrays": (0, 5, 17),
    "sglang_0.5.18_coalesced": (0, 5, 18),
    "sglang_0.5.20_map": (0, 5, 20),
    "sglang_0.5.20_map_salt": (0, 5, 20),
    "sglang_0.5.23_map_lora": (0, 5, 23),
    "sglang_0.5.23_startup": (0, 5, 23),
    "sglang_0.5.23_hicache": (0, 5, 23),
}


def event_of(raw: dict[str, Any]) -> Event:
    if raw["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    tier = TIERS[raw.get("medium")]
    if raw["type"] == "BlockRemoved":
        return BlockRemoved(raw["block_hashes"], tier)
    return BlockStored(
        raw["block_hashes"],
        raw["parent_block_hash"],
        raw["token_ids"],
        raw["block_size"],
        adapter=raw.get("lora_name"),
        tier=tier,
        salt=raw.get("cache_salt"),
        session=raw.get("session_id"),
    )


@pytest.mark.parametrize("name", FORMS)
def test_a_batch_has_the_bytes_of_its_release(name: str) -> None:
    content = json.loads((HERE / "kv_events" / f"{name}.json").read_text())
    batch = content["decoded"]["batch"]
    made = encode_sglang_batch(
        [event_of(raw) for raw in batch["events"]],
        unix_s=batch["ts"],
        rank=batch["attn_dp_rank"],
        release=FORMS[name],
    )
    assert made.hex() == content["frames_hex"][-1]


def captured() -> list[tuple[str, bytes]]:
    rows = [json.loads(line) for line in (HERE / "sglang-0.5.23" / "kv_events.jsonl").read_text().splitlines()]
    return [(row["step"], bytes.fromhex(row["frames"][-1])) for row in rows]


def test_captured_batches_have_the_same_bytes() -> None:
    for step, payload in captured():
        unix_s, events, rank = msgspec.msgpack.decode(payload)
        made = encode_sglang_batch([event_of(raw) for raw in events], unix_s=unix_s, rank=rank, release=(0, 5, 23))
        assert made == payload, step


def test_pages_have_the_names_the_engine_gave_them() -> None:
    """Every captured run that starts at the root, so that its tokens are all there; salted ones too."""
    checked = salted = 0
    for step, payload in captured():
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] != "BlockStored" or event["parent_block_hash"] is not None:
                continue
            salt = event.get("cache_salt")
            names = sglang_names(event["token_ids"], event["block_size"], (0, 5, 23), salt=salt)
            assert names == event["block_hashes"], step
            checked += len(names)
            salted += salt is not None
    assert checked > 400
    assert salted >= 1


def test_page_names_of_other_releases() -> None:
    by_page = json.loads((HERE / "kv_events" / "sglang_0.4.8_stored_pages.json").read_text())
    stored = by_page["decoded"]["batch"]["events"][:2]
    tokens = [token for event in stored for token in event["token_ids"]]
    alone = sglang_names(tokens, 4, (0, 5, 5), salt="tenant-a", adapter="sql")
    assert alone == [event["block_hashes"][0] for event in stored]
    plain = sglang_names(tokens, 4, (0, 5, 17), salt="tenant-a", adapter="sql")
    assert plain == sglang_names(tokens, 4, (0, 5, 6))
    salted = sglang_names(tokens, 4, (0, 5, 18), salt="tenant-a")
    with_adapter = sglang_names(tokens, 4, (0, 5, 23), salt="tenant-a", adapter="sql")
    assert len({*plain, *salted, *with_adapter}) == 6
