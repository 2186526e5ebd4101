"""The other policies: simple rules, for comparison and for fleets where a rule is wanted.

None prices in seconds: their figure stands in `Terms.cost` alone, and ties are exact ones. `weight` of a worker scales
its share where a rule compares loads.
"""

from __future__ import annotations

from random import Random

from gateway.policy.pick import rendezvous
from gateway.policy.seam import Ask, Scores, View

_EXACT = 1e-9
_NOT_DRAWN = 1e6
"""Added to candidates a rule does not consider: above any load, and still a number that can be shown."""

LEADING_TOKENS = 1024
"""How much of a prompt `prefix_hash` looks at: past a short preamble that all requests share, before the turn."""

BOUND = 1.25
"""`prefix_hash` passes over workers above this multiple of the mean load (consistent hashing with bounded loads,
Mirrokni, Thorup and Zadimoghaddam, 2018)."""


class _ExactTies:
    __slots__ = ()
    wait_weight = 0.0

    def near(self, own_s: float, *, cold: bool) -> float:
        return _EXACT


class LeastLoad(_ExactTies):
    """Fewest requests in flight."""

    __slots__ = ()
    name = "least_load"

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        return Scores([(w.inflight_requests + w.foreign_requests) / w.weight for w in view.workers])


class RoundRobin(_ExactTies):
    """The one whose last turn is longest ago: with a steady set of workers, each in turn."""

    __slots__ = ()
    name = "round_robin"

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        return Scores([float(worker.picked) for worker in view.workers])


class Uniform(_ExactTies):
    """Any, with equal chance (in proportion to `weight`)."""

    __slots__ = ("_rng",)
    name = "random"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        # The smallest of exponential variables of rate w belongs to i with probability w_i / sum(w).
        return Scores([self._rng.expovariate(worker.weight) for worker in view.workers])


class TwoChoices(_ExactTies):
    """Two drawn at random, the less loaded of them."""

    __slots__ = ("_rng",)
    name = "p2c"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        workers = view.workers
        drawn = self._rng.sample(range(len(workers)), min(2, len(workers)))
        return Scores(
            [
                worker.inflight_requests / worker.weight + (0.0 if position in drawn else _NOT_DRAWN)
                for position, worker in enumerate(workers)
            ]
        )


class PrefixHash(_ExactTies):
    """Home by hash of the leading blocks, the next one in that prefix's order when home is above its bound.

    Rendezvous order instead of a ring: the same placement property (a worker that leaves moves its own prefixes only)
    without a structure to keep. Requests of unknown tokens go by session, without one by load.
    """

    __slots__ = ()
    name = "prefix_hash"

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        workers = view.workers
        if ask.leading is None:
            return Scores([worker.inflight_requests / worker.weight for worker in workers])
        key = ask.leading.to_bytes(8, "little")
        order = sorted(range(len(workers)), key=lambda position: rendezvous(key, workers[position].id), reverse=True)
        total_weight = sum(worker.weight for worker in workers)
        share = BOUND * (1 + sum(worker.inflight_requests for worker in workers)) / total_weight
        costs = [0.0] * len(workers)
        for rank, position in enumerate(order):
            worker = workers[position]
            within = worker.inflight_requests + 1 <= max(1.0, share * worker.weight)
            costs[position] = rank + (0.0 if within else _NOT_DRAWN)
        return Scores(costs)


class LMetric(_ExactTies):
    """New tokens the worker would have to compute, times its batch (after placing)."""

    __slots__ = ()
    name = "lmetric"

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        return Scores(
            [
                float(worker.inflight_tokens + ask.tokens - hit) * (worker.inflight_requests + 1) / worker.weight
                for worker, hit in zip(view.workers, view.hits, strict=True)
            ]
        )
