"""Every golden event file decodes to what its engine meant; frames that engines do not send are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.kv.events import (
    Cleared,
    ForeignMessage,
    KvBatch,
    MalformedMessage,
    Removed,
    Stored,
    batch_time,
    decode_batch,
    parse_live,
    parse_reply,
    replay_request,
)
from gateway.records import EngineHash

HERE = Path(__file__).parent
FILES = sorted((HERE / "kv_events").glob("*.json"))
MEDIA = {None: "gpu", "GPU": "gpu", "CPU": "cpu", "CPU_PINNED": "cpu", "cpu": "cpu", "disk": "disk"}
MEDIA |= {"FS": "disk", "STORAGE": "disk", "OBJ": "remote"}


def load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def frames_of(hex_frames: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in hex_frames]


def folded(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, dict):
        return int(value["$bytes_hex"][-16:], 16)
    return int(value) % 2**64


def expected_event(event: dict[str, Any]) -> dict[str, Any]:
    """A decoded event of a golden file in the terms of our records."""
    kind = event["type"]
    if kind == "AllBlocksCleared":
        return {"is": "Cleared"}
    hashes = [folded(value) for value in event["block_hashes"]]
    common = {"hashes": hashes, "tier": MEDIA[event.get("medium")], "group": event.get("group_idx")}
    if kind == "BlockRemoved":
        return {"is": "Removed", **common}
    tokens = [token[0] if isinstance(token, list) else token for token in event["token_ids"] or []]
    parent = folded(event["parent_block_hash"])
    return {
        "is": "Stored",
        **common,
        "parent": None if parent == 5740354900026072187 else parent,
        "tokens": tokens,
        "block_size": event["block_size"] or 0,
        "kind": event.get("kv_cache_spec_kind"),
        "adapter": event.get("lora_name"),
        "window": event.get("kv_cache_spec_sliding_window"),
    }


def found_event(event: Stored | Removed | Cleared) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"is": "Cleared"}
    found = {"is": type(event).__name__, **msgspec.structs.asdict(event)}
    found["tier"] = found["tier"].value
    for name in ("salt", "extras", "keyed", "fleeting"):
        found.pop(name, None)
    return found


def check_batch(payload: bytes, batch: dict[str, Any]) -> None:
    decoded = decode_batch(payload)
    assert isinstance(decoded, KvBatch)
    ts = batch["ts"] if "ts" in batch else batch["timestamp_ms"] / 1000
    assert decoded.ts == ts
    ranks = [batch[name] for name in ("data_parallel_rank", "attn_dp_rank", "dp_rank") if name in batch]
    assert decoded.rank == (ranks[0] if ranks else None)
    assert decoded.skipped == ()
    assert [found_event(event) for event in decoded.events] == [expected_event(event) for event in batch["events"]]


def test_all_files_are_here() -> None:
    assert len(FILES) == 59


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_file(path: Path) -> None:
    content = load(path)
    frames = frames_of(content["frames_hex"])
    decoded = content["decoded"]
    if "batch" in decoded:
        message = parse_reply(frames) if "request_frames_hex" in content else parse_live(frames)
        assert message is not None
        assert message.seq == decoded["seq"]
        check_batch(message.payload, decoded["batch"])
    elif "end" in decoded:
        assert parse_reply(frames) is None
    else:
        kind = decoded.get("load", decoded)["type"]
        assert decode_batch(frames[-1]) == ForeignMessage(kind)


@pytest.mark.parametrize("path", [path for path in FILES if "replay" in path.name], ids=lambda path: path.stem)
def test_replay_dialogue(path: Path) -> None:
    content = load(path)
    request = frames_of(content["request_frames_hex"])
    assert replay_request(int.from_bytes(request[-1], "big")) == request
    for hex_frames, decoded in zip(content["reply_messages_hex"], content["decoded_replies"], strict=True):
        reply = parse_reply(frames_of(hex_frames))
        if decoded.get("end"):
            assert reply is None
        else:
            assert reply is not None
            assert reply.seq == decoded["seq"]
            check_batch(reply.payload, decoded["batch"])


@pytest.mark.parametrize("path", [path for path in FILES if "scenario" in path.name], ids=lambda path: path.stem)
def test_scenario_messages(path: Path) -> None:
    content = load(path)
    for hex_frames, decoded in zip(content["messages_hex"], content["decoded_messages"], strict=True):
        message = parse_live(frames_of(hex_frames))
        assert message.seq == decoded["seq"]
        check_batch(message.payload, decoded["batch"])


def stored(name: str) -> list[Stored]:
    batch = decode_batch(bytes.fromhex(load(HERE / "kv_events" / f"{name}.json")["frames_hex"][-1]))
    assert isinstance(batch, KvBatch)
    return [event for event in batch.events if isinstance(event, Stored)]


def test_salt_is_taken_from_both_engines() -> None:
    for name in ("vllm_0.17_stored_extra_keys", "vllm_0.32_map_salt", "sglang_0.5.20_map_salt"):
        event = stored(name)[0]
        assert (event.salt, event.extras) == ("tenant-a", None), name


def test_multimodal_items_are_kept_apart_from_the_adapter() -> None:
    adapter, images = stored("vllm_0.33_map_lora_mm")
    assert (adapter.adapter, adapter.salt, adapter.extras) == ("sql-adapter", None, None)
    item = "a3f1c0de" * 8
    assert images.extras is not None
    assert [msgspec.msgpack.decode(extra or b"") for extra in images.extras] == [[[item, 2]], [[item, -2]]]


def test_relayed_trtllm_events_carry_items_salt_and_adapter() -> None:
    (event,) = stored("trtllm_relay_stored")
    assert (event.adapter, event.salt) == ("sql-adapter", "tenant-a")
    assert event.extras is not None
    assert len(event.extras) == 2


def test_only_events_with_extra_keys_are_keyed() -> None:
    assert stored("vllm_0.30_map_session")[0].keyed
    assert not stored("vllm_0.33_offload_self_describing")[0].keyed
    assert not stored("vllm_0.14_stored_lora")[0].keyed


def test_media_that_are_never_told_to_be_empty() -> None:
    fleeting = {path.stem for path in FILES for event in _stores(path) if event.fleeting}
    assert fleeting == {
        "vllm_0.33_mooncake_store",
        "vllm_0.33_lmcache",
        "vllm_0.26_map_locality",
        "vllm_0.27_map_storage",
        "mooncake_master_stored",
    }


def _stores(path: Path) -> list[Stored]:
    content = load(path)
    if "batch" not in content["decoded"]:
        return []
    batch = decode_batch(frames_of(content["frames_hex"])[-1])
    return [event for event in batch.events if isinstance(event, Stored)] if isinstance(batch, KvBatch) else []


@pytest.mark.parametrize("capture", ["vllm-0.32.0", "vllm-0.32.0/kv-bytes-sha256_cbor", "vllm-0.16.0", "sglang-0.5.23"])
def test_live_capture_decodes(capture: str) -> None:
    rows = [json.loads(line) for line in (HERE / capture / "kv_events.jsonl").read_text().splitlines()]
    sequence = []
    for row in rows:
        message = parse_live(frames_of(row["frames"]))
        batch = decode_batch(message.payload)
        raw = msgspec.msgpack.decode(message.payload)
        assert isinstance(batch, KvBatch)
        assert (batch.skipped, len(batch.events)) == ((), len(raw[1]))
        assert batch_time(message.payload) == batch.ts == raw[0]
        sequence.append(message.seq)
    assert sequence == list(range(sequence[0], sequence[0] + len(rows)))


@pytest.mark.parametrize("capture", ["vllm-0.32.0", "vllm-0.16.0", "sglang-0.5.23"])
def test_live_replay_parses(capture: str) -> None:
    ends = 0
    for line in (HERE / capture / "kv_replay.jsonl").read_text().splitlines():
        row = json.loads(line)
        reply = parse_reply(frames_of(row["frames"]))
        if reply is None:
            ends += 1
        else:
            assert reply.seq >= row["start"]
            assert isinstance(decode_batch(reply.payload), KvBatch)
    assert ends == 3


GOOD = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({**GOOD, "type": "BlockMoved"}, "unknown_kind"),
        (["BlockMoved", [1]], "unknown_kind"),
        ({"no": "type"}, "unknown_kind"),
        ({**GOOD, "medium": "TAPE"}, "unknown_medium"),
        ({**GOOD, "medium": 7}, "unknown_medium"),
        ({**GOOD, "block_hashes": [None]}, "malformed"),
        ({**GOOD, "block_hashes": None}, "malformed"),
        ({**GOOD, "block_hashes": "ab"}, "malformed"),
        ({**GOOD, "parent_block_hash": 1.5}, "malformed"),
        ({**GOOD, "token_ids": 3}, "malformed"),
        ({**GOOD, "token_ids": "ab"}, "malformed"),
        ({**GOOD, "token_ids": {"a": 1}}, "malformed"),
        ({**GOOD, "block_size": "2"}, "malformed"),
        ({**GOOD, "group_idx": [0]}, "malformed"),
        ({**GOOD, "lora_name": 1}, "malformed"),
        ({**GOOD, "cache_salt": b"salt"}, "malformed"),
        ({**GOOD, "kv_cache_spec_kind": 3}, "malformed"),
        ({**GOOD, "extra_keys": [["salt"], None]}, "malformed"),
        ({**GOOD, "extra_keys": 5}, "malformed"),
        ({**GOOD, "medium": ["GPU"]}, "malformed"),
        ([], "malformed"),
        (5, "malformed"),
        (None, "malformed"),
        ({"type": "BlockRemoved"}, "malformed"),
        (["BlockRemoved"], "malformed"),
        ({"type": "BlockRemoved", "block_hashes": [1], "group_idx": {}}, "malformed"),
    ],
)
def test_a_strange_event_costs_only_itself(event: Any, reason: str) -> None:
    payload = msgspec.msgpack.encode([1.0, [GOOD, event, ["AllBlocksCleared"]], 0])
    batch = decode_batch(payload)
    assert isinstance(batch, KvBatch)
    assert batch.skipped == (reason,)
    assert batch.events == [Stored([EngineHash(1)], None, [1, 2], 2), Cleared()]


def test_unknown_fields_and_longer_arrays_are_ignored() -> None:
    event = ["BlockStored", [-1], 0, [1, 2], 2, None, "gpu", None, None, 0, "full_attention", None, "new", {"x": 1}]
    payload = msgspec.msgpack.encode([1.0, [event, {**GOOD, "future": [1]}], 0, "more"])
    batch = decode_batch(payload)
    assert isinstance(batch, KvBatch)
    assert batch.events == [
        Stored([EngineHash(2**64 - 1)], None, [1, 2], 2, group=0, kind="full_attention"),
        Stored([EngineHash(1)], None, [1, 2], 2),
    ]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\xcb",
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([None, []]),
        msgspec.msgpack.encode([1.0, {}]),
        msgspec.msgpack.encode(7),
        b"\x91" * 100_000,
        b"\x92\xa1\xff\x90",
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_batch(payload)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"\x00" * 8], [b"", b"\x00" * 7, b"x"]])
def test_broken_live_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        parse_live(frames)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b"", b"x"]])
def test_broken_replies_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        parse_reply(frames)


def test_every_truncation_of_a_message_is_refused_or_decoded() -> None:
    payload = bytes.fromhex(load(HERE / "kv_events" / "vllm_0.33_mixed_batch.json")["frames_hex"][-1])
    for length in range(len(payload)):
        with pytest.raises(MalformedMessage):
            decode_batch(payload[:length])
