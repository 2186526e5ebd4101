"""Policies: which worker should get a request. `make_policy` by name, `pick` among near-ties."""

from __future__ import annotations

from random import Random

from gateway.policy.pick import pick
from gateway.policy.seam import Ask, Candidates, Load, Policy, Row, Scores, View
from gateway.policy.seconds import OWN_EXTRA_HOLDING, Prices, Seconds, Weights
from gateway.policy.simple import LEADING_TOKENS, LeastLoad, LMetric, PrefixHash, RoundRobin, TwoChoices, Uniform

POLICY_NAMES = ("seconds", "least_load", "round_robin", "random", "p2c", "prefix_hash", "lmetric")

__all__ = [
    "LEADING_TOKENS",
    "OWN_EXTRA_HOLDING",
    "POLICY_NAMES",
    "Ask",
    "Candidates",
    "Load",
    "Policy",
    "Prices",
    "Row",
    "Scores",
    "Seconds",
    "View",
    "Weights",
    "make_policy",
    "pick",
]


def make_policy(name: str, *, rng: Random, weights: Weights | None = None, prices: Prices | None = None) -> Policy:
    """The policy of that name; `weights` and `prices` are for `seconds`. Raises ValueError for an unknown name."""
    match name:
        case "seconds":
            return Seconds(weights, prices)
        case "least_load":
            return LeastLoad()
        case "round_robin":
            return RoundRobin()
        case "random":
            return Uniform(rng)
        case "p2c":
            return TwoChoices(rng)
        case "prefix_hash":
            return PrefixHash()
        case "lmetric":
            return LMetric()
    raise ValueError(f"no policy {name!r}; there are {', '.join(POLICY_NAMES)}")
