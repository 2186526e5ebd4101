"""Who wins among equals, and the order every replica agrees on.

Rules:
1. The lowest cost wins. Candidates within the policy's `near` of it are equal.
2. Equals of which one or more have an overlap: one at random among those with nearly the longest, so that no order of
   the list is preferred, and work is not done twice where saving it costs nobody anything.
3. Equals without overlap (a cold request): the session's rendezvous order when there is a session, so that replicas
   that never spoke choose alike; else the one not chosen for the longest time, so that prompts spread evenly.
"""

from __future__ import annotations

from random import Random

from xxhash import xxh3_64_intdigest

from gateway.policy.seam import Policy, Scores, View
from gateway.records import Terms, WorkerId

_OWN_S = Terms._fields.index("own_s")

_NEARLY = 0.9
"""Overlaps above this share of the longest are alike: they are weighted by trust, which differs a little."""


def rendezvous(key: bytes, worker: WorkerId) -> int:
    """Weight of `worker` for `key`: highest first is an order that depends on names alone (Thaler and Ravishankar,
    1998)."""
    return int(xxh3_64_intdigest(worker.encode("utf-8", "surrogatepass") + b"\x00" + key))


def pick(policy: Policy, view: View, scores: Scores, *, session: str | None, rng: Random) -> int:
    """Position of the winner. `session` is given for a session without a record of its own."""
    costs = scores.costs
    lowest = min(costs)
    best = costs.index(lowest)
    hits = view.hits
    cold = not hits[best]
    limit = lowest + policy.near(scores.of(best)[_OWN_S] if cold else 0.0, cold=cold)
    equals = [position for position, cost in enumerate(costs) if cost <= limit]
    if len(equals) == 1:
        return best
    if any(hits) and (longest := max(hits[position] for position in equals)):
        equals = [position for position in equals if hits[position] >= _NEARLY * longest]
        return equals[rng.randrange(len(equals))]
    workers = view.workers
    if session is not None:
        key = session.encode("utf-8", "surrogatepass")
        return max(equals, key=lambda position: rendezvous(key, workers[position].id))
    picked = [workers[position].picked for position in equals]
    return equals[picked.index(min(picked))]
