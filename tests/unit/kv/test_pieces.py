"""Long events in pieces: the same blocks as at once, a bounded amount at a time, nothing decoded before its turn."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from gateway.kv import pieces as pieces_module
from gateway.kv.events import Cleared, ForeignMessage, KvEvent, MalformedMessage, Removed, Stored, decode_batch
from gateway.kv.pieces import LARGE_BYTES, cost, large_pieces, pieces
from gateway.records import EngineHash

BLOCKS = 5000
SIZE = 16
MOST = 1000

FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)


def store(**more: Any) -> dict[str, Any]:
    """A long store: token ids of every width, hashes of 64 bits."""
    return {
        "type": "BlockStored",
        "block_hashes": [(number + 1) * 0x9E37_79B9_7F4A_7C15 % 2**64 for number in range(BLOCKS)],
        "parent_block_hash": 77,
        "token_ids": [(1, 200, 60_000, 150_000)[number % 4] + number % 50 for number in range(BLOCKS * SIZE)],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
    } | more


def as_array(event: dict[str, Any]) -> list[Any]:
    return [event["type"], *(event[name] for name in FIELDS)]


def encode(*events: Any) -> bytes:
    payload = msgspec.msgpack.encode([1.0, list(events), 0])
    assert len(payload) > LARGE_BYTES
    return payload


def taken(payload: bytes, most: int = MOST) -> tuple[list[KvEvent], Counter[str], Counter[str]]:
    kinds: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    found = large_pieces(payload, most=most, kinds=kinds, skipped=skipped)
    assert not isinstance(found, ForeignMessage)
    return list(found), kinds, skipped


def joined(parts: list[KvEvent]) -> Stored:
    """The one store that the parts are."""
    stores = [part for part in parts if isinstance(part, Stored)]
    assert len(stores) == len(parts)
    for before, after in itertools.pairwise(stores):
        assert after.parent == before.hashes[-1]
    extras: list[bytes | None] = []
    for part in stores:
        extras += part.extras or [None] * len(part.hashes)
    return msgspec.structs.replace(
        stores[0],
        hashes=[name for part in stores for name in part.hashes],
        tokens=[token for part in stores for token in part.tokens],
        extras=extras if any(extras) else None,
    )


IMAGES = [None if number % 3 else [["image", -number]] for number in range(BLOCKS)]


@pytest.mark.parametrize(
    "event",
    [
        store(),
        store(parent_block_hash=None, extra_keys=[["tenant"], *[None] * (BLOCKS - 1)]),
        store(lora_name="poet", extra_keys=[["poet", *(image or [])] for image in IMAGES]),
        store(block_hashes=[number.to_bytes(32, "big") for number in range(1, BLOCKS + 1)], medium="cpu"),
        store(block_size=64, block_hashes=list(range(1, BLOCKS // 4 + 1))),
    ],
    ids=["plain", "salt", "adapter and images", "digests", "blocks of 64"],
)
@pytest.mark.parametrize("form", [dict, as_array], ids=["map", "array"])
def test_a_long_store_is_the_same_in_pieces(event: dict[str, Any], form: Any) -> None:
    payload = encode(form(event))
    whole = decode_batch(payload)
    assert not isinstance(whole, ForeignMessage)
    parts, kinds, skipped = taken(payload)
    assert len(parts) >= 2
    assert all(cost(part) <= MOST for part in parts if isinstance(part, Stored))
    assert [joined(parts)] == whole.events
    assert kinds == {"stored": 1}
    assert not skipped


def test_token_ids_are_decoded_as_their_piece_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    decode = pieces_module._decode

    def watch(raw: Any) -> Any:
        value = decode(raw)
        if type(value) is list:
            decoded.append(len(value))
        return value

    monkeypatch.setattr(pieces_module, "_decode", watch)
    found = large_pieces(encode(store()), most=MOST, kinds=Counter(), skipped=Counter())
    assert not isinstance(found, ForeignMessage)
    next(found)
    assert sorted(decoded) == [BLOCKS, MOST * SIZE]
    next(found)
    assert sorted(decoded) == [BLOCKS, MOST * SIZE, MOST * SIZE]


def test_pairs_of_tokens_and_stores_that_do_not_add_up_are_judged_at_once() -> None:
    pairs = store(token_ids=[[token, token + 1] for token in store()["token_ids"]])
    for event in (pairs, store(block_size=15), store(block_size=None), store(extra_keys=[None, ["a"]])):
        payload = encode(event)
        whole = decode_batch(payload)
        assert not isinstance(whole, ForeignMessage)
        parts, kinds, skipped = taken(payload)
        assert sum(len(part.hashes) for part in parts if isinstance(part, Stored)) == BLOCKS * len(whole.events)
        assert kinds.total() + skipped.total() == 1
        assert skipped == Counter(whole.skipped)


def test_what_cannot_be_read_costs_its_event_only() -> None:
    strange = store()
    strange["token_ids"][40_000] = "no token"
    after = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    parts, kinds, skipped = taken(encode(strange, store(medium="PAPER"), {"type": "New"}, after))
    assert parts[-1] == Removed([EngineHash(1)])
    assert sum(len(part.hashes) for part in parts if isinstance(part, Stored)) == 2000, "up to the piece that is broken"
    assert kinds == {"stored": 1, "removed": 1}
    assert skipped == {"malformed": 1, "unknown_medium": 1, "unknown_kind": 1}


def test_long_removals_are_cut_and_short_events_are_not() -> None:
    kinds: Counter[str] = Counter()
    events: list[KvEvent] = [
        Removed([EngineHash(name) for name in range(1, 2501)]),
        Cleared(),
        Stored([EngineHash(1)], None, [1] * SIZE, SIZE),
    ]
    found = list(pieces(events, most=MOST, kinds=kinds))
    assert [len(part.hashes) for part in found if isinstance(part, Removed)] == [1000, 1000, 500]
    assert [name for part in found if isinstance(part, Removed) for name in part.hashes] == list(range(1, 2501))
    assert found[3:] == events[1:]
    assert kinds == {"removed": 1, "cleared": 1, "stored": 1}


def test_a_large_payload_that_is_no_batch() -> None:
    foreign = msgspec.msgpack.encode({"type": "load", "text": "x" * LARGE_BYTES})
    assert large_pieces(foreign, most=MOST, kinds=Counter(), skipped=Counter()) == ForeignMessage("load")
    with pytest.raises(MalformedMessage):
        large_pieces(b"\xc1" * LARGE_BYTES, most=MOST, kinds=Counter(), skipped=Counter())
