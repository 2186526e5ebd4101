"""KV events of a simulated engine as bytes: the payload of one batch, in the forms vLLM and SGLang releases send.

vLLM (0.9 to 0.33): array `[unix seconds, [events], rank]`; an event is a map with the key `type` (from 0.24 on) or an
array with the type first and trailing defaults cut off. Hashes are unsigned; a removal on GPU names one block. A block
that went to the tier below is told without tokens (`OffloadingConnector`: its last block's hash, block size 0).

SGLang (0.4.8 to 0.5.23): the same envelope. Arrays up to 0.5.19: without `medium` up to 0.5.8, trailing defaults cut
off up to 0.5.16; maps from 0.5.20 on, with `cache_salt`, and `lora_name` from 0.5.22 on. Hashes are signed. One event a
page up to 0.5.17, then runs of pages that follow each other, in stores and removals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.records import Tier
from gateway.sim.releases import Release

_VLLM_MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU"}
_SGLANG_MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU_PINNED"}


class Encoding(StrEnum):
    """Form of an event: `map` from vLLM 0.24 and SGLang 0.5.20 on, `array` before."""

    MAP = "map"
    ARRAY = "array"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """`hashes[i]` names tokens `[i * block_size : (i + 1) * block_size]` of `token_ids`; `extra_keys` has one entry a
    block (adapter name, cache salt in the prompt's first block), None where there is nothing beside the tokens; it is
    vLLM's, `salt` and `session` are SGLang's."""

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_size: int
    adapter: str | None = None
    extra_keys: Sequence[Sequence[str] | None] | None = None
    tier: Tier = Tier.GPU
    salt: str | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are gone from one tier, in this order."""

    hashes: Sequence[int]
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block of every medium is gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def encode_batch(events: Sequence[Event], *, unix_s: float, rank: int, encoding: Encoding) -> bytes:
    """The payload of one batch of vLLM."""
    array = encoding is Encoding.ARRAY
    wire: list[object] = []
    for event in events:
        match event:
            case BlockStored():
                wire += _vllm_stored(event, array=array)
            case BlockRemoved():
                wire += [_vllm_removed(block, _VLLM_MEDIA[event.tier], array=array) for block in event.hashes]
            case AllBlocksCleared():
                wire.append(_cleared(array=array))
    return msgspec.msgpack.encode([unix_s, wire, rank])


def _cleared(*, array: bool) -> object:
    return ["AllBlocksCleared"] if array else {"type": "AllBlocksCleared"}


def _vllm_stored(event: BlockStored, *, array: bool) -> list[object]:
    medium = _VLLM_MEDIA[event.tier]
    if event.tier is not Tier.GPU:
        return [_vllm_placeholder(block, medium, array=array) for block in event.hashes]
    lora_id = 1 if event.adapter is not None else None
    hashes, tokens = list(event.hashes), list(event.token_ids)
    extra = event.extra_keys if event.extra_keys is not None else [None] * len(hashes)
    if array:
        row = ["BlockStored", hashes, event.parent, tokens, event.block_size, lora_id, medium, event.adapter]
        return [row if event.extra_keys is None else [*row, extra]]
    return [
        {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": event.parent,
            "token_ids": tokens,
            "block_size": event.block_size,
            "lora_id": lora_id,
            "medium": medium,
            "lora_name": event.adapter,
            "extra_keys": extra,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]


def _vllm_placeholder(block: int, medium: str, *, array: bool) -> object:
    if array:
        return ["BlockStored", [block], None, [], 0, None, medium, None]
    return {
        "type": "BlockStored",
        "block_hashes": [block],
        "parent_block_hash": None,
        "token_ids": [],
        "block_size": 0,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "group_idx": 0,
    }


def _vllm_removed(block: int, medium: str, *, array: bool) -> object:
    if array:
        return ["BlockRemoved", [block], medium]
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": medium, "group_idx": 0}


def encode_sglang_batch(
    events: Sequence[Event], *, unix_s: float, rank: int | None, release: Release, encoding: Encoding | None = None
) -> bytes:
    """The payload of one batch of SGLang; `encoding` None is the release's own."""
    if encoding is None:
        encoding = Encoding.MAP if release >= (0, 5, 20) else Encoding.ARRAY
    array = encoding is Encoding.ARRAY
    wire: list[object] = []
    for event in events if release >= (0, 5, 18) else _pages(events):
        match event:
            case BlockStored():
                wire.append(_sglang_array(event, release) if array else _sglang_map(event, release))
            case BlockRemoved(hashes=hashes, tier=tier):
                medium = [_SGLANG_MEDIA[tier]] if release >= (0, 5, 9) else []
                row = ["BlockRemoved", list(hashes), *medium]
                wire.append(row if array else dict(zip(("type", "block_hashes", "medium"), row, strict=True)))
            case AllBlocksCleared():
                wire.append(_cleared(array=array))
    return msgspec.msgpack.encode([unix_s, wire, rank])


def _pages(events: Sequence[Event]) -> list[Event]:
    """One event a page."""
    pages: list[Event] = []
    for event in events:
        match event:
            case BlockStored(hashes=hashes, block_size=size):
                parents = [event.parent, *hashes]
                pages += [
                    BlockStored([page], parents[i], event.token_ids[i * size : (i + 1) * size], size, tier=event.tier)
                    for i, page in enumerate(hashes)
                ]
            case BlockRemoved(hashes=hashes):
                pages += [BlockRemoved([page], event.tier) for page in hashes]
            case _:
                pages.append(event)
    return pages


def _sglang_array(event: BlockStored, release: Release) -> object:
    row: list[object] = ["BlockStored", list(event.hashes), event.parent, list(event.token_ids), event.block_size, None]
    return [*row, _SGLANG_MEDIA[event.tier]] if release >= (0, 5, 9) else row


def _sglang_map(event: BlockStored, release: Release) -> object:
    fields: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": list(event.hashes),
        "parent_block_hash": event.parent,
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "lora_id": None,
        "medium": _SGLANG_MEDIA[event.tier],
    }
    if event.salt is not None:
        fields["cache_salt"] = event.salt
    if event.session is not None:
        fields["session_id"] = event.session
    if event.adapter is not None and release >= (0, 5, 22):
        fields["lora_name"] = event.adapter
    return fields
