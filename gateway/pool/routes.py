"""From the name a client asks for to the name a pool is served under: aliases, versions by weight, shadows.

Rules:
1. A name that is no route is served under itself; an alias only stands for its model where no worker serves the alias.
2. Of several versions a session has always the same one, in every replica, while that has a worker; requests without a
   session draw. A version without a ready worker gets nothing as long as another has one.
3. When a weight changes, only the share that it gains or loses moves (weighted rendezvous hashing).
4. Chance is an argument; nothing is counted or remembered here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.pool.fleet import ServedModel
from gateway.pool.pool import Pool


class Version(NamedTuple):
    """A served name and its share, relative to the others'."""

    model: str
    weight: float = 1.0


class Shadow(NamedTuple):
    """A served name that gets copies of requests, and of which share of them (0..1)."""

    model: str
    share: float


@dataclass(frozen=True, slots=True)
class Route:
    """What one client name stands for. `versions` is never empty."""

    versions: tuple[Version, ...]
    shadow: Shadow | None = None


class Routes:
    """All routes, by the name clients use."""

    __slots__ = ("_routes", "shadowing")

    def __init__(self, routes: Mapping[str, Route] | None = None) -> None:
        self._routes = dict(routes or {})
        self.shadowing = any(route.shadow is not None for route in self._routes.values())
        """Some name has a shadow."""

    def __bool__(self) -> bool:
        return bool(self._routes)

    def target(self, model: str, session: str | None, *, pools: Mapping[str, Pool], rng: Random) -> str:
        """The served name for a request; `model` itself when it is no route."""
        route = self._routes.get(model)
        if route is None:
            return model
        versions = route.versions
        if len(versions) == 1:
            return model if model in pools else versions[0].model
        able = [v for v in versions if v.weight and (pool := pools.get(v.model)) is not None and pool.ready]
        if not able:
            able = [version for version in versions if version.weight]
        if len(able) == 1:
            return able[0].model
        key = session.encode("utf-8", "surrogatepass") if session is not None else rng.getrandbits(64).to_bytes(8)
        return max(able, key=lambda version: _share(key, version)).model

    def shadow(self, model: str, rng: Random) -> str | None:
        """The served name that gets a copy of this request for `model`, mostly None."""
        route = self._routes.get(model)
        shadow = route.shadow if route is not None else None
        return shadow.model if shadow is not None and rng.random() < shadow.share else None

    def models(self, served: list[ServedModel]) -> list[ServedModel]:
        """`served` and the names that are routes to something of it, for `/v1/models`."""
        known = {model.name: model for model in served}
        found = list(served)
        for name, route in self._routes.items():
            behind = [known[version.model] for version in route.versions if version.model in known]
            if name not in known and behind:
                lengths = [model.max_model_len for model in behind if model.max_model_len is not None]
                found.append(ServedModel(name, None, min(lengths, default=None)))
        return sorted(found, key=lambda model: (model.base is not None, model.name))


def _share(key: bytes, version: Version) -> float:
    """Highest wins with a chance in proportion to the weight (rendezvous hashing with weights, Schindelhauer and
    Schomaker, 2005)."""
    digest = xxh3_64_intdigest(version.model.encode("utf-8", "surrogatepass") + b"\x00" + key)
    drawn = (digest >> 11 | 1) / 2.0**53  # inside 0..1 for every digest: both ends would have no logarithm
    return -version.weight / math.log(drawn)
