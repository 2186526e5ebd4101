"""What workers are taken to hold because requests were sent there: for workers without events, and for text keys.

A learned block sets the worker's bit in the GPU masks, as an announced one does, so one look-up reads both and one
decision compares workers of both kinds. Size and life time of what was learned are kept here, its order in `recency`.

Rules:
1. A request's blocks are learned for its worker when its prefill is over, not when it is sent.
2. Token keys are learned while the worker has announced nothing; its first event ends that and drops them
   (`KvIndex.apply`). Text keys, which no event can carry, are learned for every worker.
3. Blocks go, oldest first: where they exceed the worker's cache (in tokens), or all workers' blocks the limit; when
   nobody asked for them for `ttl_s`; when they are as old as a block that the worker has evicted, since engines evict
   what was used least recently.

The last case is found by `contradict`: the worker reported fewer cached tokens than were known. The request that shows
it has computed its own blocks anew, so those stay; others that were used as long ago go.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gateway.kv.recency import Recency, Uses
from gateway.kv.speculation import Promises
from gateway.records import BlockKey, PrefixBlocks, PrefixMode

_KEY_BYTES: Final = 32

LEARNED_BYTES: Final = 160
"""What a learned block takes at most, and a piece as much again: places in the order of use and in the masks, the key.
Measured: 310 for a block that is a piece of its own, 105 for one of a long conversation."""

_SLICE: Final = 1024
"""Blocks dropped in one go, 1 ms: more wait for the next request or tick."""

_TEXT_SHARE: Final = 0.5
_TOKEN_SHARE: Final = 0.9
"""A worker that reports less than this share of what was known has evicted the rest. Tokens of a text are an estimate,
off by a fifth where prose and code mix."""


@dataclass(frozen=True, slots=True)
class ApproximateSettings:
    """`ttl_s` is twice the time over which the value of an idle block falls to 1/e (300 s, measured on traces of
    conversations and agents): what is older is rarely asked for and likely evicted. `default_tokens` is the cache of
    a worker that does not report it: an 8B model on a card of 40 GB. `limit` bounds the blocks of all workers and the
    pieces they lie in (`recency`), together, `LEARNED_BYTES` each."""

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

    uses: Uses
    block_tokens: float
    text: bool


class Learned:
    """One worker's learned blocks with their last use, oldest first: token keys and text keys apart, since a block of
    each stands for another number of tokens."""

    __slots__ = ("bit", "capacity", "horizon", "instead", "text", "tokens")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.capacity = 0
        self.horizon = -math.inf
        """Blocks not used since then are gone."""
        self.tokens = Recency()
        self.text = Recency()
        self.instead = False
        """Some of the text stands for tokens that an engine tells: events will say better."""

    @property
    def blocks(self) -> int:
        """Blocks of both kinds."""
        return self.tokens.blocks + self.text.blocks

    @property
    def held_tokens(self) -> int:
        """What they stand for."""
        tokens, text = self.tokens, self.text
        return tokens.blocks * tokens.size + text.blocks * text.size

    def oldest(self) -> Recency | None:
        """Where the block used least recently lies."""
        tokens_at, text_at = self.tokens.oldest_at, self.text.oldest_at
        if text_at is not None and (tokens_at is None or text_at < tokens_at):
            return self.text
        return None if tokens_at is None else self.tokens


class ApproximateBlocks:
    """The learned blocks of all workers; changes the GPU `masks`."""

    __slots__ = ("_masks", "_workers", "dropped", "held", "settings", "weight")

    def __init__(self, masks: dict[BlockKey, int], settings: ApproximateSettings) -> None:
        self.settings = settings
        self.held = 0
        self.weight = 0
        """Blocks and pieces."""
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
        order = learned.text if text else learned.tokens
        order.size = blocks.block_size
        learned.capacity = capacity or self.settings.default_tokens
        uses: Uses = ()
        entered, before = 0, order.weight
        for keys, _ in blocks.chains:
            known, uses = order.touch(keys, now)
            fresh = keys[known:]
            if fresh:
                self._enter(learned.bit, fresh)
                if promises.held:
                    promises.confirm(fresh)
                entered += len(fresh)
        self.held += entered
        self.weight += order.weight - before
        self._fit(learned, max(_SLICE, 2 * entered), now)
        return Remembered(uses if len(blocks.chains) == 1 else (), float(blocks.block_size), text)

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
        left = learned.blocks if most is None else most
        dropped = 0
        for order in (learned.tokens, learned.text) if text else (learned.tokens,):
            while order.blocks and left > 0:
                count = self._drop(learned, order, left)
                dropped += count
                left -= count
        if text and not learned.text.blocks:
            learned.instead = False
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
        size = sum([learned.tokens.bytes + learned.text.bytes for learned in self._workers.values()])
        return ApproximateStats(self.held, size + _KEY_BYTES * self.held, dict(self.dropped))

    # ------------------------------------------------------------------ inside

    def _fit(self, learned: Learned, most: int, now: float) -> None:
        """Rule 3, at most `most` blocks."""
        too_old = now - self.settings.ttl_s
        left = most
        while left > 0:
            order = learned.oldest()
            at = None if order is None else order.oldest_at
            if order is None or at is None:
                break
            count = left
            if at <= learned.horizon:
                reason = "evicted"
            elif at <= too_old:
                reason = "age"
            else:
                over = learned.held_tokens - learned.capacity
                if over <= 0:
                    break
                reason, count = "size", min(left, -(-over // order.size))
            count = self._drop(learned, order, count)
            self.dropped[reason] += count
            left -= count
        if self.weight > self.settings.limit:
            # The fullest gives way, so that each worker keeps a fair share.
            fullest = max(self._workers.values(), key=lambda other: other.blocks)
            while most > 0 and self.weight > self.settings.limit:
                order = fullest.oldest()
                if order is None:
                    break
                count = self._drop(fullest, order, min(most, self.weight - self.settings.limit))
                self.dropped["size"] += count
                most -= count

    def _drop(self, learned: Learned, order: Recency, most: int) -> int:
        """Drop at most so many blocks, those used least recently; returns how many. There are some."""
        before = order.weight
        gone = order.drop(most)
        self._clear(learned.bit, gone)
        self.held -= len(gone)
        self.weight -= before - order.weight
        return len(gone)

    def _enter(self, bit: int, keys: Sequence[BlockKey]) -> None:
        masks = self._masks
        for key in keys:
            masks[key] = masks.get(key, 0) | bit

    def _clear(self, bit: int, keys: Sequence[BlockKey]) -> None:
        masks = self._masks
        for key in keys:
            mask = masks.get(key, 0)
            if mask == bit:
                del masks[key]
            elif mask & bit:  # else another replica has told it twice, in what is no chain
                masks[key] = mask ^ bit
