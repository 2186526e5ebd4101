"""Events in pieces that can be applied one at a time, so that a long one leaves turns to others.

Rules:
1. A piece costs about `most` usual blocks at most. A store becomes several stores, each the child of the one before; a
   removal becomes several removals.
2. A large payload is not decoded at once either: events are decoded as they are taken, and of a long store the token
   ids of one piece at a time. What is done at once is to skip over its bytes (half a nanosecond each) and to decode its
   hashes.
3. An event counts once, with its first piece.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from gateway.kv.events import (
    STORED_POSITIONS,
    ForeignMessage,
    KvEvent,
    Removed,
    Stored,
    decode_batch,
    read_event,
)

LARGE_BYTES: Final = 128 * 1024
"""Payloads, and events, above this are decoded in pieces: some 2 ms at once."""

# A block of more tokens counts as several: up to 4 keys of 16 tokens in each are as cheap as one of 64.
_BLOCK_TOKENS: Final = 64

_FOR_EACH_BLOCK: Final = ("extra_keys", "block_mm_infos")
"""Fields with one entry a block."""

_decode: Final = msgspec.msgpack.Decoder().decode
_decode_outer: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_fields: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode

_BROKEN: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, LookupError)


def cost(event: Stored | Removed) -> int:
    """What applying it costs, in usual blocks: large ones may stand for many keys each."""
    blocks = len(event.hashes)
    return blocks if isinstance(event, Removed) else max(blocks, len(event.tokens) // _BLOCK_TOKENS)


def pieces(events: Iterable[KvEvent], *, most: int, kinds: Counter[str]) -> Iterator[KvEvent]:
    """Events in pieces; `kinds` counts them as `stored`, `removed` and `cleared`."""
    for event in events:
        kind = type(event)
        if kind is Stored:
            kinds["stored"] += 1
        elif kind is Removed:
            kinds["removed"] += 1
        else:
            kinds["cleared"] += 1
            yield event
            continue
        if cost(event) > most:  # type: ignore[arg-type]  # `type(...) is` does not narrow
            yield from in_pieces(event, most)
        else:
            yield event


def large_pieces(
    payload: bytes, *, most: int, kinds: Counter[str], skipped: Counter[str]
) -> Iterator[KvEvent] | ForeignMessage:
    """The events of a large payload in pieces, each decoded when it is taken. `skipped` counts what is left out, by the
    word for it (see `KvBatch.skipped`). Raises MalformedMessage as `decode_batch` does, before the first event."""
    try:
        events = _decode_outer(_decode_outer(payload)[1])
    except _BROKEN:
        batch = decode_batch(payload)  # says what it is
        if isinstance(batch, ForeignMessage):
            return batch
        skipped.update(batch.skipped)
        return pieces(batch.events, most=most, kinds=kinds)
    return _taken(events, most, kinds, skipped)


def _taken(events: list[msgspec.Raw], most: int, kinds: Counter[str], skipped: Counter[str]) -> Iterator[KvEvent]:
    for raw in events:
        uncounted: Counter[str] = kinds
        for part in _decoded(raw, most):
            if type(part) is str:
                skipped[part] += 1
                break
            yield from pieces([part], most=most, kinds=uncounted)  # type: ignore[list-item]  # as above
            uncounted = Counter()


def _decoded(raw: msgspec.Raw, most: int) -> Iterator[KvEvent | str]:
    """One event, a long store in pieces; a word in place of what is left out."""
    store = _LongStore.of(raw) if len(memoryview(raw)) > LARGE_BYTES else None
    if store is not None:
        yield from store.pieces(most)
        return
    try:
        plain = _decode(raw)
    except _BROKEN:
        yield "malformed"
        return
    yield read_event(plain)


class _LongStore:
    """A store of which all is decoded but its token ids."""

    __slots__ = ("_fields", "_hashes", "_size", "_tokens")

    def __init__(self, fields: dict[str, Any], hashes: list[Any], size: int, tokens: _TokenIds) -> None:
        self._fields = fields
        self._hashes = hashes
        self._size = size
        self._tokens = tokens

    @classmethod
    def of(cls, raw: msgspec.Raw) -> _LongStore | None:
        """None when it is no store, or does not tell where a block begins: that is for others to judge."""
        try:
            told = _fields_of(raw)
            if told is None or "token_ids" not in told or "block_hashes" not in told:
                return None
            tokens = _TokenIds(memoryview(told.pop("token_ids")))
            fields = {name: _decode(value) for name, value in told.items()}
        except _BROKEN:
            return None
        hashes, size = fields.pop("block_hashes"), fields.get("block_size")
        if type(hashes) is not list or type(size) is not int or not hashes or size < 1:
            return None
        each = [fields[name] for name in _FOR_EACH_BLOCK if fields.get(name)]
        if tokens.left != len(hashes) * size or any(len(entries) != len(hashes) for entries in each):
            return None
        return cls(fields, hashes, size, tokens)

    def pieces(self, most: int) -> Iterator[KvEvent | str]:
        """Stores of at most so many usual blocks; a word ends them where the rest cannot be read."""
        hashes, size = self._hashes, self._size
        blocks = max(1, most // max(1, size // _BLOCK_TOKENS))
        for start in range(0, len(hashes), blocks):
            part = hashes[start : start + blocks]
            tokens = self._tokens.take(len(part) * size)
            if tokens is None:
                yield "malformed"
                return
            told = self._fields | {"block_hashes": part, "token_ids": tokens}
            for name in _FOR_EACH_BLOCK:
                if told.get(name):
                    told[name] = told[name][start : start + blocks]
            if start:
                told["parent_block_hash"] = hashes[start - 1]
            event = read_event(told)
            yield event
            if type(event) is str:
                return


def _fields_of(raw: msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """The fields of a store, not decoded; None for other events."""
    first = memoryview(raw)[0]
    if first & 0xF0 == 0x80 or first in (0xDE, 0xDF):
        fields = _decode_fields(raw)
        return fields if _decode(fields["type"]) == "BlockStored" else None
    kind, *values = _decode_outer(raw)
    if _decode(kind) != "BlockStored":
        return None
    return {"type": kind, **dict(zip(STORED_POSITIONS, values, strict=False))}


_WIDTHS: Final = bytes(
    1 if first < 0x80 else {0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9}.get(first, 0) for first in range(256)
)
"""Bytes of a msgpack integer that is not negative, by its first byte; 0 for anything else."""


class _TokenIds:
    """A msgpack array of integers that is decoded from the front, so many at a time. Raises LookupError when it is
    none. `left` says how many there are to come."""

    __slots__ = ("_at", "_view", "left")

    def __init__(self, view: memoryview) -> None:
        first = view[0]
        if first & 0xF0 == 0x90:
            self.left, self._at = first & 0x0F, 1
        elif first == 0xDC:
            self.left, self._at = int.from_bytes(view[1:3], "big"), 3
        elif first == 0xDD:
            self.left, self._at = int.from_bytes(view[1:5], "big"), 5
        else:
            raise LookupError("not an array")
        if not self.left or not _WIDTHS[view[self._at]]:
            raise LookupError("not an array of integers")
        self._view = view

    def take(self, count: int) -> list[int] | None:
        """The next ones; None where something else stands between them."""
        view, widths, begin = self._view, _WIDTHS, self._at
        at = begin
        for _ in range(count):
            width = widths[view[at]]
            if not width:
                return None
            at += width
        self._at = at
        self.left -= count
        tokens: list[int] = _decode(b"\xdd" + count.to_bytes(4, "big") + view[begin:at])
        return tokens


def in_pieces(event: KvEvent, most: int) -> Iterator[KvEvent]:
    """One event cut. A store whose tokens do not tell where a block begins stays whole."""
    match event:
        case Removed(hashes=hashes):
            for start in range(0, len(hashes), most):
                yield msgspec.structs.replace(event, hashes=hashes[start : start + most])
        case Stored(hashes=hashes, tokens=tokens, block_size=size):
            blocks = max(1, most * len(hashes) // max(1, cost(event)))
            if len(hashes) <= blocks or len(tokens) not in (0, len(hashes) * size):
                yield event
                return
            parent = event.parent
            for start in range(0, len(hashes), blocks):
                end = start + blocks
                yield msgspec.structs.replace(
                    event,
                    hashes=hashes[start:end],
                    parent=parent,
                    tokens=tokens[start * size : end * size] if tokens else tokens,
                    extras=None if event.extras is None else event.extras[start:end],
                )
                parent = hashes[min(end, len(hashes)) - 1]
        case _:
            yield event
