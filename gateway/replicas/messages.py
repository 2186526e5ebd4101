"""What replicas tell each other, as bytes: one version byte, then msgpack.

Rules:
1. A message of another version is refused as such, before anything of it is read. Fields are only ever added at the
   end of a record, where older readers leave them out; anything else is a new version.
2. Everything is bounded where it is read: bytes, entries, keys, numbers. A message that breaks a bound is refused as
   a whole; the sender's next full state makes good for it.
3. Workers go by `worker_key`, sessions by their digest: names may differ from replica to replica, and what clients
   call their sessions stays here.
4. Numbers of a message only grow while its replica lives, and so do those of its placements. Times are ages: clocks
   of two machines are never compared.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from xxhash import xxh3_64_intdigest

from gateway.discovery.roster import address_of
from gateway.errors import UNREADABLE
from gateway.records import BlockKey, WorkerSpec

VERSION: Final = 1

MAX_BYTES: Final = 1 << 20
"""A message; well above what `MAX_KEYS` and the other bounds come to."""

MAX_KEYS: Final = 8_192
"""Block keys in a message: applying them takes half a millisecond."""

MAX_OPEN: Final = 20_000
"""Placements of one replica that are open at the same time."""

MAX_CHAINS: Final = 2_048
"""Prompts of one placement."""

MAX_PINS: Final = 2_048
_MAX_WORKERS: Final = 4_096
_MAX_NUMBER: Final = (1 << 64) - 1

_Count = Annotated[int, Meta(ge=0, le=1 << 40)]
_Seconds = Annotated[float, Meta(ge=0, le=1e6)]
_Number = Annotated[int, Meta(ge=0)]
_Pair = tuple[_Number, _Number]


class LoadEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What one replica has on one worker now (`pool.Sent`); `head_age_s` is for how long its head is computed."""

    worker: _Number
    requests: _Count = 0
    pending_s: _Seconds = 0.0
    head_s: _Seconds = 0.0
    head_age_s: _Seconds = 0.0
    tokens: _Count = 0
    kv_tokens: _Count = 0
    queued_kv: _Count = 0
    output_tokens: _Count = 0
    stored_rate: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class ChainEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks of one prompt of `tokens`, from block number `first` on: 8 bytes a key, little-endian."""

    first: Annotated[int, Meta(ge=0, le=1 << 20)]
    tokens: _Count
    keys: Annotated[bytes, Meta(max_length=8 * MAX_KEYS)]


class Keys(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Blocks of `size` tokens each, of token ids or (`text`) of text."""

    text: bool
    size: Annotated[int, Meta(ge=1, le=1 << 20)]
    tokens: _Count
    chains: Annotated[list[ChainEnd], Meta(max_length=MAX_CHAINS)]


class Placement(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request was sent to a worker, which will hold these blocks soon. `learn`: its events do not tell, so once it
    has answered they are taken to be held. Of a prompt whose token ids an engine tells there are two entries."""

    number: _Number
    worker: _Number
    learn: bool
    blocks: Annotated[list[Keys], Meta(max_length=2)]


class Message(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One replica's news, or with `full` all there is: then `loads` are all workers it has anything on, and `open`
    the numbers of all placements whose prefill is not over. `ask`: whoever hears it should tell all of its placements
    again. `leaving`: it ends."""

    replica: _Number
    seq: _Number
    full: bool = False
    ask: bool = False
    leaving: bool = False
    loads: Annotated[list[LoadEntry], Meta(max_length=_MAX_WORKERS)] = []
    placed: Annotated[list[Placement], Meta(max_length=MAX_KEYS)] = []
    prefilled: Annotated[list[_Number], Meta(max_length=MAX_OPEN)] = []
    ended: Annotated[list[_Number], Meta(max_length=MAX_OPEN)] = []
    pins: Annotated[list[_Pair], Meta(max_length=MAX_PINS)] = []
    open: Annotated[list[_Number], Meta(max_length=MAX_OPEN)] = []


class Refused(ValueError):
    """A message that is of no use; `reason` is `version`, `size` or `malformed`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(Message).decode
_HEAD: Final = bytes((VERSION,))


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return _HEAD + _encode(message)


def decode(payload: bytes) -> Message:
    """The message in these bytes. Raises Refused."""
    if len(payload) > MAX_BYTES:
        raise Refused("size")
    if payload[:1] != _HEAD:
        raise Refused("version" if payload else "malformed")
    try:
        message = _decode(memoryview(payload)[1:])
    except UNREADABLE as error:
        raise Refused("malformed") from error
    keys = [chain.keys for placement in message.placed for blocks in placement.blocks for chain in blocks.chains]
    if sum(map(len, keys)) > 8 * MAX_KEYS:
        raise Refused("size")
    if any(len(part) % 8 for part in keys):
        raise Refused("malformed")
    return message


def pack_keys(keys: Sequence[BlockKey]) -> bytes:
    """Keys as 8 bytes each, little-endian."""
    packed = array("Q", keys)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_keys(packed: bytes) -> list[BlockKey]:
    """The keys again; `packed` has a multiple of 8 bytes."""
    keys = array("Q", packed)
    if sys.byteorder == "big":
        keys.byteswap()
    return keys.tolist()  # type: ignore[return-value]  # a new type is the old one at run time


def worker_key(spec: WorkerSpec) -> int:
    """One name of a worker for all replicas: its address, and its rank where it has one. Unsigned 64 bits."""
    rank = "" if spec.rank is None else str(spec.rank.number)
    return xxh3_64_intdigest(f"{address_of(spec)}\n{rank}".encode())
