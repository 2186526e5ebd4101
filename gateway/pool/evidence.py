"""What requests have shown of one worker's index: the checked predictions of the last minutes, and runs of requests
that can only mean that its blocks are not those of the requests.

Counts only; what follows from them is `pool.trust`'s to say. No clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from gateway.findings import IDENTITY
from gateway.records import Finding, MissCause

WINDOW: Final = 200
WINDOW_S: Final = 300.0
LEAST_PREDICTIONS: Final = 20
"""Predictions below which there is no rate: at a true rate of 2 %, one such window in twenty shows two misses."""

IDENTITY_RUN: Final = 8
"""Requests in a row that must speak of an identity problem: chance does not give eight, and a fleet finds out within
twenty requests."""

_GRACE_S: Final = 600.0
"""After an index was emptied, hits nobody predicted are what is to be expected for this long."""

_MAX_MODELS: Final = 256
_FINDINGS_SHOWN: Final = 4


class Check(NamedTuple):
    """One finished request, as far as it tests the index. All in tokens.

    `announced` is the part of the prediction that the worker's events had announced, `predicted` the whole of it.
    `cause` is that of a miss of this worker's own prediction, None for a hit. `doubts` says that the miss speaks
    against the events. `relearned`: the index was emptied since the decision, so what was predicted tests nothing.
    """

    model: str
    predicted: int
    announced: int
    delivered: int
    block_size: int
    decided_at: float
    cause: MissCause | None = None
    doubts: bool = False
    relearned: bool = False


class Window:
    """The last checked predictions: how many, how many missed, and how many of these speak against the events."""

    __slots__ = ("_entries", "against", "missed")

    def __init__(self) -> None:
        self._entries: deque[tuple[float, bool, bool]] = deque()
        self.missed = self.against = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, now: float, *, missed: bool, against: bool) -> None:
        self._entries.append((now, missed, against))
        self.missed += missed
        self.against += against
        if len(self._entries) > WINDOW:
            self._drop()

    def expire(self, now: float) -> None:
        while self._entries and self._entries[0][0] <= now - WINDOW_S:
            self._drop()

    def absolve(self) -> None:
        """The index was learned anew: what spoke against the one before says nothing of this one."""
        self._entries = deque((at, missed, False) for at, missed, _ in self._entries)
        self.against = 0

    def earliest_against(self) -> float | None:
        """When the first request ended that speaks against the events."""
        return next((at for at, _, against in self._entries if against), None)

    def _drop(self) -> None:
        _, missed, against = self._entries.popleft()
        self.missed -= missed
        self.against -= against


@dataclass(slots=True)
class _Runs:
    """Requests of one model that came one after another (each was decided when the one before had ended) and delivered
    nothing of what was announced, or something never announced."""

    nothing: int = 0
    unannounced: int = 0
    counted_at: float = -math.inf

    @property
    def wrong(self) -> bool:
        return max(self.nothing, self.unannounced) >= IDENTITY_RUN


class Strangers:
    """Identity problems by model: a worker that never delivers what it announces, or delivers again and again what it
    never announced. True while there is one.

    `emptied_at` is when its part of the index was emptied last, though its cache was not.
    """

    __slots__ = ("_models", "emptied_at")

    def __init__(self) -> None:
        self._models: dict[str, _Runs] = {}
        self.emptied_at = -math.inf

    def __bool__(self) -> bool:
        return any(runs.wrong for runs in self._models.values())

    def wrong(self, model: str) -> bool:
        """Whether there is one with this model."""
        runs = self._models.get(model)
        return runs is not None and runs.wrong

    def findings(self) -> tuple[Finding, ...]:
        """The first few."""
        found = ((model, runs) for model, runs in self._models.items() if runs.wrong)
        return tuple(
            IDENTITY.found(
                model=model,
                what="nothing was delivered of what it had announced"
                if runs.nothing >= runs.unannounced
                else "it delivered what it had never announced",
                requests=IDENTITY_RUN,
            )
            for model, runs in islice(found, _FINDINGS_SHOWN)
        )

    def observe(self, check: Check, now: float, *, against: bool, whole: bool) -> None:
        """A request has ended. `against`: it speaks against the events. `whole`: the worker's feed misses nothing, so
        that what speaks of strange blocks counts."""
        size = check.block_size
        nothing = whole and against and check.delivered < size and check.announced > size
        unannounced = whole and check.delivered > check.predicted + size and now - self.emptied_at > _GRACE_S
        shown = min(check.announced, check.delivered) >= size and not unannounced
        if not (nothing or unannounced or shown):
            return
        runs = self._models.get(check.model)
        if shown:
            if runs is not None:
                runs.nothing = runs.unannounced = 0
            return
        if runs is None:
            if len(self._models) >= _MAX_MODELS:
                del self._models[next(iter(self._models))]
            runs = self._models[check.model] = _Runs()
        if check.decided_at >= runs.counted_at:
            runs.counted_at = now
            runs.nothing += nothing
            runs.unannounced += unannounced
