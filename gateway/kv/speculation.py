"""Speculative blocks: what a worker was sent but has not announced yet.

Siblings of a new prefix arrive before its first event; without these entries each of them would be sent elsewhere.

A promise is kept as a whole, not block by block: keys are chained, so whether a prompt goes on as a promise does is one
comparison at its end. So a decision that sends 500 new blocks somewhere costs as much as one that sends five, and the
masks, whose tables grow by leaps, hold only what was announced or learned.

Rules:
1. Per worker, a key is in one promise at most. An announcement ends the promise of its key (`Promises.confirm`), and so
   does a removal: a removal by the engine always ends what the index says.
2. Keys that were promised together form a `Stretch`: consecutive blocks of one chain with one count of the speculations
   that stand on them. A later sibling adds one to the count of each stretch it shares, whatever its length.
3. The first key of a stretch is not announced. So where a worker's announced run ends, the stretch that goes on from
   there is found by that key (`Heads`). Keys inside may be announced too, where something was evicted before them.
4. A speculation covers the blocks behind the worker's announced run: the promised ones at the end of the run, which
   it keeps alive, and the new ones. Promises above an announced block are left to whoever made them.
5. How long a speculation lives is the router's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from sys import getsizeof
from typing import Final, overload

from gateway.records import BlockKey

_KEY_BYTES: Final = 40  # a Python int and its place in a list

_NO_KEY: Final = BlockKey(-1)

_LOOKED_AT: Final = 32  # keys compared in one go at either end; then twice as many


class ChainTail(Sequence[BlockKey]):
    """A chain of which only the end is known, from block `first` on. What lies before is no key: they are unsigned."""

    __slots__ = ("_first", "_keys")

    def __init__(self, first: int, keys: Sequence[BlockKey]) -> None:
        self._first = first
        self._keys = keys

    def __len__(self) -> int:
        return self._first + len(self._keys)

    @overload
    def __getitem__(self, at: int) -> BlockKey: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BlockKey]: ...
    def __getitem__(self, at: int | slice) -> BlockKey | Sequence[BlockKey]:
        first = self._first
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if start >= first and step == 1:
                return self._keys[start - first : max(start, stop) - first]
            return [self[number] for number in range(start, stop, step)]
        if at < 0:
            at += len(self)
        if not 0 <= at < len(self):
            raise IndexError(at)
        return self._keys[at - first] if at >= first else _NO_KEY


class Stretch:
    """What one worker (`bit`) is promised of one chain: its blocks from number `start` to `end`, and how many
    speculations stand on them. `rest` is what was split off behind: who stood on the whole stands on both.

    `chain` are the keys of the chain from block `base` on: the request's own list, or where most of that is not
    promised a copy of the part that is. It is never changed, so that a split copies nothing, and the garbage
    collector, which looks at every entry of a list, has no list more.
    """

    __slots__ = ("base", "bit", "chain", "end", "refs", "rest", "start")

    def __init__(self, bit: int, chain: Sequence[BlockKey], base: int, start: int, end: int, refs: int = 1) -> None:
        self.bit = bit
        self.chain = chain
        self.base = base
        self.start = start
        self.end = end
        self.refs = refs
        self.rest: Stretch | None = None

    @property
    def first(self) -> BlockKey:
        """Its first key."""
        return self.chain[self.start - self.base]

    @property
    def last(self) -> BlockKey:
        """Its last key."""
        return self.chain[self.end - self.base - 1]

    @property
    def keys(self) -> Sequence[BlockKey]:
        """All of them."""
        return self.chain[self.start - self.base : self.end - self.base]

    def goes_with(self, keys: Sequence[BlockKey], at: int, *, same: int = 1) -> int:
        """The number of the block where it ends or the chain `keys`, whose block `at` is its first, leaves it. Its
        first `same` keys are known to be the chain's. A key names all before it, so that a few comparisons tell."""
        chain, shift = self.chain, self.start - self.base - at
        most = min(at + self.end - self.start, len(keys))
        if keys[most - 1] == chain[shift + most - 1]:
            return most
        low, high = at + same, most - 1
        while low < high:
            middle = (low + high) >> 1
            if keys[middle] == chain[shift + middle]:
                low = middle + 1
            else:
                high = middle
        return low

    def number_of(self, key: BlockKey) -> int:
        """The number of the block with this key, which is one of its own. Looked for from both ends, so that keys taken
        out one by one, in whatever order, cost little more than their number."""
        chain, front, back, width = self.chain, self.start - self.base, self.end - self.base, _LOOKED_AT
        while front + 2 * width < back:
            for at in (front, back - width):
                part = chain[at : at + width]
                if key in part:
                    return self.base + at + part.index(key)
            front, back, width = front + width, back - width, 2 * width
        return self.base + chain.index(key, front, back)


Heads = dict[BlockKey, list[Stretch]]
"""All workers' stretches by their first keys."""


class Promises:
    """What one worker is promised to hold. Lives as long as the worker has its slot; speculations that outlive it find
    it `gone`. `held` counts the keys.

    Decisions need stretches only; which stretch a single key belongs to is needed when events come, and is entered
    then: `_pending` are the stretches not entered yet.
    """

    __slots__ = ("_by_key", "_ends", "_heads", "_live", "_masks", "_pending", "_starts", "bit", "gone", "held")

    def __init__(self, bit: int, heads: Heads, masks: Mapping[BlockKey, int]) -> None:
        """`masks` are those of the GPU tier, `heads` are changed."""
        self.bit = bit
        self.held = 0
        self.gone = False
        self._heads = heads
        self._masks = masks
        self._starts: dict[int, dict[Stretch, None]] = {}
        """The stretches there are, by the number of their first block: most begin where others do."""
        self._ends: dict[BlockKey, Stretch] = {}
        self._pending: dict[Stretch, None] = {}
        self._by_key: dict[BlockKey, Stretch] = {}

    @property
    def bytes(self) -> int:
        """What they take, about."""
        return _KEY_BYTES * self.held + getsizeof(self._by_key)

    def __contains__(self, key: object) -> bool:
        return key in self._keys()

    def ending_at(self, keys: Sequence[BlockKey], end: int, *, first: int = 0) -> Stretch | None:
        """The stretch that ends with key `end - 1` of a chain, split off if need be; None when that is no promise. What
        is known of the chain begins at `first`."""
        key = keys[end - 1]
        if self._masks.get(key, 0) & self.bit:
            return None
        stretch = self._ends.get(key)
        if stretch is None:
            stretch = self.covering(keys, end - 1, first=first)
            if stretch is not None:
                self._split(stretch, end)
        return stretch

    def covering(self, keys: Sequence[BlockKey], at: int, *, first: int = 0) -> Stretch | None:
        """The stretch that holds key `at` of a chain, anywhere; keys of the chain before `first` are not known."""
        if first:
            # Others may begin where nothing is known of this chain, and there may be thousands.
            holder = self._keys().get(keys[at])
            known = holder is not None and holder.start <= at < holder.end
            return holder if known and holder is not None and holder.chain[at - holder.base] == keys[at] else None
        for start in self._starts:
            if start <= at:
                # By its first key: of one worker at most one has it.
                for stretch in self._heads.get(keys[start], ()):
                    if stretch.bit == self.bit and at < stretch.end and stretch.chain[at - stretch.base] == keys[at]:
                        return stretch
        return None

    def behind(self, keys: Sequence[BlockKey], run: int) -> list[Stretch]:
        """The stretches on the way of a chain that the worker's run of `run` blocks does not reach, in their order:
        mostly none."""
        found: list[Stretch] = []
        # Where the run was not asked for (`KvIndex.overlap` hides workers), one may begin right at its end.
        starts, total = self._starts, len(keys)
        if total - run < len(starts):
            there = [start for start in range(run, total) if start in starts]
        else:
            there = sorted([start for start in starts if run <= start < total])
        for start in there:
            found += [stretch for stretch in self._heads.get(keys[start], ()) if stretch.bit == self.bit]
        return found

    def add(self, stretch: Stretch) -> None:
        """Its keys are promised now."""
        self.held += stretch.end - stretch.start
        self._pending[stretch] = None
        self._track(stretch)

    def confirm(self, keys: Sequence[BlockKey]) -> None:
        """The worker has announced these, or has removed them: they are no promises any more."""
        by_key = self._keys()
        if by_key.keys().isdisjoint(keys):
            return
        at, total = 0, len(keys)
        while at < total:
            stretch = by_key.get(keys[at])
            if stretch is None:
                at += 1
            elif stretch.first == keys[at]:
                end = stretch.goes_with(keys, at)
                self._trim(stretch, end - at)
                at = end
            else:
                self._split(stretch, stretch.number_of(keys[at]))

    def confirm_one(self, key: BlockKey) -> None:
        """`confirm` of one block, for engines that announce them so: mostly the next one of a stretch."""
        by_key = self._keys() if self._pending else self._by_key
        stretch = by_key.get(key)
        if stretch is None:
            return
        start = stretch.start
        if start + 1 == stretch.end or stretch.chain[start - stretch.base] != key:
            self.confirm((key,))
            return
        self._unlead(stretch)
        self._move(stretch)
        del by_key[key]
        self.held -= 1
        stretch.start = start = start + 1
        here = self._starts.get(start)
        if here is None:
            self._starts[start] = {stretch: None}
        else:
            here[stretch] = None
        self._lead(stretch)

    def remove(self, stretch: Stretch) -> None:
        """Nobody stands on the stretch any more."""
        if stretch.start == stretch.end:
            return  # all its keys were announced
        self._unlead(stretch)
        self.held -= stretch.end - stretch.start
        if stretch not in self._pending:
            for key in stretch.keys:
                del self._by_key[key]
        self._forget(stretch)

    def clear(self) -> None:
        """The worker is gone."""
        for here in self._starts.values():
            for stretch in here:
                self._unlead(stretch)
        self.gone = True
        self.held = 0
        for table in (self._starts, self._ends, self._pending, self._by_key):
            table.clear()

    def part(self, stretch: Stretch, keys: Sequence[BlockKey]) -> None:
        """Split off what of a stretch on the way of this chain lies beyond it."""
        end = stretch.goes_with(keys, stretch.start)
        if end < stretch.end:
            self._split(stretch, end)

    def _split(self, stretch: Stretch, at: int) -> None:
        """Split off what lies from block `at` on, if anything does."""
        if at == stretch.end:
            return
        rest = Stretch(self.bit, stretch.chain, stretch.base, at, stretch.end, stretch.refs)
        rest.rest = stretch.rest
        stretch.rest = rest
        stretch.end = at
        self._ends[stretch.last] = stretch
        if stretch in self._pending:
            self._pending[rest] = None
        else:
            self._by_key.update(zip(rest.keys, repeat(rest)))
        self._track(rest)

    def _track(self, stretch: Stretch) -> None:
        self._ends[stretch.last] = stretch
        self._starts.setdefault(stretch.start, {})[stretch] = None
        self._lead(stretch)

    def _lead(self, stretch: Stretch) -> None:
        """Have it found by its first key that is not announced (rule 3)."""
        first = stretch.first
        if self._masks.get(first, 0) & self.bit:
            masks, bit, chain = self._masks, self.bit, stretch.chain
            at, end = stretch.start - stretch.base + 1, stretch.end - stretch.base
            while at < end and masks.get(chain[at], 0) & bit:
                at += 1
            self._shorten(stretch, at + stretch.base - stretch.start)
            if at == end:
                return
            first = chain[at]
        here = self._heads.get(first)
        if here is None:
            self._heads[first] = [stretch]
        else:
            here.append(stretch)

    def _unlead(self, stretch: Stretch) -> None:
        first = stretch.first
        here = self._heads[first]
        if len(here) == 1:
            del self._heads[first]
        else:
            here.remove(stretch)

    def _trim(self, stretch: Stretch, count: int) -> None:
        """Its first `count` keys are no promises any more."""
        self._unlead(stretch)
        self._shorten(stretch, count)
        if stretch.start < stretch.end:
            self._lead(stretch)

    def _shorten(self, stretch: Stretch, count: int) -> None:
        if stretch not in self._pending:
            by_key, at = self._by_key, stretch.start - stretch.base
            for key in stretch.chain[at : at + count]:
                del by_key[key]
        self.held -= count
        if count == stretch.end - stretch.start:
            self._forget(stretch)
            stretch.start = stretch.end
            return
        self._move(stretch)
        stretch.start += count
        self._starts.setdefault(stretch.start, {})[stretch] = None

    def _forget(self, stretch: Stretch) -> None:
        self._move(stretch)
        del self._ends[stretch.last]
        self._pending.pop(stretch, None)

    def _move(self, stretch: Stretch) -> None:
        """It begins elsewhere, or is no more."""
        here = self._starts[stretch.start]
        del here[stretch]
        if not here:
            del self._starts[stretch.start]

    def _keys(self) -> dict[BlockKey, Stretch]:
        by_key = self._by_key
        if self._pending:
            for stretch in self._pending:
                by_key.update(zip(stretch.keys, repeat(stretch)))
            self._pending.clear()
        return by_key


Part = tuple[Stretch, int]
"""What a speculation stands on: a stretch, and what was split off from it, up to this number of a block."""


class Speculation:
    """The handle of one decision's speculative blocks; give it back to `KvIndex.retract`. `blocks` are the keys it
    covered when it was made, 0 once it was retracted; `start` is the place in its chain of the first, None when it
    covered none."""

    __slots__ = ("_parts", "blocks", "promises", "start")

    def __init__(self, promises: Promises | None, parts: list[Part]) -> None:
        self.promises = promises
        self._parts = parts
        self.blocks = 0
        self.start: int | None = None
        for stretch, end in parts:
            start = stretch.start
            self.blocks += end - start
            if self.start is None or start < self.start:
                self.start = start

    def take(self) -> list[Part]:
        """What it stands on; empties the handle."""
        parts, self._parts, self.blocks = self._parts, [], 0
        return parts


class SpeculativeBlocks:
    """Makes promises and takes them back. A worker is promised at most `limit` keys; what does not fit is left out and
    counted."""

    __slots__ = ("_limit", "heads", "truncated")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.heads: Heads = {}
        self.truncated = 0

    def promise(
        self, promises: Promises, keys: Sequence[BlockKey], run: int, parts: list[Part], *, first: int = 0
    ) -> None:
        """Cover the chain `keys`, of which the worker has the first `run`, promised ones included; what lies before
        `first` is not known and left alone. What the speculation stands on is added to `parts`."""
        shared = run if promises.held else 0
        while shared > first:
            stretch = promises.ending_at(keys, shared, first=first)
            if stretch is None:
                break
            stretch.refs += 1
            parts.append((stretch, shared))
            # A key names everything before it, so what is before it in the stretch is before it in the chain.
            shared = stretch.start
        at = run
        if promises.held:
            for stretch in promises.behind(keys, run):
                self._enter(promises, keys, at, stretch.start, parts)
                promises.part(stretch, keys)
                stretch.refs += 1
                at = stretch.end
                parts.append((stretch, at))
        self._enter(promises, keys, at, len(keys), parts)

    def retract(self, speculation: Speculation) -> None:
        """Take a speculation's keys out; doing it again changes nothing."""
        promises = speculation.promises
        for stretch, end in speculation.take():
            if promises is None or promises.gone:
                return
            at: Stretch | None = stretch
            while at is not None and at.start < end:
                at.refs -= 1
                if not at.refs:
                    promises.remove(at)
                at = at.rest

    def _enter(self, promises: Promises, keys: Sequence[BlockKey], at: int, end: int, parts: list[Part]) -> None:
        """Promise the blocks from `at` to `end`, as many as fit."""
        fits = min(end, at + self._limit - promises.held)
        self.truncated += end - max(at, fits)
        if at < fits:
            base = 0 if at < fits - at else at
            stretch = Stretch(promises.bit, keys if not base else keys[at:fits], base, at, fits)
            promises.add(stretch)
            parts.append((stretch, fits))
