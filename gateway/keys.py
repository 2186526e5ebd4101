"""Block keys: our own chained hash over token ids, shared by the prefix and the index.

    key(i) = XXH3-64( key(i-1) as 8 bytes little-endian || tokens of block i as u32 little-endian )
    key(-1) = namespace seed = XXH3-64( length-prefixed adapter, salt )

Rules:
1. The same (adapter, salt, tokens) give the same key everywhere: a request's blocks and a worker's announced blocks
   are equal exactly when the tokens before and in them are. 64 bits: with 10 million blocks a false match has a
   chance below 1 in 300,000 over the whole index, and its price is one wrong prediction, never a wrong answer.
2. A block with a token above 32 bits (multimodal pad values) is hashed as u64 with a marker byte, so it cannot
   meet a u32 block.
3. What else an engine puts into a block's hash (multimodal identities) is mixed in by `with_extra`.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError

from xxhash import xxh3_64_intdigest

from gateway.pausing import let_others_run
from gateway.records import BlockKey

_WIDE = b"\xff"
_BIG_ENDIAN = sys.byteorder == "big"
_TURN = 1024
"""Blocks hashed between two chances for other threads: some 0.2 ms."""


def namespace(adapter: str | None = None, salt: str | None = None) -> BlockKey:
    """Seed of every chain of one adapter and cache salt; absent and empty parts differ.

    The model is no part of it: a pool asks for its own workers only (`docs/adr/0001-keys-without-model.md`).
    """
    parts = bytearray()
    for part in (adapter, salt):
        if part is None:
            parts += b"\x00"
        else:
            raw = part.encode("utf-8", "surrogatepass")
            parts += b"\x01" + len(raw).to_bytes(8, "little") + raw
    return BlockKey(xxh3_64_intdigest(bytes(parts)))


def chain(seed: BlockKey, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `tokens` that follow the block (or namespace) `seed`.

    A rest shorter than `block_size` is left out. Raises ValueError for a negative token or one above 64 bits, TypeError
    for what is no number.
    """
    if len(tokens) == block_size:  # engines that do not merge events: half the time of what follows
        try:
            return [digest(packer(block_size)(seed, *tokens))]
        except StructError:
            pass  # wide or no token ids at all: what follows tells
    try:
        raw = _u32(tokens)
    except OverflowError:
        return _chain_wide(seed, tokens, block_size)
    return chain_of_bytes(seed, raw, 4 * block_size)


def chain_of_bytes(seed: BlockKey, raw: bytes, size: int) -> list[BlockKey]:
    """`chain` over tokens that are given as u32 little-endian, in blocks of `size` bytes; also for other bytes."""
    keys: list[BlockKey] = []
    append = keys.append
    parent: int = seed
    end, turn = len(raw) // size * size, _TURN * size
    for first in range(0, end, turn):
        if first:
            let_others_run()
        for start in range(first, min(first + turn, end), size):
            parent = xxh3_64_intdigest(parent.to_bytes(8, "little") + raw[start : start + size])
            append(parent)  # type: ignore[arg-type]  # NewType call per block would cost 60 ns
    return keys


def with_extra(key: BlockKey, extra: bytes) -> BlockKey:
    """Key of a block whose content also depends on `extra` (canonical bytes of multimodal identities)."""
    return BlockKey(xxh3_64_intdigest(key.to_bytes(8, "little") + b"\xfe" + extra))


digest: Callable[[bytes], BlockKey] = xxh3_64_intdigest  # type: ignore[assignment]  # a NewType call costs 60 ns
"""Key of a block from what `packer` packs."""


@lru_cache(maxsize=64)
def packer(block_size: int) -> Callable[..., bytes]:
    """Packs the parent's key and the tokens of one block, `pack(parent, *tokens)`. It raises `struct.error` where a
    token is above 32 bits or none at all: `chain` tells which."""
    return Struct(f"<Q{block_size}I").pack


def _u32(tokens: Sequence[int]) -> bytes:
    ids = array("I", tokens)
    if _BIG_ENDIAN:
        ids.byteswap()
    return ids.tobytes()


def _chain_wide(seed: BlockKey, tokens: Sequence[int], block_size: int) -> list[BlockKey]:
    keys: list[BlockKey] = []
    parent: int = seed
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        try:
            raw = _u32(block)
        except OverflowError:
            try:
                raw = _WIDE + b"".join(int.to_bytes(t, 8, "little") for t in block)
            except OverflowError as error:
                raise ValueError("token ids are whole numbers from 0 to 2**64 - 1") from error
        parent = xxh3_64_intdigest(parent.to_bytes(8, "little") + raw)
        keys.append(BlockKey(parent))
    return keys
