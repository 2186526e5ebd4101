"""Speculative blocks: what a worker was sent but has not announced yet.

Siblings of a new prefix arrive before its first event; without these entries each of them would be sent elsewhere.

Promised blocks set the worker's bit in the same GPU masks as announced ones, so that an overlap is one look-up a block;
which bits are promises only is kept here.

Rules:
1. Per worker, a key is promised or announced, never both: an announcement ends the promise (`Promises.confirmed`), and
   what is announced already is not promised. So a removal by the engine always ends what the index says.
2. Keys that were promised together form a `Stretch`: consecutive blocks of one chain with one count of the speculations
   that stand on them. A later sibling adds one to the count of each stretch it shares, whatever its length.
3. A speculation covers the blocks behind the worker's announced run: the promised ones at the end of the run, which
   it keeps alive, and the new ones. Promises above an announced block are left to whoever made them.
4. How long a speculation lives is the router's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import groupby, repeat
from operator import or_
from typing import Final

from gateway.records import BlockKey

_ZEROS: Final = repeat(0)


class Stretch:
    """Keys `start`, `start + 1`, ... of one chain and how many speculations stand on them. `rest` is what was split off
    behind: who stood on the whole stands on both. `intact`: none of its keys was announced since."""

    __slots__ = ("intact", "keys", "refs", "rest", "start")

    def __init__(self, keys: list[BlockKey], start: int, refs: int = 1) -> None:
        self.keys = keys
        self.start = start
        self.refs = refs
        self.rest: Stretch | None = None
        self.intact = True


class Promises:
    """What one worker is promised to hold. Lives as long as the worker has its slot; speculations that outlive it find
    it `gone`. `held` counts the keys.

    Decisions need stretches only; which stretch a single key belongs to is needed when events come, and is entered
    then: `_pending` are the stretches not entered yet. A table of keys grows by leaps, and a leap takes longer than
    the rest of a decision.
    """

    __slots__ = ("_by_key", "_ends", "_live", "_pending", "bit", "gone", "held")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.held = 0
        self.gone = False
        self._live: dict[Stretch, None] = {}
        self._ends: dict[BlockKey, Stretch] = {}
        self._pending: dict[Stretch, None] = {}
        self._by_key: dict[BlockKey, Stretch] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._keys()

    def promised(self, key: BlockKey, at: int) -> bool:
        """Whether the key, block number `at` of its chain, is a promise: `in`, but that it enters no stretch."""
        ends = self._ends.get(key)
        if (ends is not None and ends.intact) or key in self._by_key:
            return True
        for stretch in self._pending:
            place = at - stretch.start
            if 0 <= place < len(stretch.keys) and stretch.keys[place] == key:
                return True
        return False

    def get(self, key: BlockKey) -> Stretch | None:
        """The stretch the key is promised in."""
        return self._keys().get(key)

    def ending_at(self, keys: Sequence[BlockKey], end: int) -> Stretch | None:
        """The stretch that holds key `end - 1` of a chain; intact, and with that key as its last."""
        key = keys[end - 1]
        stretch = self._ends.get(key)
        if stretch is None:
            for stretch in self._live:
                at = end - 1 - stretch.start
                if 0 <= at < len(stretch.keys) and stretch.keys[at] == key:
                    break
            else:
                return None
        if not stretch.intact:
            whole = self.get(key)
            if whole is None:
                return None
            stretch = self.mend(whole, key)
        if stretch.keys[-1] != key:
            self.split(stretch, end - stretch.start)
        return stretch

    def add(self, stretch: Stretch) -> None:
        """Its keys have the worker's bit now."""
        self.held += len(stretch.keys)
        self._track(stretch)
        self._pending[stretch] = None

    def confirmed(self, key: BlockKey) -> bool:
        """The worker announced this key. True when it was a promise, which ends."""
        stretch = self._keys().pop(key, None)
        if stretch is None:
            return False
        stretch.intact = False
        self.held -= 1
        return True

    def remove(self, stretch: Stretch) -> list[BlockKey]:
        """Nobody stands on the stretch any more. Returns those of its keys that were still promised."""
        del self._live[stretch]
        if self._ends.get(stretch.keys[-1]) is stretch:
            del self._ends[stretch.keys[-1]]
        keys = stretch.keys
        if stretch in self._pending:
            del self._pending[stretch]
        else:
            if not stretch.intact:
                keys = self._still(stretch, keys)
            for key in keys:
                del self._by_key[key]
        self.held -= len(keys)
        return keys

    def clear(self) -> list[BlockKey]:
        """The worker is gone. Returns every key that was promised."""
        keys = list(self._keys())
        self.gone = True
        self.held = 0
        for table in (self._live, self._ends, self._pending, self._by_key):
            table.clear()
        return keys

    def cut_out(self, stretch: Stretch, keys: Sequence[BlockKey], at: int) -> Stretch:
        """The part of a stretch that begins with `keys[at]` and goes on as `keys` do, as a stretch of its own."""
        if not stretch.intact:
            stretch = self.mend(stretch, keys[at])
        if at > stretch.start:
            stretch = self.split(stretch, at - stretch.start)
        same = 1
        for ours, theirs in zip(keys[at + 1 : at + len(stretch.keys)], stretch.keys[1:], strict=False):
            if ours != theirs:
                break
            same += 1
        if same < len(stretch.keys):
            self.split(stretch, same)
        return stretch

    def mend(self, stretch: Stretch, key: BlockKey) -> Stretch:
        """Split a stretch, some of whose keys were announced, into parts of one kind. Returns the part with `key`."""
        by_key = self._keys()
        mine = [by_key.get(other) is stretch for other in stretch.keys]
        found = stretch
        for promised, group in groupby(mine):
            length = sum(1 for _ in group)
            rest = self.split(stretch, length) if length < len(stretch.keys) else None
            stretch.intact = promised
            if promised and key in stretch.keys:
                found = stretch
            if rest is not None:
                stretch = rest
        return found

    def split(self, stretch: Stretch, at: int) -> Stretch:
        """Split off what lies behind the first `at` keys, and return it."""
        rest = Stretch(stretch.keys[at:], stretch.start + at, stretch.refs)
        rest.rest = stretch.rest
        rest.intact = stretch.intact
        stretch.rest = rest
        stretch.keys = stretch.keys[:at]
        self._track(stretch)
        self._track(rest)
        if stretch in self._pending:
            self._pending[rest] = None
        else:
            moved = rest.keys if rest.intact else self._still(stretch, rest.keys)
            self._by_key.update(zip(moved, repeat(rest)))
        return rest

    def _track(self, stretch: Stretch) -> None:
        self._live[stretch] = None
        self._ends[stretch.keys[-1]] = stretch

    def _still(self, stretch: Stretch, keys: list[BlockKey]) -> list[BlockKey]:
        """Those of `keys` that are promised in `stretch`: the others were announced."""
        by_key = self._by_key
        return [key for key in keys if by_key.get(key) is stretch]

    def _keys(self) -> dict[BlockKey, Stretch]:
        by_key = self._by_key
        if self._pending:
            for stretch in self._pending:
                by_key.update(zip(stretch.keys, repeat(stretch)))
            self._pending.clear()
        return by_key


Part = tuple[Stretch, int]
"""What a speculation stands on: that many keys from the start of a stretch, into its `rest` where it was split."""


class Speculation:
    """The handle of one decision's speculative blocks; give it back to `KvIndex.retract`."""

    __slots__ = ("_parts", "promises")

    def __init__(self, promises: Promises, parts: list[Part]) -> None:
        self.promises = promises
        self._parts = parts

    @property
    def blocks(self) -> int:
        """Keys it covers; 0 once it was retracted."""
        return sum(length for _, length in self._parts)

    @property
    def start(self) -> int | None:
        """Place in its chain of the first block it covers; None when it covers none."""
        return min((stretch.start for stretch, _ in self._parts), default=None)

    def take(self) -> list[Part]:
        """What it stands on; empties the handle."""
        parts, self._parts = self._parts, []
        return parts


class SpeculativeBlocks:
    """Enters promises into the GPU masks and takes them out. A worker is promised at most `limit` keys; what does not
    fit is left out and counted."""

    __slots__ = ("_limit", "_masks", "truncated")

    def __init__(self, masks: dict[BlockKey, int], limit: int) -> None:
        """`masks` are those of the GPU tier."""
        self._masks = masks
        self._limit = limit
        self.truncated = 0

    def promise(
        self, promises: Promises, keys: Sequence[BlockKey], run: int, parts: list[Part], *, first: int = 0
    ) -> None:
        """Cover the chain `keys`, of which the worker has the first `run`, promised ones included; what lies before
        `first` is not known and left alone. What the speculation stands on is added to `parts`."""
        shared = run if promises.held else 0
        while shared > first:
            stretch = promises.ending_at(keys, shared)
            if stretch is None:
                break
            stretch.refs += 1
            parts.append((stretch, len(stretch.keys)))
            # A key names everything before it, so what is before it in the stretch is before it in the chain.
            shared = stretch.start
        fresh = list(keys[run:])
        if not fresh:
            return
        masks, bit = self._masks, promises.bit
        fits = promises.held + len(fresh) <= self._limit
        if fits and masks.keys().isdisjoint(fresh):
            masks.update(zip(fresh, repeat(bit)))
        else:
            held = list(map(masks.get, fresh, _ZEROS))
            if not fits or reduce(or_, held) & bit:
                self._enter_each(promises, keys, run, held, parts)
                return
            masks.update(zip(fresh, map(bit.__or__, held), strict=True))
        stretch = Stretch(fresh, run)
        promises.add(stretch)
        parts.append((stretch, len(fresh)))

    def retract(self, speculation: Speculation) -> None:
        """Take a speculation's keys out; doing it again changes nothing."""
        promises = speculation.promises
        for stretch, length in speculation.take():
            if promises.gone:
                return
            at: Stretch | None = stretch
            while length and at is not None:
                length -= len(at.keys)
                at.refs -= 1
                if not at.refs:
                    self._clear(promises.bit, promises.remove(at))
                at = at.rest

    def retract_all(self, promises: Promises) -> None:
        """The worker is gone: its promises end, so that its bit can be given to another."""
        self._clear(promises.bit, promises.clear())

    def _enter_each(
        self, promises: Promises, keys: Sequence[BlockKey], run: int, held: list[int], parts: list[Part]
    ) -> None:
        """`promise` where the worker has some of what lies behind its run, or where not all of it fits. `held` are the
        masks of `keys[run:]`."""
        masks, bit = self._masks, promises.bit
        at, total = run, len(keys)
        while at < total:
            if held[at - run] & bit:
                stretch = promises.get(keys[at])
                if stretch is None:
                    at += 1  # announced
                    continue
                stretch = promises.cut_out(stretch, keys, at)
                stretch.refs += 1
            else:
                room = self._limit - promises.held
                if room <= 0:
                    self.truncated += sum(not mask & bit for mask in held[at - run :])
                    return
                end = at + 1
                while end < total and end < at + room and not held[end - run] & bit:
                    end += 1
                stretch = Stretch(list(keys[at:end]), at)
                masks.update(zip(stretch.keys, map(bit.__or__, held[at - run : end - run]), strict=True))
                promises.add(stretch)
            parts.append((stretch, len(stretch.keys)))
            at += len(stretch.keys)

    def _clear(self, bit: int, keys: Sequence[BlockKey]) -> None:
        masks = self._masks
        for key in keys:
            mask = masks[key]
            if mask == bit:
                del masks[key]
            else:
                masks[key] = mask ^ bit
