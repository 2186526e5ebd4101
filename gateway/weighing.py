"""Weighs workers: overlaps, what of them pays, the policy's costs, and the best.

Rules:
1. Overlaps are believed as far as the worker's trust goes; of a slow tier only what is read faster than computed.
2. In a pool that is split, a prefix's home shard is asked first, and another one as long as home is dear: so most
   decisions look at one shard only (`pool.shards`).
3. Nothing is changed here: the router reserves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from gateway.kv import KvIndex, Overlaps
from gateway.policy import Ask, Policy, Scores, View, pick
from gateway.pool import Excluded, Pool, Shard, Worker, eligible, order
from gateway.records import InferenceRequest, PrefixBlocks, Tier, WorkerId


@dataclass(frozen=True, slots=True)
class SlowReads:
    """How fast a worker brings blocks of a slow tier back to its GPU, in tokens a second: a first figure for hosts
    over PCIe, local NVMe and the network; a slow-tier overlap only counts where reading beats recomputing."""

    cpu_tokens_per_s: float = 60_000.0
    disk_tokens_per_s: float = 20_000.0
    remote_tokens_per_s: float = 40_000.0

    def read_s(self, tier: Tier, tokens: int) -> float:
        """Seconds to read `tokens` from a tier."""
        match tier:
            case Tier.GPU:
                return 0.0
            case Tier.CPU:
                return tokens / self.cpu_tokens_per_s
            case Tier.DISK:
                return tokens / self.disk_tokens_per_s
            case Tier.REMOTE:
                return tokens / self.remote_tokens_per_s


@dataclass(slots=True)
class Weighed:
    """The workers of a shard (or a pool), and the best of them at `at`."""

    shard: Shard
    at: int
    cost: float
    scores: Scores
    raw: list[int]
    trusts: list[float]
    view: View
    overlaps: Overlaps | None
    number: int | None = None
    first: int | None = None


class Scales:
    """The router's."""

    __slots__ = ("_index", "_rng", "policy", "slow_reads", "spill_margin_s")

    def __init__(
        self, index: KvIndex, policy: Policy, *, rng: Random, slow_reads: SlowReads, spill_margin_s: float
    ) -> None:
        self.policy = policy
        self.slow_reads = slow_reads
        self.spill_margin_s = spill_margin_s
        self._index = index
        self._rng = rng

    def best(
        self,
        pool: Pool,
        ask: Ask,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        unplaced: str | None,
        now: float,
        tried: frozenset[WorkerId],
        adapters: tuple[str, ...],
    ) -> tuple[Weighed | None, Excluded]:
        """The best worker for a request with these adapters, None when there is nobody; and who was left out, why.
        Workers that have all they should have are asked when nobody else may have it."""
        if not pool.shards:
            shard, excluded = eligible(pool, pool.everybody, request, blocks, tried)
            found = self._weigh(pool, shard, ask, blocks, unplaced, now, adapters) if shard.workers else None
        else:
            found, excluded = self._in_shards(pool, ask, request, blocks, unplaced, now, tried, adapters)
        not_ready = pool.not_ready
        if found is None and pool.spare:
            shard, _ = eligible(pool, Shard.of(pool.spare), request, blocks, tried)
            if shard.workers:
                found = self._weigh(pool, shard, ask, blocks, unplaced, now, adapters)
                names = {worker.id for worker in shard.workers}
                not_ready = tuple(entry for entry in not_ready if entry[0] not in names)
        return found, not_ready + excluded if not_ready else excluded

    def _in_shards(
        self,
        pool: Pool,
        ask: Ask,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        unplaced: str | None,
        now: float,
        tried: frozenset[WorkerId],
        adapters: tuple[str, ...],
    ) -> tuple[Weighed | None, Excluded]:
        """Home first; as long as the best so far costs more than the margin, the next shard is asked too, and kept
        when it is better by more than the margin. Also who was left out of the shards that were asked, and why."""
        margin_s = self.spill_margin_s
        best: Weighed | None = None
        excluded: Excluded = ()
        first: int | None = None
        for number in self._shards_of(pool, ask):
            first = number if first is None else first
            shard, left_out = eligible(pool, pool.shards[number], request, blocks, tried)
            excluded += left_out
            if not shard.workers:
                continue
            found = self._weigh(pool, shard, ask, blocks, unplaced, now, adapters)
            found.number, found.first = number, first
            if best is not None and found.cost + margin_s >= best.cost:
                break
            best = found
            if best.cost <= margin_s:
                break
        return best, excluded

    def _shards_of(self, pool: Pool, ask: Ask) -> Sequence[int]:
        """The order in which shards are asked. A session goes on in the shard where it is; a prompt of unknown tokens
        has no home."""
        count = len(pool.shards)
        numbers = order(self._rng.getrandbits(64) if ask.leading is None else ask.leading, count)
        at = pool.shard_of(ask.home) if ask.home is not None else None
        return numbers if at is None else [at, *(number for number in numbers if number != at)]

    def _weigh(
        self,
        pool: Pool,
        shard: Shard,
        ask: Ask,
        blocks: PrefixBlocks,
        unplaced: str | None,
        now: float,
        adapters: tuple[str, ...],
    ) -> Weighed:
        """The best of these workers for a request with these adapters."""
        workers, slots, mask, _, places = shard
        overlaps: Overlaps | None = None
        if blocks.chains:
            overlaps = self._index.overlap(blocks, mask)
            raw = overlaps.tokens_of(slots)
            if blocks.text is not None:
                raw = list(map(max, raw, self._index.overlap(blocks.text, mask).tokens_of(slots)))
        else:
            raw = [0] * len(workers)
        longest = max(raw)
        # Where all have as much, nobody would compute it again.
        if longest and overlaps is not None and blocks.text is None and min(raw) < longest:
            computing = overlaps.computing(longest)
            if computing:
                ask = ask.beside(computing, longest)
        trusts = [worker.trust for worker in workers]
        home = None if ask.home is None else places.get(ask.home)
        view = self._view(pool, shard, raw, trusts, overlaps, home)
        if adapters:
            view = view._replace(absent=[worker.adapters.absent(adapters) for worker in workers])
        scores = self.policy.score(ask, view, now)
        at = pick(self.policy, view, scores, session=unplaced, rng=self._rng)
        return Weighed(shard, at, scores.costs[at], scores, raw, trusts, view, overlaps)

    def _view(
        self,
        pool: Pool,
        shard: Shard,
        raw: list[int],
        trusts: list[float],
        overlaps: Overlaps | None,
        home: int | None,
    ) -> View:
        workers, slots, mask, _, _ = shard
        if trusts.count(1.0) == len(trusts):  # nearly always
            hits = raw.copy()
        else:
            hits = [int(hit * trust) for hit, trust in zip(raw, trusts, strict=True)]
        held = self._index.gpu_tokens(slots)
        read_s: list[float] | None = None
        # Asking each overlap for its slow part costs as much as scoring: only where a slower tier holds anything.
        if overlaps is not None and self._index.slow_slots & mask:
            for position, worker in enumerate(workers):
                slow = overlaps.slow(worker.slot)
                if slow:
                    read_s = read_s or [0.0] * len(workers)
                    hits[position], read_s[position] = self._slow_hit(pool, worker, hits[position], slow.items())
        return View(workers, hits, held, read_s, None, home)

    def _slow_hit(self, pool: Pool, worker: Worker, hit: int, slow: Iterable[tuple[Tier, int]]) -> tuple[int, float]:
        """Overlap that pays, and the seconds to read its slow part: each tier counts when reading is the faster."""
        seconds = 0.0
        for tier, tokens in slow:
            read_s = self.slow_reads.read_s(tier, tokens)
            if read_s < worker.slowdown * tokens * pool.rates.prefill.token_s:
                seconds += read_s
            else:
                hit = max(0, hit - tokens)
        return hit, seconds
