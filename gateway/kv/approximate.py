"""What workers are taken to hold because requests were sent there: for workers without events, and for text keys.

A learned block sets the worker's bit in the GPU masks, as an announced one does, so one look-up reads both and one
decision compares workers of both kinds. Order, size and life time of what was learned are kept here.

Rules:
1. A request's blocks are learned for its worker when its prefill is over, not when it is sent.
2. Token keys are learned while the worker has announced nothing; its first event ends that and drops them
   (`KvIndex.apply`). Text keys, which no event can carry, are learned for every worker.
3. A request touches its blocks from the last to the first. So a worker's oldest block is always the end of a chain, and
   what is known of a chain is always its beginning.
4. Blocks go, oldest first: where they exceed the worker's cache (in tokens), or all workers' blocks the limit; when
   nobody asked for them for `ttl_s`; when they are as old as a block that the worker has evicted, since engines evict
   what was used least recently.

The last case is found by `contradict`: the worker reported fewer cached tokens than were known. The request that shows
it has computed its own blocks anew, so those stay; others that were used as long ago go.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from operator import or_
from typing import Final, NamedTuple

from gateway.kv.speculation import Promises
from gateway.records import BlockKey, PrefixBlocks, PrefixMode

_ZEROS: Final = repeat(0)

_KEY_BYTES: Final = 32  # the key; its time of use is one object for all blocks of a request

LEARNED_BYTES: Final = 250
"""What a learned block takes: its places in the order of use and in the masks, and the key."""

_SLICE: Final = 1024
"""Blocks dropped in one go, 1 ms: more wait for the next request or tick."""

_MAX_USES: Final = 16
"""Runs of equal age told apart in one chain: a conversation has a handful, one for each prefix it shares."""

_TEXT_SHARE: Final = 0.5
_TOKEN_SHARE: Final = 0.9
"""A worker that reports less than this share of what was known has evicted the rest. Tokens of a text are an estimate,
off by a fifth where prose and code mix."""


@dataclass(frozen=True, slots=True)
class ApproximateSettings:
    """`ttl_s` is twice the time over which the value of an idle block falls to 1/e (300 s, measured on traces of
    conversations and agents): what is older is rarely asked for and likely evicted. `default_tokens` is the cache of
    a worker that does not report it: an 8B model on a card of 40 GB. `limit` bounds the blocks of all workers,
    `LEARNED_BYTES` each."""

    ttl_s: float = 600.0
    default_tokens: int = 262_144
    limit: int = 2_000_000


class ApproximateStats(NamedTuple):
    """Blocks known now, the bytes their order takes (estimate), and blocks dropped since the start, by reason: `size`,
    `age` (`ttl_s`), `evicted` (the worker was shown to have none of that age)."""

    blocks: int
    bytes: int
    dropped: dict[str, int]


class Remembered(NamedTuple):
    """What was known of a request's only chain when it was learned: runs of blocks with their last use before this one,
    as (blocks from the start, seconds), and how many tokens one block stands for."""

    uses: tuple[tuple[int, float], ...]
    block_tokens: float
    text: bool


class Learned:
    """One worker's learned blocks with their last use, oldest first: token keys and text keys apart, since a block of
    each stands for another number of tokens."""

    __slots__ = ("bit", "capacity", "horizon", "instead", "text", "text_size", "token_size", "tokens")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.capacity = 0
        self.horizon = -math.inf
        """Blocks not used since then are gone."""
        self.tokens: OrderedDict[BlockKey, float] = OrderedDict()
        self.text: OrderedDict[BlockKey, float] = OrderedDict()
        self.token_size = self.text_size = 1
        self.instead = False
        """Some of the text stands for tokens that an engine tells: events will say better."""

    @property
    def blocks(self) -> int:
        """Blocks of both kinds."""
        return len(self.tokens) + len(self.text)

    @property
    def held_tokens(self) -> int:
        """What they stand for."""
        return len(self.tokens) * self.token_size + len(self.text) * self.text_size

    def oldest(self) -> tuple[OrderedDict[BlockKey, float], float] | None:
        """Where the block used least recently lies, and when it was used."""
        found: tuple[OrderedDict[BlockKey, float], float] | None = None
        for order in (self.tokens, self.text):
            if order:
                at = order[next(iter(order))]
                if found is None or at < found[1]:
                    found = order, at
        return found


class ApproximateBlocks:
    """The learned blocks of all workers; changes the GPU `masks`."""

    __slots__ = ("_masks", "_workers", "dropped", "held", "settings")

    def __init__(self, masks: dict[BlockKey, int], settings: ApproximateSettings) -> None:
        self.settings = settings
        self.held = 0
        self.dropped = {"size": 0, "age": 0, "evicted": 0}
        self._masks = masks
        self._workers: dict[int, Learned] = {}

    def worker(self, bit: int) -> Learned:
        """The worker with this bit."""
        learned = self._workers.get(bit)
        if learned is None:
            learned = self._workers[bit] = Learned(bit)
        return learned

    def remember(
        self, learned: Learned, blocks: PrefixBlocks, capacity: int, promises: Promises, now: float
    ) -> Remembered:
        """The worker has computed these blocks. `capacity` is its cache in tokens, 0 when unknown; what of the blocks
        was only promised is no promise any more."""
        text = blocks.mode is PrefixMode.APPROXIMATE
        if text:
            order, learned.text_size = learned.text, blocks.block_size
        else:
            order, learned.token_size = learned.tokens, blocks.block_size
        learned.capacity = capacity or self.settings.default_tokens
        uses: tuple[tuple[int, float], ...] = ()
        entered = 0
        for keys, _ in blocks.chains:
            known = bisect_left(keys, True, key=lambda key: key not in order)
            head = keys[:known]
            if len(blocks.chains) == 1:
                uses = _uses(order, head)
            fresh = keys[known:]
            if fresh:
                self._enter(learned.bit, fresh)
                if promises.held:
                    promises.confirm(fresh)
                # From the last to the first: rule 3.
                order.update(zip(reversed(fresh), repeat(now), strict=False))
            if head:
                order.update(zip(head, repeat(now), strict=False))
                deque(map(order.move_to_end, reversed(head)), maxlen=0)
            entered += len(fresh)
        self.held += entered
        self._fit(learned, max(_SLICE, 2 * entered), now)
        return Remembered(uses, float(blocks.block_size), text)

    def contradict(self, learned: Learned, known: Remembered, *, delivered: float, sent_at: float, now: float) -> bool:
        """The worker reported `delivered` cached tokens for a request sent at `sent_at`. True when that shows that it
        has evicted something. What was used since the request was sent proves nothing: its prefill may have run beside.
        """
        held = delivered / known.block_tokens
        share = _TEXT_SHARE if known.text else _TOKEN_SHARE
        total = known.uses[-1][0] if known.uses else 0
        if held >= total * share or total - held <= 1.0:
            return False
        for end, at in known.uses:
            if end > held and at < sent_at:
                learned.horizon = max(learned.horizon, at)
                self._fit(learned, _SLICE, now)
                return True
        return False

    def forget(self, learned: Learned, *, text: bool = True, most: int | None = None) -> int:
        """Drop the worker's token keys, and its text keys with `text`; at most so many. Returns how many."""
        dropped = 0
        for order in (learned.tokens, learned.text) if text else (learned.tokens,):
            keys = list(islice(order, None if most is None else most - dropped))
            self._clear(learned.bit, keys)
            if len(keys) == len(order):
                order.clear()
            else:
                deque(map(order.pop, keys), maxlen=0)
            dropped += len(keys)
        if text and not learned.text:
            learned.instead = False
        self.held -= dropped
        return dropped

    def release(self, bit: int) -> None:
        """The worker is gone; unknown bits are fine."""
        learned = self._workers.pop(bit, None)
        if learned is not None:
            self.forget(learned)

    def expire(self, now: float) -> None:
        """About twice a second: what is too old goes, at most a slice a worker and call."""
        for learned in self._workers.values():
            self._fit(learned, _SLICE, now)

    def stats(self) -> ApproximateStats:
        """Costs a walk over workers."""
        size = sum(sys.getsizeof(learned.tokens) + sys.getsizeof(learned.text) for learned in self._workers.values())
        return ApproximateStats(self.held, size + _KEY_BYTES * self.held, dict(self.dropped))

    # ------------------------------------------------------------------ inside

    def _fit(self, learned: Learned, most: int, now: float) -> None:
        """Rule 4, at most `most` blocks."""
        too_old = now - self.settings.ttl_s
        for _ in range(most):
            oldest = learned.oldest()
            if oldest is None:
                break
            order, at = oldest
            if at <= learned.horizon:
                self._drop(learned, order, "evicted")
            elif at <= too_old:
                self._drop(learned, order, "age")
            elif learned.held_tokens > learned.capacity:
                self._drop(learned, order, "size")
            else:
                break
        if self.held > self.settings.limit:
            # The fullest gives way, so that each worker keeps a fair share.
            fullest = max(self._workers.values(), key=lambda other: other.blocks)
            for _ in range(min(most, self.held - self.settings.limit)):
                oldest = fullest.oldest()
                if oldest is None:
                    break
                self._drop(fullest, oldest[0], "size")

    def _drop(self, learned: Learned, order: OrderedDict[BlockKey, float], reason: str) -> None:
        key, _ = order.popitem(last=False)
        self._clear(learned.bit, (key,))
        self.held -= 1
        self.dropped[reason] += 1

    def _enter(self, bit: int, keys: Sequence[BlockKey]) -> None:
        masks = self._masks
        masks.update(zip(keys, map(or_, map(masks.get, keys, _ZEROS), repeat(bit)), strict=False))

    def _clear(self, bit: int, keys: Iterable[BlockKey]) -> None:
        masks = self._masks
        for key in keys:
            mask = masks[key]
            if mask == bit:
                del masks[key]
            else:
                masks[key] = mask ^ bit


def _uses(order: OrderedDict[BlockKey, float], head: Sequence[BlockKey]) -> tuple[tuple[int, float], ...]:
    """Runs of equal last use. A block was used no later than the one before it in its chain (rule 3)."""
    runs: list[tuple[int, float]] = []
    end = 0
    while end < len(head) and len(runs) < _MAX_USES:
        at = order[head[end]]
        end = bisect_right(head, -at, lo=end, key=lambda key: -order[key])
        runs.append((end, at))
    return tuple(runs)
