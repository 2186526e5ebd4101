"""Speculative blocks: what a worker was sent but has not announced yet.

Siblings of a new prefix arrive before its first event; without these entries each of them would be sent elsewhere.

Rules:
1. A speculation belongs to one decision and holds keys for one worker; the same key may be held by several, and is
   dropped with the last.
2. Only keys beyond the worker's confirmed run are entered: a block the worker has announced needs no promise, and
   a promise would keep it alive in the index after the worker evicted it.
3. Events never touch this table, and it never touches the masks of events: a block that was confirmed stays when the
   speculation goes, and one that was removed is still promised until it goes.
4. How long a speculation lives is the router's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import repeat

from gateway.kv.overlap import run_of
from gateway.records import BlockKey


class Speculation:
    """The handle of one decision's speculative blocks; give it back to `KvIndex.retract`."""

    __slots__ = ("_bit", "_keys")

    def __init__(self, bit: int, keys: list[BlockKey]) -> None:
        self._bit = bit
        self._keys = keys

    @property
    def blocks(self) -> int:
        """Keys it holds; 0 once it was retracted."""
        return len(self._keys)

    def take(self) -> tuple[int, list[BlockKey]]:
        """The worker's bit and the keys; empties the handle."""
        keys, self._keys = self._keys, []
        return self._bit, keys


class SpeculativeBlocks:
    """Masks of workers by promised key. At most `limit` keys are held; what does not fit is left out and counted."""

    __slots__ = ("_again", "_limit", "_live", "held", "masks", "truncated")

    def __init__(self, limit: int) -> None:
        self.masks: dict[BlockKey, int] = {}
        self.held = 0
        self.truncated = 0
        self._limit = limit
        self._again: dict[int, Counter[BlockKey]] = {}
        """By worker's bit: promises of a key beyond the first."""
        self._live: dict[int, set[Speculation]] = {}

    def promise(self, bit: int, keys: list[BlockKey], *, distinct: bool) -> Speculation:
        """Enter `keys` for the worker with this bit; `distinct` says that none of them comes twice."""
        room = self._limit - self.held
        if len(keys) > room:
            self.truncated += len(keys) - max(room, 0)
            keys = keys[: max(room, 0)]
        masks = self.masks
        if distinct and masks.keys().isdisjoint(keys):
            masks.update(zip(keys, repeat(bit)))
        else:
            self._promise_each(bit, keys)
        self.held += len(keys)
        speculation = Speculation(bit, keys)
        if keys:
            self._live.setdefault(bit, set()).add(speculation)
        return speculation

    def _promise_each(self, bit: int, keys: list[BlockKey]) -> None:
        masks = self.masks
        again = self._again.get(bit) or Counter[BlockKey]()
        # A sibling's blocks begin with the same keys: those are counted without a look at each.
        known = run_of(keys, bit, masks)
        again.update(keys[:known])
        promised_to = masks.get
        for key in keys[known:]:
            mask = promised_to(key, 0)
            if mask & bit:
                again[key] += 1
            else:
                masks[key] = mask | bit
        if again:
            self._again[bit] = again

    def retract(self, speculation: Speculation) -> None:
        """Take a speculation's keys out; doing it again changes nothing."""
        bit, keys = speculation.take()
        if not keys:
            return
        live = self._live[bit]
        live.discard(speculation)
        if not live:
            del self._live[bit]
        self.held -= len(keys)
        self._remove(bit, keys)

    def retract_all(self, bit: int) -> None:
        """The worker with this bit is gone: its speculations end, so that the bit can be given to another."""
        for speculation in list(self._live.get(bit, ())):
            self.retract(speculation)

    def _remove(self, bit: int, keys: Iterable[BlockKey]) -> None:
        masks = self.masks
        again = self._again.get(bit) or Counter[BlockKey]()
        for key in keys:
            if key in again:
                left = again[key] - 1
                if left:
                    again[key] = left
                else:
                    del again[key]
                continue
            mask = masks[key]
            if mask == bit:
                del masks[key]
            else:
                masks[key] = mask ^ bit
        if not again:
            self._again.pop(bit, None)
