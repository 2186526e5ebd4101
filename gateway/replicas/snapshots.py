"""What outlives this process in the store: copies of ranks' blocks, and how fast workers are. As bytes, and kept there.

Rules:
1. A value is one version byte and msgpack; another version, or what cannot be read, is as if it were not there.
2. Everything ends by itself: `life_s` after it was written. One replica writes each value in a period, whichever asks
   first (`claim`).
3. Reading and writing have connections of their own, so that megabytes never stand in the way of messages.

Block hashes and keys are as good as random, so compressing them is of no use: 16 bytes a block.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from gateway.kv import FeedPoint, RankBlocks, TierBlocks
from gateway.records import BlockKey, EngineHash
from gateway.replicas.store import open_store
from gateway.store_address import StoreAddress

VERSION: Final = 1
MAX_BYTES: Final = 64 * 1024 * 1024

_HEAD: Final = bytes((VERSION,))
_TIERS: Final = 4


class _Tier(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Hashes and keys, 8 bytes each, little-endian; heads are keys in the same form."""

    hashes: bytes
    keys: bytes
    copies: dict[int, Annotated[int, Meta(ge=1)]]
    heads: dict[int, bytes]


class _Rank(msgspec.Struct, array_like=True, frozen=True, gc=False):
    started_unix: float | None
    seq: Annotated[int, Meta(ge=0)]
    digest: Annotated[int, Meta(ge=0)]
    oldest_ts: float | None
    newest_ts: float | None
    size: Annotated[int, Meta(ge=1)]
    span: Annotated[int, Meta(ge=0)]
    counted: bool
    groups: list[tuple[int | None, bool]]
    kinds: list[tuple[int | None, str]]
    tiers: Annotated[list[_Tier], Meta(min_length=_TIERS, max_length=_TIERS)]


class RankSnapshot(NamedTuple):
    """A rank's blocks at one point of its feed. `started_unix` is the start time its process told, None where it tells
    none."""

    started_unix: float | None
    point: FeedPoint
    blocks: RankBlocks


class Speeds(msgspec.Struct, array_like=True, frozen=True):
    """Learned numbers (`PoolRates.learned`, `Slowdown.learned`): by model, and by `worker_key`."""

    pools: dict[str, list[float]]
    workers: dict[int, list[float]]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode_rank: Final = msgspec.msgpack.Decoder(_Rank).decode
_decode_speeds: Final = msgspec.msgpack.Decoder(Speeds).decode


def encode_rank(snapshot: RankSnapshot) -> bytes:
    """The copy as bytes: about 50 ns a block, for a thread."""
    point, blocks = snapshot.point, snapshot.blocks
    tiers = [
        _Tier(
            _pack(tier.held),
            _pack(tier.held.values()),
            {int(name): count for name, count in tier.copies.items()},
            {name: _pack(keys) for name, keys in tier.heads.items()},
        )
        for tier in blocks.tiers
    ]
    return _HEAD + _encode(
        _Rank(
            snapshot.started_unix,
            point.seq,
            point.digest,
            point.oldest_ts,
            point.newest_ts,
            blocks.size,
            blocks.span,
            blocks.counted,
            list(blocks.groups.items()),
            list(blocks.kinds.items()),
            tiers,
        )
    )


def decode_rank(value: bytes | None) -> RankSnapshot | None:
    """The copy in these bytes; None when they are none of ours."""
    if value is None or len(value) > MAX_BYTES or value[:1] != _HEAD:
        return None
    try:
        rank = _decode_rank(memoryview(value)[1:])
        tiers = tuple(
            TierBlocks(
                dict(zip(map(EngineHash, _unpack(tier.hashes)), map(BlockKey, _unpack(tier.keys)), strict=True)),
                {EngineHash(name): count for name, count in tier.copies.items()},
                {EngineHash(name): tuple(map(BlockKey, _unpack(keys))) for name, keys in tier.heads.items()},
            )
            for tier in rank.tiers
        )
    except (ValueError, RecursionError):  # msgspec's are ValueErrors
        return None
    return RankSnapshot(
        rank.started_unix,
        FeedPoint(rank.seq, rank.digest, rank.oldest_ts, rank.newest_ts),
        RankBlocks(rank.size, rank.span, rank.counted, dict(rank.groups), dict(rank.kinds), tiers),
    )


def encode_speeds(speeds: Speeds) -> bytes:
    """Learned numbers as bytes."""
    return _HEAD + _encode(speeds)


def decode_speeds(value: bytes | None) -> Speeds | None:
    """Learned numbers in these bytes; None when they are none of ours."""
    if value is None or len(value) > MAX_BYTES or value[:1] != _HEAD:
        return None
    try:
        return _decode_speeds(memoryview(value)[1:])
    except (ValueError, RecursionError):
        return None


class Shelf:
    """Values by name in the store. Every method raises what `STORE_ERRORS` names."""

    def __init__(self, address: StoreAddress, *, prefix: str, life_s: float) -> None:
        self._address = address
        self._prefix = prefix
        self._life_s = life_s

    async def get(self, name: str) -> bytes | None:
        """The value; None when there is none."""
        async with asyncio.timeout(2 * self._address.timeout_s), open_store(self._address) as client:
            value = await client.get(f"{self._prefix}:{name}")
            return bytes(value) if value is not None else None  # type: ignore[arg-type]

    async def put(self, name: str, value: bytes) -> None:
        """Write it; it ends after its life."""
        async with asyncio.timeout(4 * self._address.timeout_s), open_store(self._address) as client:
            await client.set(f"{self._prefix}:{name}", value, px=int(self._life_s * 1000))

    async def claim(self, name: str, period_s: float) -> bool:
        """True for the first who asks in a period."""
        async with asyncio.timeout(2 * self._address.timeout_s), open_store(self._address) as client:
            return bool(await client.set(f"{self._prefix}:{name}:claim", b"1", px=int(period_s * 1000), nx=True))


def rank_name(worker: int, rank: int) -> str:
    """Where the copy of a rank of a worker (`worker_key`) is."""
    return f"blocks:{worker:016x}:{rank}"


SPEEDS_NAME: Final = "speeds"


def _pack(numbers: Iterable[int] | Mapping[EngineHash, BlockKey]) -> bytes:
    packed = array("Q", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(packed: bytes) -> array[int]:
    numbers = array("Q", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
