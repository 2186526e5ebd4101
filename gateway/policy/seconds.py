"""The default policy: the cost of placing a request on a worker, in seconds.

For a request of n tokens and a worker with usable overlap h (`docs/concepts/score.md` has the measurements):

    own   = prefill seconds of the n - h new tokens, attention over the cached part included (+ slow-tier reads)
    wait  = seconds until the worker could start: estimates of what is ahead, less what has run of the head's; a head
            that has run for longer than its estimate is expected to take as long again as it is late
    evict = seconds to recompute what the request would push out, times the worth left in it
    kv    = KV occupancy after placing, 0..1
    repeat = half the seconds of what others compute at this moment, for each of them
    idle  = what requests have waited since this worker had nothing to do, over its slowdown; for a newcomer (a cache
            with less than a third of the mean) that computes no prompt now: since that was last made good
    adapter = seconds to load the request's adapters that are not there
    regret = what was lost lately by leaving prefixes on this slow worker (`pool.regret`), 0 for one that is not slow
    cost  = wait + (1 + lambda) * own + delta * running + mu * evict + kappa * kv + repeat + adapter + regret - credits

Credits are affinity and idle. Written as `score = alpha * hit - beta * queue - gamma * load` this is: `alpha` scales
the seconds a hit saves, `beta` the wait, `gamma` the three load prices. All three are 1 by default, since every term is
in seconds already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gateway.policy.seam import Ask, Row, Scores, View
from gateway.records import Standing


@dataclass(frozen=True, slots=True)
class Weights:
    """What an operator may turn. 1 means: as measured in seconds."""

    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 1.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Constants of the score, found on real traces and not sensitive: halving or doubling one moves the mean time to
    first token by a few per cent, leaving one out by a factor on some workload."""

    own_extra: float = 0.25
    """lambda: prefill work put on the fleet delays others too, so own seconds count a quarter more than waiting."""
    running_s: float = 0.002
    """delta: each running request slows decoding and takes batch room; small, it mostly breaks ties."""
    evict: float = 1.0
    """mu: pushed-out blocks cost what recomputing them costs (their worth is discounted by idle age already)."""
    kv_s: float = 1.0
    """kappa: a full cache makes requests wait for room, about a second at the margin. The most dangerous to leave
    out: 10 x in the worst case."""
    affinity_s: float = 0.02
    """Credit for the session's last worker: a hundred or two tokens of prefill. Binding affinity costs 3-4 %."""
    repeat: float = 0.5
    """What other workers compute at this moment is worth waiting for: computing it too costs so much more for each."""
    idle: float = 1.0
    """Share of what requests have waited elsewhere that an idle worker is credited with: at 1 what is spent on bringing
    a prefix to it is at most what its absence has cost (the rule of the ski rental). A copy on a slow worker is worth
    less, by as much as it is slower."""
    adapter_s: float = 0.05
    """Bringing one adapter to a worker: some ten milliseconds from its host's memory (170 MB for rank 32 on an 8B
    model), a hundred from disk, and another adapter has to go. As much as a few hundred tokens of prefill: no reason to
    leave a long prefix or to stand in a queue."""
    near_s: float = 0.001
    """Costs closer than this are a tie: below every noise in the estimates."""
    near_cold: float = 0.05
    """For a request nobody has blocks of, costs within this share are a tie too: learned speeds differ by as much
    between equal workers, and always taking the one that seems fastest would keep the others idle."""


_NEWCOMER = 1 / 3
"""A worker is new while its cache holds less than this share of the mean. At a half, caches that differ by chance are
taken for new (mean time to first token 3 % more on agent traces); at a quarter a newcomer is left alone too soon."""

OWN_EXTRA_HOLDING = 0.1
"""lambda where requests wait at the gateway: measured with it, as 0.25 was without; the difference is small."""


class Seconds:
    """See the module. About 0.2 us a candidate."""

    __slots__ = ("_prices", "_weights")

    name = "seconds"

    def __init__(self, weights: Weights | None = None, prices: Prices | None = None) -> None:
        self._weights = weights or Weights()
        self._prices = prices or Prices()

    @property
    def weights(self) -> Weights:
        return self._weights

    @property
    def wait_weight(self) -> float:
        return self._weights.beta

    def near(self, own_s: float, *, cold: bool) -> float:
        prices = self._prices
        return max(prices.near_s, prices.near_cold * own_s) if cold else prices.near_s

    def score(self, ask: Ask, view: View, now: float) -> Scores:
        """The arithmetic of `_row`, without what is nothing here and without keeping the terms (a test holds the two
        equal). Where a request has more terms than usual they are asked for one by one."""
        standings = [worker.standing for worker in view.workers]
        few = _few(view) if ask.waited_s else 0
        explain = partial(self._row, ask, view, standings, few, now)
        weights, prices = self._weights, self._prices
        if view.read_s is not None or view.absent is not None or weights.alpha != 1.0:
            return Scores([explain(at)[0] for at in range(len(standings))], explain)
        tokens, output_tokens, _, overhead_s, token_s, pair_s, _, _, computing, new_prefix, waited_s, settled_s = ask
        beta, gamma = weights.beta, weights.gamma
        own_factor = 1.0 + prices.own_extra
        running_s, mu, kappa = gamma * prices.running_s, gamma * prices.evict, gamma * prices.kv_s
        cold_s = overhead_s + tokens * (token_s + pair_s * tokens / 2)
        repeat_token_s = prices.repeat * computing * token_s
        hit_before, new, alone_s = 0, tokens, cold_s
        costs: list[float] = []
        add = costs.append
        for (
            (slowdown, wait, head_s, head_since, foreign_s, foreign_since, requests, regret_s, kv_tokens, capacity,
             unindexed, evict_discount, idle_since_s), hit, resident
        ) in zip(standings, view.hits, view.resident, strict=True):  # fmt: skip
            if hit != hit_before:  # many have the same
                hit_before = hit
                new = tokens - hit
                alone_s = overhead_s + new * (token_s + pair_s * (hit + new / 2)) if hit else cold_s
            if wait:
                ran = now - head_since
                wait += ran - 2 * head_s if ran > head_s else -ran
            if foreign_s:
                wait += max(0.0, foreign_s - (now - foreign_since))
            cost = beta * wait + own_factor * (slowdown * alone_s) + running_s * requests + regret_s
            if capacity:
                over = resident + unindexed + new - capacity
                if over > 0:
                    cost += mu * slowdown * token_s * (new if new < over else over) * evict_discount
                cost += kappa * (kv_tokens + new + output_tokens) / capacity
            if hit < new_prefix:
                cost += slowdown * repeat_token_s * (new_prefix - hit)
            if resident < few and not wait:
                cost -= prices.idle * (waited_s - settled_s) / slowdown
            elif waited_s and not requests:
                unpaid_s = waited_s - (idle_since_s if idle_since_s > settled_s else settled_s)
                if unpaid_s > 0.0:
                    cost -= prices.idle * unpaid_s / slowdown
            add(cost)
        if view.home is not None:
            costs[view.home] = explain(view.home)[0]
        return Scores(costs, explain)

    def _row(self, ask: Ask, view: View, standings: Sequence[Standing], few: int, now: float, at: int) -> Row:
        """All terms of one candidate."""
        tokens, output_tokens, _, overhead_s, token_s, pair_s, _, _, computing, new_prefix, waited_s, settled_s = ask
        weights, prices = self._weights, self._prices
        (
            slowdown, wait, head_s, head_since, foreign_s, foreign_since, requests, regret, kv_tokens, capacity,
            unindexed, evict_discount, idle_since_s,
        ) = standings[at]  # fmt: skip
        hit = view.hits[at]
        new = tokens - hit
        cold = slowdown * (overhead_s + tokens * (token_s + pair_s * tokens / 2))
        own, saved = cold, 0.0
        if hit:
            own = slowdown * (overhead_s + new * (token_s + pair_s * (hit + new / 2)))
            if view.read_s is not None:
                own += view.read_s[at]
            saved = cold - own
        if wait:
            ran = now - head_since
            wait += ran - 2 * head_s if ran > head_s else -ran
        if foreign_s:
            wait += max(0.0, foreign_s - (now - foreign_since))
        decode = weights.gamma * prices.running_s * requests
        evict = kv = 0.0
        if capacity:
            kv = weights.gamma * prices.kv_s * (kv_tokens + new + output_tokens) / capacity
            over = view.resident[at] + unindexed + new - capacity
            if over > 0:
                evict = weights.gamma * prices.evict * slowdown * token_s * min(new, over) * evict_discount
        affinity = prices.affinity_s if view.home == at else 0.0
        repeat = idle = 0.0
        if hit < new_prefix:
            repeat = slowdown * (prices.repeat * computing * token_s) * (new_prefix - hit)
        if not wait and view.resident[at] < few:
            idle = prices.idle * (waited_s - settled_s) / slowdown
        elif waited_s and not requests:
            idle = prices.idle * max(0.0, waited_s - max(idle_since_s, settled_s)) / slowdown
        adapter = 0.0 if view.absent is None else prices.adapter_s * view.absent[at]
        worth = own + (1.0 - weights.alpha) * saved
        cost = weights.beta * wait + (1.0 + prices.own_extra) * worth + decode + evict + kv
        cost = cost - affinity + repeat - idle + adapter + regret
        return (cost, saved, wait, own, decode, evict, kv, affinity, repeat, idle, adapter, regret)


def _few(view: View) -> int:
    """Tokens: a worker whose cache holds fewer is a newcomer."""
    return int(_NEWCOMER * sum(view.resident) / max(1, len(view.resident)))
