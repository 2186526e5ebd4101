"""The default policy: the cost of placing a request on a worker, in seconds.

For a request of n tokens and a worker with usable overlap h (`docs/concepts/score.md` has the measurements):

    own   = prefill seconds of the n - h new tokens, attention over the cached part included (+ slow-tier reads)
    wait  = seconds until the worker could start: estimates of what is ahead, less what has run of the head's; a head
            that has run for longer than its estimate is expected to take as long again as it is late
    evict = seconds to recompute what the request would push out, times the worth left in it
    kv    = KV occupancy after placing, 0..1
    repeat = half the seconds of what others compute at this moment, for each of them
    idle  = what requests have waited since this worker had nothing to do, over its slowdown
    adapter = seconds to load the request's adapters that are not there
    cost  = wait + (1 + lambda) * own + delta * running + mu * evict + kappa * kv + repeat + adapter - affinity - idle

Written as `score = alpha * hit - beta * queue - gamma * load` this is: `alpha` scales the seconds a hit saves, `beta`
the wait, `gamma` the three load prices. All three are 1 by default, since every term is in seconds already.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.policy.seam import Ask, Row, View
from gateway.records import Terms


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


OWN_EXTRA_HOLDING = 0.1
"""lambda where requests wait at the gateway: measured with it, as 0.25 was without; the difference is small."""


class Seconds:
    """See the module. About 0.5 us a candidate."""

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

    def near(self, best: Terms, *, cold: bool) -> float:
        prices = self._prices
        return max(prices.near_s, prices.near_cold * best.own_s) if cold else prices.near_s

    def score(self, ask: Ask, view: View, now: float) -> list[Row]:
        tokens, output_tokens, _, overhead_s, token_s, pair_s, home, _, computing, new_prefix, waited_s, settled_s = ask
        weights, prices = self._weights, self._prices
        alpha, beta, gamma = weights.alpha, weights.beta, weights.gamma
        own_factor = 1.0 + prices.own_extra
        running_s, mu, kappa = gamma * prices.running_s, gamma * prices.evict, gamma * prices.kv_s
        cold_s = overhead_s + tokens * (token_s + pair_s * tokens / 2)
        read_s = view.read_s
        repeat_token_s = prices.repeat * computing * token_s
        found: list[Row] = []
        add = found.append
        for position, (worker, hit, resident) in enumerate(zip(view.workers, view.hits, view.resident, strict=True)):
            slowdown = worker.slowdown
            new = tokens - hit
            if hit:
                own = slowdown * (overhead_s + new * (token_s + pair_s * (hit + new / 2)))
                if read_s is not None:
                    own += read_s[position]
                saved = slowdown * cold_s - own
            else:
                own = slowdown * cold_s
                saved = 0.0
            wait = worker.pending_s
            if wait:
                ran, head_s = now - worker.head_since, worker.head_s
                wait += ran - 2 * head_s if ran > head_s else -ran
            if worker.foreign_s:
                wait += max(0.0, worker.foreign_s - (now - worker.foreign_since))
            decode = running_s * (worker.inflight_requests + worker.foreign_requests)
            evict = kv = 0.0
            capacity = worker.kv_capacity
            if capacity:
                kv = kappa * (worker.kv_tokens + new + output_tokens) / capacity
                over = resident + worker.unindexed_tokens + new - capacity
                if over > 0:
                    evict = mu * slowdown * token_s * (new if new < over else over) * worker.evict_discount
            cost = beta * wait + own_factor * (own + (1.0 - alpha) * saved) + decode + evict + kv
            affinity = 0.0
            if home is not None and worker.id == home:
                affinity = prices.affinity_s
                cost -= affinity
            repeat = idle = 0.0
            if hit < new_prefix:
                repeat = slowdown * repeat_token_s * (new_prefix - hit)
                cost += repeat
            if waited_s and not worker.inflight_requests:
                since = worker.idle_since_s
                unpaid_s = waited_s - (since if since > settled_s else settled_s)
                if unpaid_s > 0.0:
                    idle = prices.idle * unpaid_s / slowdown
                    cost -= idle
            add((cost, saved, wait, own, decode, evict, kv, affinity, repeat, idle, 0.0))
        if view.absent is not None:  # seldom, so it costs other requests nothing for each candidate
            loads_s = [prices.adapter_s * absent for absent in view.absent]
            found = [
                Terms(*terms)._replace(cost=terms[0] + load_s, adapter_s=load_s)
                for terms, load_s in zip(found, loads_s, strict=True)
            ]
        return found
