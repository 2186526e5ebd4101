"""What prompts have in common: where they part, what that costs, which prefixes are worth keeping warm.

What it owns: a sketch of the prompts seen lately, as a tree of *cuts*: their block keys at about three lengths an
octave, from 64 tokens up. Keys are chained, so an equal key at a cut means equal tokens up to there; no text, no token
and no name of a client is kept.

Rules:
1. The longest part that a prompt has in common with earlier ones ends at the last of its cuts that is known: found by
   bisection, some microseconds with the new cuts entered. Positions are exact to a cut, 26 % of the length.
2. An application is a model and a head, the prompt's first 64 tokens. Where many prompts of an application part is its
   *stable* length: the cut with the highest reuse times length, where at least one in twenty of its prompts parts.
3. Drift is a prompt that leaves the way to the stable length early: the tokens from there to the stable length had to
   be computed although nearly all of them usually are the same. A prompt that ends early, or that follows a way of its
   own that others went before, has not drifted. Two applications that begin with the same 64 tokens look like one: what
   the rarer of them does not share counts as drift of the other.
4. Everything is bounded: cuts, applications, models. Cuts go the oldest first; those that were shared, or have others
   behind them, get another round for each halving of their count. Counts of applications fade by half every 2048
   prompts, so that what is stable can change.

It keeps no clock and does no I/O.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from gateway.keys import namespace
from gateway.records import BlockKey, PrefixBlocks

HEAD_TOKENS: Final = 64
_CUTS_AN_OCTAVE: Final = 3
_LONGEST_TOKENS: Final = 1 << 18
_NEW_CUTS: Final = 18
"""Entered for one prompt: six octaves beyond what is known of it. The next prompt of its kind enters more."""

POSITIONS: Final = tuple(HEAD_TOKENS << octave for octave in range(12))
"""Upper bounds of the histogram of where prompts part, in tokens."""

_FADE_AFTER: Final = 2048
_STABLE_SHARE: Final = 1 / 20
_STABLE_LEAST: Final = 8
"""Prompts that must have parted at a cut before it says anything."""

_SHARED: Final = 2.0
"""Prompts that must have parted at a cut for it to be worth naming: a chat that goes on is no reuse by others."""

_KEPT: Final = 4
"""Prompts looked at in one go. One alone costs four times as much, since the processor has forgotten the code; new ones
take 50 us each, and more of them at once would hold up others."""

_ROUNDS: Final = 8
"""Cuts looked at to find one that can go; then the next one goes."""


class _Application:
    """Of one model, with one head."""

    __slots__ = (
        "drift_tokens", "drifted", "epoch", "faded", "head", "model", "positions", "prompt_tokens", "requests",
        "shared_tokens", "stable",
    )  # fmt: skip

    def __init__(self, model: str, head: BlockKey) -> None:
        self.model = model
        self.head = head
        self.requests = 0
        self.prompt_tokens = 0
        self.shared_tokens = 0
        self.drifted = 0
        self.drift_tokens = 0
        self.positions = [0] * (len(POSITIONS) + 1)
        self.faded = 0.0
        """Requests, halved with each epoch."""
        self.epoch = 0
        self.stable: int | None = None
        """Name of the cut."""


class _Cut(Struct, eq=False, gc=False):
    """A beginning of prompts, `blocks` long. `reuse` counts the prompts whose common part ended here.

    There are thousands and a prompt makes a dozen: they are part of no cycle and of no interest to the collector."""

    key: BlockKey
    application: _Application
    parent: _Cut | None
    blocks: int
    tokens: int
    epoch: int
    children: int = 0
    reuse: float = 0.0

    def now(self) -> float:
        """Reuse, faded."""
        behind = self.application.epoch - self.epoch
        return self.reuse if not behind else self.reuse * 0.5**behind

    def leads_to(self, other: _Cut) -> bool:
        """Whether prompts get from here to `other`."""
        at: _Cut | None = other
        while at is not None and at.blocks > self.blocks:
            at = at.parent
        return at is self


@dataclass(slots=True)
class ModelTotals:
    """Since the start: prompts looked at, those without a head (too short), those whose head was new, those that
    drifted; prompt tokens, those in common with earlier prompts, those lost to drift. `positions` counts where prompts
    drifted, by `POSITIONS`, one entry more for what lies above; `position_tokens` is the sum of these positions."""

    seed: BlockKey
    requests: int = 0
    short: int = 0
    new_heads: int = 0
    drifted: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    drift_tokens: int = 0
    position_tokens: int = 0
    positions: list[int] = field(default_factory=lambda: [0] * (len(POSITIONS) + 1))


@dataclass(frozen=True, slots=True)
class ApplicationSeen:
    """One application since it was first seen. `stable_tokens` is None before enough prompts have parted anywhere."""

    model: str
    head: BlockKey
    requests: int
    prompt_tokens: int
    shared_tokens: int
    stable_tokens: int | None
    drifted: int
    drift_tokens: int
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A beginning that many prompts have in common: its last block's key, its length, and how many prompts of late had
    no longer part in common with earlier ones."""

    model: str
    head: BlockKey
    key: BlockKey
    tokens: int
    reuse: float


class PrefixInsight:
    """One for a process; the router's leases tell it every prompt that was answered."""

    __slots__ = (
        "_applications", "_cuts", "_kept", "_lengths", "_max_applications", "_max_cuts", "_max_models", "_models",
    )  # fmt: skip

    def __init__(self, *, max_cuts: int = 16_384, max_applications: int = 256, max_models: int = 256) -> None:
        self._models: dict[str, ModelTotals] = {}
        self._max_models = max_models
        self._max_cuts = max_cuts
        self._max_applications = max_applications
        self._cuts: OrderedDict[int, _Cut] = OrderedDict()
        """By key and model, the oldest first."""
        self._applications: OrderedDict[int, _Application] = OrderedDict()
        """By head and model, the longest unused first."""
        self._lengths: dict[int, tuple[int, ...]] = {}
        self._kept: list[tuple[str, PrefixBlocks]] = []
        """Prompts that are looked at when somebody asks, or when they are some."""

    def __len__(self) -> int:
        self._look()
        return len(self._cuts)

    @property
    def models(self) -> Mapping[str, ModelTotals]:
        """By served name."""
        self._look()
        return self._models

    def observe(self, model: str, blocks: PrefixBlocks) -> None:
        """A prompt for `model` was answered. Of several prompts in one request the first counts; one whose tokens are
        not known does not."""
        if not blocks.chains:
            return
        kept = self._kept
        kept.append((model, blocks))
        if len(kept) >= _KEPT:
            self._look()

    def applications(self) -> list[ApplicationSeen]:
        """All that are remembered, those with most prompt tokens first."""
        self._look()
        seen = [
            ApplicationSeen(
                model=one.model,
                head=one.head,
                requests=one.requests,
                prompt_tokens=one.prompt_tokens,
                shared_tokens=one.shared_tokens,
                stable_tokens=None if (stable := self._stable(one)) is None else stable.tokens,
                drifted=one.drifted,
                drift_tokens=one.drift_tokens,
                positions=tuple(one.positions),
            )
            for one in self._applications.values()
        ]
        return sorted(seen, key=lambda one: -one.prompt_tokens)

    def hottest(self, most: int) -> list[HotPrefix]:
        """Prefixes by reuse times tokens, the highest first. Costs a walk over all cuts, about a millisecond."""
        self._look()
        shared = [cut for cut in self._cuts.values() if cut.reuse >= _SHARED]
        best = heapq.nlargest(most, shared, key=lambda cut: cut.now() * cut.tokens)
        return [HotPrefix(cut.application.model, cut.application.head, cut.key, cut.tokens, cut.now()) for cut in best]

    # ------------------------------------------------------------------ inside

    def _look(self) -> None:
        kept = self._kept
        if kept:
            self._kept = []
            for model, blocks in kept:
                self._look_at(model, blocks.chains[0].keys, blocks.block_size)

    def _look_at(self, model: str, keys: Sequence[BlockKey], size: int) -> None:
        totals = self._models.get(model) or self._add_model(model)
        lengths = self._lengths.get(size) or self._add_size(size)
        count = bisect_right(lengths, len(keys))
        totals.requests += 1
        if not count:
            totals.short += 1
            return
        cuts, seed = self._cuts, totals.seed
        known, beyond = 0, count
        last: _Cut | None = None
        while known < beyond:
            middle = (known + beyond) >> 1
            cut = cuts.get(keys[lengths[middle] - 1] ^ seed)
            if cut is None:
                beyond = middle
            else:
                known, last = middle + 1, cut
        total = len(keys) * size
        totals.prompt_tokens += total
        if last is None:
            totals.new_heads += 1
            application = _Application(model, keys[lengths[0] - 1])
        else:
            application = last.application
            self._share(totals, application, last, total, ends=known == count)
        self._use(application, application.head ^ seed)
        application.requests += 1
        application.prompt_tokens += total
        application.faded += 1.0
        if application.faded >= _FADE_AFTER:
            application.faded /= 2.0
            application.epoch += 1
        for at in range(known, min(count, known + _NEW_CUTS)):
            blocks_long = lengths[at]
            key = keys[blocks_long - 1]
            cut = _Cut(key, application, last, blocks_long, blocks_long * size, application.epoch)
            if last is not None:
                last.children += 1
            last = cuts[key ^ seed] = cut
        self._make_room()

    def _share(self, totals: ModelTotals, application: _Application, last: _Cut, total: int, *, ends: bool) -> None:
        """A prompt of `total` tokens has the part up to `last` in common with earlier ones; `ends`: there it ends."""
        totals.shared_tokens += last.tokens
        application.shared_tokens += last.tokens
        if last.epoch != application.epoch:
            last.reuse, last.epoch = last.now(), application.epoch
        last.reuse += 1.0
        stable = self._stable(application)
        if (
            stable is not last
            and last.reuse >= max(_STABLE_LEAST, _STABLE_SHARE * application.faded)
            and (stable is None or last.reuse * last.tokens > stable.now() * stable.tokens)
        ):
            stable = last
            application.stable = last.key ^ totals.seed
        if stable is None or ends or last.blocks >= stable.blocks or not last.leads_to(stable):
            return
        lost = min(total, stable.tokens) - last.tokens
        position = bisect_left(POSITIONS, last.tokens)
        for one in (totals, application):
            one.drifted += 1
            one.drift_tokens += lost
            one.positions[position] += 1
        totals.position_tokens += last.tokens

    def _stable(self, application: _Application) -> _Cut | None:
        """By name, so that no cycle keeps either; None too when the cut is gone, or another's that is gone took its
        place."""
        return None if application.stable is None else self._cuts.get(application.stable)

    def _make_room(self) -> None:
        """As many cuts go as are too many (rule 4): each new prompt comes here once the gateway has run for a while."""
        cuts, most = self._cuts, self._max_cuts
        oldest = cuts.popitem
        while len(cuts) > most:
            for _ in range(_ROUNDS):
                name, cut = oldest(last=False)
                if not cut.children and cut.reuse < 1.0:
                    break
                if cut.reuse:
                    cut.reuse /= 2.0
                cuts[name] = cut
            else:
                name, cut = oldest(last=False)
            self._left(name, cut)

    @staticmethod
    def _left(name: int, cut: _Cut) -> None:
        if cut.parent is not None:
            cut.parent.children -= 1
        if cut.application.stable == name:
            cut.application.stable = None

    def _use(self, application: _Application, name: int) -> None:
        """It is the last used; one that was left out comes back as it was while its head is known."""
        applications = self._applications
        if name in applications:
            applications.move_to_end(name)
            return
        applications[name] = application
        if len(applications) > self._max_applications:
            applications.popitem(last=False)

    def _add_model(self, model: str) -> ModelTotals:
        if len(self._models) >= self._max_models:
            del self._models[next(iter(self._models))]
        totals = self._models[model] = ModelTotals(namespace(model))  # mixed into keys, which do not know the model
        return totals

    def _add_size(self, size: int) -> tuple[int, ...]:
        if len(self._lengths) >= 16:
            self._lengths.clear()  # block sizes are few; a fleet that changes them all the time starts over
        lengths: list[int] = []
        tokens = float(HEAD_TOKENS)
        while tokens <= _LONGEST_TOKENS:
            blocks = max(1, round(tokens / size))
            if not lengths or blocks > lengths[-1]:
                lengths.append(blocks)
            tokens *= 2.0 ** (1 / _CUTS_AN_OCTAVE)
        found = self._lengths[size] = tuple(lengths)
        return found
