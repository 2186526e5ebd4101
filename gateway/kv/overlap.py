"""Overlap: how much of a request's prefix each worker holds.

Rules:
1. A worker's run is contiguous from block 0: the blocks on GPU first, announced or promised by a decision
   (speculative), then the blocks in slower tiers that follow. What lies behind a hole is worth nothing.
2. A prompt's last token is always computed, so at most the full blocks of its first `tokens - 1` tokens count, per
   chain. Engines match whole blocks of their own: where one covers several keys, the run is floored to it.

The walks themselves are `runs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

from gateway.kv.runs import Masks, Run, falling_runs, fast_runs, run_of, slow_end, with_promises
from gateway.kv.speculation import Heads
from gateway.kv.tables import TIERS
from gateway.kv.windows import Windows, resumes_at
from gateway.records import BlockKey, PrefixBlocks, PrefixMode, Slot, Tier

_ZEROS: Final = repeat(0)


class Overlaps:
    """What every candidate holds of one request. Read it before the index changes: `confirmed` and `slow` look there.

    A slot that was no candidate, or holds nothing, has 0 everywhere.
    """

    __slots__ = ("_blocks", "_masks", "_prefix", "_slow", "_spans", "_tokens", "_windows")

    def __init__(
        self,
        prefix: PrefixBlocks,
        slots: int,
        *,
        masks: Sequence[Masks],
        heads: Heads,
        slow_slots: int,
        spans: Mapping[Slot, int],
        windows: Windows | None = None,
    ) -> None:
        """`masks` by tier in the order of `TIERS`; `heads` are the speculative keys of all workers; `spans` has only
        workers whose blocks cover several keys; `windows` is there where some worker's model has sliding windows."""
        self._prefix = prefix
        self._masks = masks
        self._spans = spans
        self._windows = windows
        self._blocks: dict[Slot, int] = {}
        self._tokens: dict[Slot, int] = {}
        self._slow: dict[Slot, list[tuple[int, int]]] = {}
        slow_slots &= slots
        runs_of = falling_runs if prefix.mode is PrefixMode.APPROXIMATE else fast_runs
        for keys, tokens in prefix.chains:
            runs = runs_of(keys, slots, masks[0])
            if heads:
                runs = with_promises(keys, runs, slots, masks[0], heads)
            if slow_slots:
                runs = self._extend(keys, runs, slots, slow_slots)
            limit = _usable_blocks(tokens, prefix.block_size)
            self._add(runs, limit)
            if spans or windows is not None:
                self._floor(keys, runs, tokens)

    def tokens(self, slot: Slot) -> int:
        """Tokens the worker need not compute: all tiers, speculative blocks included, capped as in rule 2."""
        return self._tokens.get(slot, 0)

    def tokens_of(self, slots: Sequence[Slot]) -> list[int]:
        """`tokens` of many workers at once, in their order."""
        return list(map(self._tokens.get, slots, _ZEROS))

    def blocks(self, slot: Slot) -> int:
        """Blocks of the index's size in the worker's runs, not capped."""
        return self._blocks.get(slot, 0)

    def run(self, slot: Slot) -> int | None:
        """Blocks of the only chain that the worker's GPU has or was promised; None where that is not known here: of
        several chains, and of workers with slower tiers."""
        return None if self._slow or len(self._prefix.chains) != 1 else self._blocks.get(slot, 0)

    def computing(self, tokens: int) -> int:
        """How many candidates were promised the block that ends the first `tokens` of the only chain, and hold it not
        yet; 0 as soon as one holds it, and for several chains."""
        chains = self._prefix.chains
        if len(chains) != 1:
            return 0
        at = tokens // self._prefix.block_size - 1
        key = chains[0].keys[at]
        having = 0
        for slot, held in self._tokens.items():
            if held >= tokens:
                having |= 1 << slot
        for masks in self._masks:
            if masks and masks.get(key, 0) & having:
                return 0
        return having.bit_count()

    def confirmed(self, slot: Slot) -> int:
        """`tokens` without speculative blocks: what the worker's own events say."""
        bit = 1 << slot
        size = self._prefix.block_size
        tokens = 0
        for keys, length in self._prefix.chains:
            end = slow_end(keys, run_of(keys, bit, self._masks[0]), bit, self._masks[1:])
            tokens += self._resumable(slot, keys, self._usable(slot, end, length)) * size
        return tokens

    def slow(self, slot: Slot) -> Mapping[Tier, int]:
        """The part of `tokens` that lies in slower tiers only, each block in its cheapest; `{}` mostly."""
        found: dict[Tier, int] = {}
        bit = 1 << slot
        for (keys, length), (start, end) in zip(self._prefix.chains, self._slow.get(slot, ()), strict=False):
            for key in keys[start : self._usable(slot, end, length)]:
                for tier, masks in zip(TIERS[1:], self._masks[1:], strict=True):
                    if masks.get(key, 0) & bit:
                        found[tier] = found.get(tier, 0) + self._prefix.block_size
                        break
        return found

    def _add(self, runs: list[Run], limit: int) -> None:
        """The runs of one chain, of which so many blocks are of use."""
        blocks, tokens = self._blocks, self._tokens
        size, several = self._prefix.block_size, len(self._prefix.chains) > 1
        for length, mask in runs:
            usable = (length if length < limit else limit) * size
            if several:
                for slot in _slots_of(mask):
                    blocks[slot] = blocks.get(slot, 0) + length
                    tokens[slot] = tokens.get(slot, 0) + usable
            elif mask & (mask - 1):
                slots = _slots_of(mask)
                blocks.update(dict.fromkeys(slots, length))
                tokens.update(dict.fromkeys(slots, usable))
            else:
                slot = Slot(mask.bit_length() - 1)
                blocks[slot], tokens[slot] = length, usable

    def _extend(self, keys: Sequence[BlockKey], runs: list[Run], slots: int, slow_slots: int) -> list[Run]:
        """Continue the runs of workers with slower tiers; remembers each such worker's (start, end) for `slow`."""
        tiers = [masks for masks in self._masks[1:] if masks]
        extended: list[Run] = []
        started = 0
        for length, mask in runs:
            started |= mask
            rest = mask & ~slow_slots
            if rest:
                extended.append((length, rest))
        for length, mask in [(0, slots & ~started), *runs]:
            for slot in _slots_of(mask & slow_slots):
                end = slow_end(keys, length, 1 << slot, tiers)
                self._slow.setdefault(slot, []).append((length, end))
                if end:
                    extended.append((end, 1 << slot))
        return extended

    def _floor(self, keys: Sequence[BlockKey], runs: list[Run], tokens: int) -> None:
        """Lower what a worker can go on from: to whole blocks of its own, and to where its sliding windows allow it."""
        marked: list[tuple[int, int]] | None = None
        for length, mask in runs:
            for slot in _slots_of(mask):
                windowed = self._windows is not None and slot in self._windows.reaches
                if not windowed and slot not in self._spans:
                    continue
                before = min(length, _usable_blocks(tokens, self._prefix.block_size))
                usable = self._usable(slot, length, tokens)
                if windowed and slot not in self._slow and self._masks[0].get(keys[length - 1], 0) >> slot & 1:
                    if marked is None and self._windows is not None:
                        marked = self._windows.marked(keys)
                    usable = self._resumable(slot, keys, usable, marked)
                self._tokens[slot] -= (before - usable) * self._prefix.block_size

    def _resumable(
        self, slot: Slot, keys: Sequence[BlockKey], usable: int, marked: Sequence[tuple[int, int]] | None = None
    ) -> int:
        windows = self._windows
        if windows is None or slot not in windows.reaches or not usable:
            return usable
        if marked is None:
            marked = windows.marked(keys)
        return resumes_at(marked, slot, usable, reach=windows.reaches[slot], span=self._spans.get(slot, 1))

    def _usable(self, slot: Slot, blocks: int, tokens: int) -> int:
        usable = min(blocks, _usable_blocks(tokens, self._prefix.block_size))
        return usable - usable % self._spans.get(slot, 1)


def _usable_blocks(tokens: int, block_size: int) -> int:
    return max(0, tokens - 1) // block_size


def _slots_of(mask: int) -> list[Slot]:
    if mask.bit_count() > 8:  # by its digits, which costs less for each
        return [Slot(at) for at, digit in enumerate(bin(mask)[:1:-1]) if digit == "1"]
    slots: list[Slot] = []
    while mask:
        low = mask & -mask
        slots.append(Slot(low.bit_length() - 1))
        mask ^= low
    return slots
