"""KV events as engines publish them: ZMQ frames and msgpack payloads to records.

One tolerant decoder serves every vLLM release from 0.9 on, SGLang from 0.4.6 on and the relays that imitate them.

Rules:
1. Payloads are decoded untyped: a field of an unexpected type, an unknown field or an unknown event kind costs at
   most that event, never the batch. What is left out is named in `KvBatch.skipped`.
2. Events are arrays (vLLM up to 0.23, SGLang up to 0.5.19) or maps with `type`; trailing defaults may be cut off.
   Both engines use the same first positions, so one table of positions reads both.
3. Engine hashes are folded to unsigned 64 bits: signed and unsigned integers modulo 2**64, digests by their last
   8 bytes (big-endian), which is what the engines themselves put into integers.
4. Media are folded to a `Tier` without regard to case; no medium means GPU.
5. What an event says about identity besides tokens (adapter, cache salt, multimodal items) is kept, so that blocks
   that differ only there never meet.

The decoder keeps no state: what a cache group is, which parent is known and what counts twice is the index's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from gateway.records import EngineHash, EngineKind, Tier

_TIERS: Final[dict[str | None, Tier]] = {
    None: Tier.GPU,
    "": Tier.GPU,
    "GPU": Tier.GPU,
    "DEVICE": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "CPU_TIER1": Tier.CPU,
    "HOST": Tier.CPU,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.REMOTE,
    "EXTERNAL": Tier.REMOTE,
    "NETWORK": Tier.REMOTE,
    "REMOTE": Tier.REMOTE,
    "SHARED": Tier.REMOTE,
}

# Stores without removals: the storage tiers of vLLM's OffloadingConnector, and, in lower case, LMCache inside the
# engine and Mooncake's connector.
_FLEETING: Final = frozenset({"cpu", "FS", "OBJ", "STORAGE"})

_REMOVES_FROM_STORAGE: Final = "kvcr"
"""Owner of a storage tier that does announce removals."""

_MASK64: Final = 0xFFFF_FFFF_FFFF_FFFF

# Parents that stand for "no parent": 0 is what some simulators send instead of nil; the other is Python's hash of the
# empty tuple, the root of SGLang 0.4.6 and 0.4.7.
_NO_PARENT: Final = frozenset({0, 5740354900026072187})

# First bytes of a batch that may tell its rank: an array of three, and a time in seconds or milliseconds.
_RANKED: Final = frozenset({b"\x93\xcb", b"\x93\xcf"})

_SLIDING_WINDOW: Final = "sliding_window"

_NOTHING_EXTRA: Final = [None]
"""Extra keys of the usual event: one block, none of them."""

_END_MARKER: Final = b"\xff" * 8


class _StoredFields(msgspec.Struct, gc=False):
    """A store as the engines' own types say, in the order of the array form."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    lora_id: Any = None
    medium: Any = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: Any = None


class _WireStored(_StoredFields, tag_field="type", tag="BlockStored", gc=False):
    """What came later is in maps only."""

    cache_salt: str | None = None
    block_mm_infos: list[Any] | None = None
    ownership: Any = None


class _ArrayStored(_StoredFields, array_like=True, tag="BlockStored", gc=False):
    cache_salt: ClassVar[None] = None
    block_mm_infos: ClassVar[None] = None
    ownership: ClassVar[None] = None


class _WireRemoved(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[int | bytes]
    medium: Any = None
    group_idx: int | None = None


class _WireCleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class _ArrayRemoved(_WireRemoved, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _ArrayCleared(_WireCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _MapBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_WireStored | _WireRemoved | _WireCleared]
    rank: Any = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_ArrayStored | _ArrayRemoved | _ArrayCleared]
    rank: Any = None


STORED_POSITIONS: Final = _StoredFields.__struct_fields__
"""Fields of a store in the order of the array form, after its tag."""

_STORED_FIELDS: Final = _WireStored.__struct_fields__
_REMOVED_FIELDS: Final = _WireRemoved.__struct_fields__

_decode_maps: Final = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_arrays: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode
_decode: Final = msgspec.msgpack.Decoder().decode
_encode: Final = msgspec.msgpack.Encoder().encode


class MalformedMessage(ValueError):
    """Frames or a payload that no engine sends; the feed counts it and goes on."""


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks that a rank now holds in one tier.

    `hashes` names consecutive blocks; `parent` the block before the first, None at the start of a prompt. `tokens`
    are the token ids of all of them, empty in placeholder events. `keyed` says that the event itself carries what
    else entered the hashes; `salt` and `extras` are then to be believed when None. `extras` has one entry a block:
    canonical bytes of its multimodal items (see `identity_bytes`), or None; it is None when no block has any.
    `fleeting` says that who announces blocks of this medium never announces that they are gone. `window` is how many
    tokens back a group with a sliding window sees; of the blocks of `tokens` it names those it keeps.
    """

    hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: list[int]
    block_size: int
    tier: Tier = Tier.GPU
    group: int | None = None
    kind: str | None = None
    adapter: str | None = None
    salt: str | None = None
    extras: list[bytes | None] | None = None
    keyed: bool = False
    fleeting: bool = False
    window: int | None = None


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks that a rank no longer holds in one tier (one copy of each, where the engine counts copies)."""

    hashes: list[EngineHash]
    tier: Tier = Tier.GPU
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, gc=False):
    """The rank's cache is empty now, in every tier."""


KvEvent = Stored | Removed | Cleared


class KvBatch(NamedTuple):
    """One message of an engine. `ts` is Unix seconds of the engine's clock; `rank` is None where it is not told.
    `skipped` has one word for each event that was left out: `unknown_kind`, `unknown_medium` or `malformed`."""

    ts: float
    rank: int | None
    events: list[KvEvent]
    skipped: tuple[str, ...] = ()


class ForeignMessage(NamedTuple):
    """Valid msgpack that is no batch of KV events: controller messages, load statistics. `kind` is its own tag."""

    kind: str


class Message(NamedTuple):
    """One multipart message, live or replayed: the publisher's sequence number and the undecoded payload."""

    seq: int
    payload: bytes


def names_prefixes(engine: EngineKind, release: Sequence[int]) -> bool:
    """Whether this release's name of a block stands for everything before it too, as the index needs it.

    SGLang up to 0.5.5 names a page (up to 0.4.7 a tree node) by its own tokens: equal ones at different positions are
    one, and from 0.5.1 on a page in mid-sequence may come without its parent. Placed by such names, blocks would stand
    behind prefixes they never had.
    """
    return engine is not EngineKind.SGLANG or tuple(release) >= (0, 5, 6)


def parse_live(frames: list[bytes]) -> Message:
    """Frames of a SUB socket: topic, sequence (8 bytes, big-endian), payload. Raises MalformedMessage."""
    if len(frames) < 3 or len(frames[-2]) != 8:
        raise MalformedMessage("a live message has three frames: topic, 8-byte sequence, payload")
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])


def parse_reply(frames: list[bytes]) -> Message | None:
    """Frames of a DEALER socket that asked for a replay; None at the end marker. Raises MalformedMessage.

    Both layouts: `[empty, seq, payload]` (vLLM up to 0.25, SGLang up to 0.5.21) and `[empty, topic, seq, payload]`.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise MalformedMessage("a replay reply ends in an 8-byte sequence and a payload")
    if frames[-2] == _END_MARKER:
        return None
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])


def replay_request(from_seq: int) -> list[bytes]:
    """Frames that ask a replay ROUTER for every batch from `from_seq` on. Other shapes get no answer."""
    return [b"", from_seq.to_bytes(8, "big")]


def batch_time(payload: bytes) -> float | None:
    """`ts` of a batch, in Unix seconds, without decoding the rest; None when it does not start like a batch."""
    if len(payload) < 10 or payload[0] & 0xF0 != 0x90:
        return None
    if payload[1] == 0xCB:
        return float(_decode(payload[1:10]))
    return int.from_bytes(payload[2:10], "big") / 1000 if payload[1] == 0xCF else None


def first_number(payload: bytes) -> int:
    """The sequence number a publisher of such batches begins with: 1 for the Mooncake master, known by its whole
    milliseconds, else 0."""
    return 1 if payload[1:2] == b"\xcf" else 0


def batch_rank(payload: bytes) -> int | None:
    """The data-parallel rank of a batch without decoding it; None where it is not told (or above 127)."""
    return payload[-1] if payload[:2] in _RANKED and payload[-1] < 0x80 else None


def decode_batch(payload: bytes) -> KvBatch | ForeignMessage:
    """Decode one payload. Raises MalformedMessage when it is no msgpack or has a shape no known sender uses."""
    batch = _usual(payload)
    if batch is not None:
        return batch
    try:
        raw = _decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"payload is no msgpack: {error}") from error
    if type(raw) is dict:
        return ForeignMessage(str(raw.get("type")))
    if type(raw) is not list or len(raw) < 2:
        raise MalformedMessage("a batch is an array of time, events and rank")
    ts, raw_events = raw[0], raw[1]
    if type(ts) is str:
        return ForeignMessage(ts)
    if type(ts) is int:
        ts = ts / 1000  # the Mooncake master counts milliseconds
    if type(ts) is not float or type(raw_events) is not list:
        raise MalformedMessage("a batch is an array of time, events and rank")
    rank = raw[2] if len(raw) > 2 else None
    events: list[KvEvent] = []
    skipped: list[str] = []
    for raw_event in raw_events:
        event = read_event(raw_event)  # rule 1: whatever is wrong with one, the others still count
        if type(event) is str:
            skipped.append(event)
        else:
            events.append(event)  # type: ignore[arg-type]  # `type(...) is str` does not narrow
    return KvBatch(ts, rank if type(rank) is int else None, events, tuple(skipped))


def _usual(payload: bytes) -> KvBatch | None:
    """The batch, where every event is as the engines' own types say; None for whatever is not: rule 1 judges it event
    by event. Half the time of decoding to plain objects."""
    if payload[1:2] != b"\xcb" or len(payload) < 14:
        return None
    first = payload[11] if payload[10] & 0xF0 == 0x90 else payload[13]
    try:
        batch = _decode_maps(payload) if first & 0xF0 == 0x80 or first == 0xDE else _decode_arrays(payload)
        events: list[KvEvent] = []
        for wire in batch.events:
            event = _of_wire(wire)
            if type(event) is str:
                return None
            events.append(event)  # type: ignore[arg-type]  # `type(...) is str` does not narrow
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError, LookupError):
        return None
    rank = batch.rank
    return KvBatch(batch.ts, rank if type(rank) is int else None, events)


def read_event(raw: Any) -> KvEvent | str:
    """One event, decoded to plain objects before; a word in place of one that is left out (see `KvBatch.skipped`)."""
    try:
        return _event(raw)
    except (TypeError, AttributeError, ValueError, LookupError, RecursionError):
        return "malformed"


def identity_bytes(items: list[Any]) -> bytes:
    """Canonical bytes of a block's multimodal items for `gateway.keys.with_extra`.

    `items` are what vLLM lists in `extra_keys` for the block, adapter and salt taken out: `[identifier, offset]`
    pairs with offset = item start - block start (from 0.20), bare identifiers (0.17 to 0.19), digests of embeddings.
    """
    return _encode(items)


def _event(raw: Any) -> KvEvent | str:
    if type(raw) is not dict:
        kind = raw[0]
        if kind == "BlockStored":
            raw = dict(zip(STORED_POSITIONS, raw[1:], strict=False))
        elif kind == "BlockRemoved":
            raw = dict(zip(_REMOVED_FIELDS, raw[1:], strict=False))
    else:
        kind = raw.get("type")
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind == "BlockStored":
        told = {name: raw[name] for name in _STORED_FIELDS if name in raw}
        tokens = told.get("token_ids")
        if tokens and type(tokens[0]) is list:
            # SGLang with EAGLE-style drafting: pairs of a token and the one after it.
            told["token_ids"] = [pair[0] for pair in tokens]
        return _of_wire(msgspec.convert(told | {"type": kind}, _WireStored))
    if kind == "BlockRemoved":
        told = {name: raw[name] for name in _REMOVED_FIELDS if name in raw}
        return _of_wire(msgspec.convert(told | {"type": kind}, _WireRemoved))
    return "unknown_kind"


def _of_wire(wire: _WireStored | _ArrayStored | _WireRemoved | _WireCleared) -> KvEvent | str:
    if isinstance(wire, _StoredFields):  # first: there are many more of them
        return _of_stored(wire)
    if isinstance(wire, _WireCleared):
        return Cleared()
    medium = wire.medium
    tier = _TIERS.get(medium) or _tier(medium)
    return "unknown_medium" if tier is None else Removed(_fold_all(wire.block_hashes), tier, wire.group_idx)


def _of_stored(wire: _WireStored | _ArrayStored) -> Stored | str:
    medium = wire.medium
    tier = _TIERS.get(medium) or _tier(medium)
    if tier is None:
        return "unknown_medium"
    names: list[Any] = wire.block_hashes
    name = names[0] if len(names) == 1 else None
    hashes: list[Any] = [name & _MASK64] if type(name) is int else _fold_all(names)  # no call for the usual one
    parent: Any = wire.parent_block_hash
    if parent is not None:
        parent = parent & _MASK64 if type(parent) is int else _fold(parent)
        if parent in _NO_PARENT:
            parent = None
    adapter, salt = wire.lora_name, wire.cache_salt
    window = wire.kv_cache_spec_sliding_window
    if window is not None and (wire.kv_cache_spec_kind != _SLIDING_WINDOW or type(window) is not int or window < 1):
        window = None
    extra_keys = wire.extra_keys
    extras = None
    if extra_keys is not None and extra_keys != _NOTHING_EXTRA and any(extra_keys):
        salt, extras = _split_extras(extra_keys, adapter, at_root=parent is None)
        if len(extra_keys) != len(hashes):
            return "malformed"
    items = wire.block_mm_infos
    if items is not None and any(items):  # relayed TensorRT-LLM events
        extras = [None if item is None else _encode(item) for item in items]
        if len(extras) != len(hashes):
            return "malformed"
    return Stored(
        hashes,
        parent,
        wire.token_ids or [],
        wire.block_size or 0,
        tier,
        wire.group_idx,
        wire.kv_cache_spec_kind,
        adapter,
        salt,
        extras,
        extra_keys is not None,
        medium in _FLEETING and wire.ownership != _REMOVES_FROM_STORAGE,
        window,
    )


def _split_extras(
    extra_keys: list[list[Any] | None], adapter: str | None, *, at_root: bool
) -> tuple[str | None, list[bytes | None] | None]:
    """vLLM lists adapter, multimodal items, salt in this order and untagged; the salt in a prompt's first block only.

    A bare string at the end of a first block is taken for the salt. In 0.17 to 0.19 it can be an image's identifier:
    then no request matches the block, which is the safe side.
    """
    salt = None
    extras: list[bytes | None] = []
    for position, entry in enumerate(extra_keys):
        items = list(entry or ())
        if items and items[0] == adapter:
            del items[0]
        if items and position == 0 and at_root and type(items[-1]) is str:
            salt = items.pop()
        extras.append(identity_bytes(items) if items else None)
    return salt, extras if any(extras) else None


def _tier(medium: str | None) -> Tier | None:
    return _TIERS.get(medium.upper() if type(medium) is str else medium)


def _fold(value: Any) -> EngineHash:
    # No call of the NewType: this runs once a block.
    folded: EngineHash = int.from_bytes(value[-8:], "big") if type(value) is bytes else value & _MASK64  # type: ignore[assignment]
    return folded


def _fold_all(values: list[Any]) -> list[EngineHash]:
    if len(values) == 1:
        return [_fold(values[0])]
    try:
        return [value & _MASK64 for value in values]
    except TypeError:
        return [_fold(value) for value in values]
