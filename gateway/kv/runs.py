"""Walks over the keys of one chain: how far each worker's run goes, over announced blocks, promised ones, slower tiers.

Announced blocks are looked up one by one, in C; learned blocks of text by bisection; a promise goes on from where they
end, as a whole (`speculation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import accumulate, groupby, repeat
from operator import and_
from typing import Final

from gateway.kv.speculation import Heads, Promises
from gateway.records import BlockKey

# Long enough to make the walk in C worth its set-up, short enough that a run's end is found within a few microseconds.
_STRETCH: Final = 32

_ZEROS: Final = repeat(0)

Masks = Mapping[BlockKey, int]
Run = tuple[int, int]
"""Blocks from the start, and the mask of workers whose run has exactly that length."""


def fast_runs(keys: Sequence[BlockKey], slots: int, gpu: Masks) -> list[Run]:
    """Runs over GPU blocks, shortest first; workers without a first block are left out.

    The mask of workers whose run has not ended only loses bits. The walk runs in C but for the few places where some
    worker's run ends, and stops where the last one does; nearly all of its time are the look-ups.
    """
    held = map(gpu.get, keys, _ZEROS)
    runs: list[Run] = []
    before = slots
    at = 0
    for alive, stretch in groupby(accumulate(held, and_, initial=slots)):
        if alive != before:
            if at:
                runs.append((at, before ^ alive))
            if not alive:
                return runs
            before = alive
            at += len(list(stretch))
        else:
            at += len(list(stretch)) - 1  # `initial` stands for no block
    if at and before:
        runs.append((at, before))
    return runs


def falling_runs(keys: Sequence[BlockKey], slots: int, gpu: Masks) -> list[Run]:
    """`fast_runs` over blocks of which nobody has one without the one before it, so that a few of them tell: learned
    ones that no event can name."""
    held_by = gpu.get
    total = len(keys)
    runs: list[Run] = []
    alive = held_by(keys[0], 0) & slots if total else 0
    at = 0
    while alive:
        at, end = at + 1, total
        while at < end:
            middle = (at + end) >> 1
            if held_by(keys[middle], 0) & alive == alive:
                at = middle + 1
            else:
                end = middle
        rest = held_by(keys[at], 0) & alive if at < total else 0
        runs.append((at, alive ^ rest))
        alive = rest
    return runs


def run_of(keys: Sequence[BlockKey], bit: int, masks: Masks, at: int = 0) -> int:
    """Where one worker's run in one tier ends that has come to block `at`."""
    held_by = masks.get
    total = len(keys)
    while at < total:
        stretch = keys[at : at + _STRETCH]
        if reduce(and_, map(held_by, stretch, _ZEROS), bit):
            at += len(stretch)
            continue
        for key in stretch:
            if not held_by(key, 0) & bit:
                return at
            at += 1
    return total


def run_on(keys: Sequence[BlockKey], at: int, bit: int, gpu: Masks, heads: Heads) -> int:
    """Where one worker's run over announced and promised blocks ends that has come to block `at`."""
    total = len(keys)
    while at < total:
        for stretch in heads.get(keys[at], ()):
            if stretch.bit == bit:
                at = stretch.goes_with(keys, at)
                break
        else:
            if not gpu.get(keys[at], 0) & bit:
                break
            at = run_of(keys, bit, gpu, at)
    return at


def with_promises(keys: Sequence[BlockKey], runs: list[Run], slots: int, gpu: Masks, heads: Heads) -> list[Run]:
    """Runs over announced blocks, gone on through promised ones."""
    total = len(keys)
    started = 0
    for _, mask in runs:
        started |= mask
    last = keys[-1] if total else None
    found: dict[int, int] = {}
    for length, mask in [(0, slots & ~started), *runs]:
        here = heads.get(keys[length]) if length < total else None
        if here is not None:
            for stretch in here:
                bit = stretch.bit
                if not mask & bit:
                    continue
                mask ^= bit
                # Mostly it reaches the end of this very prompt, and there may be one for every worker.
                if stretch.end == total and stretch.chain[total - stretch.base - 1] == last:
                    end = total
                else:
                    end = run_on(keys, stretch.goes_with(keys, length), bit, gpu, heads)
                found[end] = found.get(end, 0) | bit
        if length and mask:
            found[length] = found.get(length, 0) | mask
    return list(found.items())


def slow_end(keys: Sequence[BlockKey], start: int, bit: int, tiers: Sequence[Masks]) -> int:
    """Where one worker's run ends when it goes on from block `start` through slower tiers."""
    for at in range(start, len(keys)):
        key = keys[at]
        if not any(masks.get(key, 0) & bit for masks in tiers):
            return at
    return len(keys)


def run_within(keys: Sequence[BlockKey], first: int, promises: Promises, gpu: Masks, heads: Heads) -> int:
    """`run_on` of one worker where what lies before block `first` is not known: a promise may have begun there."""
    at, end = -1, first
    while at < end < len(keys):
        at = end
        stretch = promises.covering(keys, at, first=first)
        if stretch is not None:
            end = stretch.goes_with(keys, stretch.start, same=at + 1 - stretch.start)
        else:
            end = run_on(keys, at, promises.bit, gpu, heads)
    return end
