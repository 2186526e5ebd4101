"""Why a request did not get the hit it might have had: the cause of a miss, and of overlap left unused.

The chain of a request is available -> predicted -> delivered, in tokens. What is lost at the second arrow is a miss of
the chosen worker's index: `judge` names its cause. What is lost at the first was given up knowingly: `forgone` says
what for. The rules and their order are told in `docs/concepts/trust.md`.

Pure functions over numbers; asked for only where something was lost, so that a hit costs nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from gateway.records import Decision, MissCause


class Prediction(NamedTuple):
    """What a prediction rested on when it was made, in tokens. `announced` is the part the worker's events had told of
    (slower tiers included), `slow` the part in slower tiers; the rest had been promised by decisions. `events` is False
    where the prediction was learned from routing: for a worker whose events nobody hears, and for keys of text.
    `epoch`, `clears` and `removed` say how far the worker's part of the index had come (`kv.index.Mark`)."""

    tokens: int
    announced: int
    slow: int
    events: bool
    epoch: int
    clears: int
    removed: int


class Later(NamedTuple):
    """The same worker's part of the index when the request has ended. `shown`: its events tell of the first block that
    was not delivered, stored anew by this request perhaps; `identity`: its blocks are known not to be those of the
    requests."""

    shown: bool
    epoch: int
    clears: int
    removed: int
    identity: bool


class Verdict(NamedTuple):
    """The cause of a miss; `doubts` says that it speaks against what the worker announced."""

    cause: MissCause
    doubts: bool


def missed(expected: int, delivered: int, block_size: int, *, allowed: float = 0.1) -> int:
    """Expected less delivered where that is a miss: above one block and above the share of it that is allowed."""
    short = expected - delivered
    return short if short > block_size and short > allowed * expected else 0


def judge(made: Prediction, delivered: int, block_size: int, later: Later) -> Verdict:
    """Why the chosen worker delivered less than was predicted of it. The first rule that holds names the cause."""
    if not made.events:
        # Nobody tells what became of it: evicted, most likely.
        return Verdict(MissCause.UNKNOWN, True)
    if later.identity:
        return Verdict(MissCause.IDENTITY, True)
    if later.epoch != made.epoch:
        # A restart, a gap, a resync: what was predicted is no longer said by anybody.
        return Verdict(MissCause.STALE_INDEX, False)
    if later.clears != made.clears:
        return Verdict(MissCause.EVICTED, False)
    if delivered + block_size >= made.announced:
        # All that was announced is there. What is missing had only been promised.
        return Verdict(MissCause.STALE_INDEX, False)
    if made.slow and delivered + block_size >= made.announced - made.slow:
        return Verdict(MissCause.SPILLED, False)
    removed = later.removed - made.removed
    if not later.shown:
        # Without a removal it was dropped here, for a limit.
        return Verdict(MissCause.EVICTED if removed else MissCause.STALE_INDEX, False)
    if removed and removed * block_size >= made.announced - delivered - block_size:
        # Removed, computed by this request and announced again.
        return Verdict(MissCause.EVICTED, False)
    return Verdict(MissCause.STALE_INDEX, True)


class Forgone(StrEnum):
    """Why a worker with a smaller overlap was taken. LOAD: the one with the most would have cost more, queue and room
    considered. AFFINITY: the session's credit decided. ADAPTER: it would have had to load the request's adapter.
    TRUST: its index is not believed. TIE: both cost the same as far as can be told, or the policy does not look at
    overlaps."""

    LOAD = "load"
    AFFINITY = "affinity"
    ADAPTER = "adapter"
    TRUST = "trust"
    TIE = "tie"


def forgone(decision: Decision) -> Forgone | None:
    """Why `predicted_tokens` is below `available_tokens`; None when it is not.

    Speaks of the cheapest among the workers with the most. What full trust would have saved there is scaled from what
    the believed part saves.
    """
    if decision.predicted_tokens >= decision.available_tokens:
        return None
    chosen = next(c for c in decision.candidates if c.worker == decision.worker)
    most = (c for c in decision.candidates if c.overlap_tokens == decision.available_tokens)
    best = min(most, key=lambda c: c.terms.cost)
    cost = chosen.terms.cost
    if chosen.terms.affinity_s and best.terms.cost < cost + chosen.terms.affinity_s:
        return Forgone.AFFINITY
    if best.terms.cost > cost and best.terms.cost - best.terms.adapter_s < cost - chosen.terms.adapter_s:
        return Forgone.ADAPTER
    if best.trust < 1.0 and best.terms.cost - best.terms.hit_s * (1.0 / best.trust - 1.0) < cost:
        return Forgone.TRUST
    return Forgone.LOAD if best.terms.cost > cost else Forgone.TIE
