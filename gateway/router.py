"""Joins the core: which worker gets a request.

Rules:
1. `route` decides and reserves in one synchronous step. Nothing may happen between reading loads and counting the
   request; every caller gets a lease (`leases`).
2. `explain` is the same computation without the reservation.
3. The score sees overlap times trust (`weighing`), the decision record the overlap itself, and a route miss is measured
   against the latter.
4. What a prediction rested on is kept with its lease, so that a miss can be told a cause when the request has ended;
   a request that hit costs a comparison.

It keeps no clock and does no I/O: `now` is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from types import MappingProxyType

from msgspec import structs

from gateway.checks import Checks
from gateway.errors import BadRequest, NoWorker, UnknownModel
from gateway.insight import PrefixInsight
from gateway.kv import KvIndex, Overlaps
from gateway.leases import Booking, Lease, Ledger, Recent, Watcher, answers
from gateway.policy import LEADING_TOKENS, Ask, Candidates, Policy, Scores
from gateway.pool import (
    SLOW,
    Excluded,
    Fleet,
    Pool,
    Reservation,
    Routes,
    Sessions,
    Worker,
    WorkerState,
    admits,
    charge,
    pay,
)
from gateway.records import (
    BlockKey,
    Decision,
    Endpoint,
    InferenceRequest,
    PrefixBlocks,
    PrefixMode,
    Terms,
    Tier,
    WorkerId,
)
from gateway.weighing import Scales, SlowReads, Weighed

_NO_ANSWER = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Endpoints that generate no tokens."""

_NOTHING_SLOW: Mapping[Tier, int] = MappingProxyType({})

_MOVED = {
    "tried": "moved_failed",
    WorkerState.EJECTED.value: "moved_ejected",
    WorkerState.DRAINING.value: "moved_drained",
    WorkerState.GONE.value: "moved_gone",
}
"""Why a session's worker was no candidate -> what is said of the session."""

_OWN_S = Terms._fields.index("own_s")
_WAIT_S = Terms._fields.index("wait_s")
_IDLE_S = Terms._fields.index("idle_s")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`spill_margin_s` is how much cheaper another shard must be, `routes` what the names of models stand for."""

    speculative_ttl_s: float = 2.0
    recent_decisions: int = 256
    max_sessions: int = 1_000_000
    session_ttl_s: float = 3600.0
    spill_margin_s: float = 0.1
    routes: Routes = field(default_factory=Routes)
    slow_reads: SlowReads = field(default_factory=SlowReads)


@dataclass(slots=True)
class Choice:
    """A decision that has not been made yet. `wait_s` is how long its worker is busy (0 where the policy does not
    think in seconds), `new_tokens` what it computes; `scores` are those of all `candidates`."""

    decision: Decision
    worker: Worker
    pool: Pool
    candidates: Sequence[Worker]
    scores: Scores
    at: int
    new_tokens: int
    own_s: float
    wait_s: float
    idle_s: float
    output_tokens: int
    slow: int
    text: bool
    overlaps: Overlaps | None


class Router:
    """One for a process. `policy` and `rng` are given by the composition root, as is the index the feeds write to."""

    def __init__(
        self,
        fleet: Fleet,
        index: KvIndex,
        policy: Policy,
        *,
        rng: Random,
        settings: RouterSettings | None = None,
        insight: PrefixInsight | None = None,
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.settings = settings or RouterSettings()
        self.sessions = Sessions(max_sessions=self.settings.max_sessions, ttl_s=self.settings.session_ttl_s)
        self.insight = insight or PrefixInsight()
        """What answered prompts have in common."""
        self._index = index
        self._ledger = Ledger(fleet, index, self.settings.speculative_ttl_s, self.insight)
        self._checks = Checks(index)
        self._scales = Scales(
            index, policy, rng=rng, slow_reads=self.settings.slow_reads, spill_margin_s=self.settings.spill_margin_s
        )
        self._rng = rng
        self._recent: deque[Recent] = deque(maxlen=self.settings.recent_decisions)

    def on_room(self, call: Callable[[], None]) -> None:
        """`call` whenever a prefill or a request has ended, so that somebody else may have the worker."""
        self._ledger.on_room = call

    # ---------------------------------------------------------------- looking

    @property
    def open_leases(self) -> int:
        """Leases not settled yet."""
        return self._ledger.open

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every booking from now on."""
        self._ledger.watcher = watcher

    def pool(self, model: str) -> Pool:
        """The pool that serves `model`; with "" (SGLang's own paths name no model) the only model's.

        Raises UnknownModel, naming a few that are served, BadRequest for "" among several models, and NoWorker when no
        worker has joined.
        """
        pools = self.fleet.pools
        pool = pools.get(model)
        if pool is None and not model:
            bases = {pool.model for pool in pools.values()}
            if len(bases) > 1:
                raise BadRequest("model is missing: several models are served here", param="model")
            pool = pools.get(bases.pop()) if bases else None
        if pool is None:
            raise UnknownModel.among(model, pools) if pools else NoWorker.joined()
        return pool

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        """The request under the served name that its own name stands for: an alias, or a version by weight."""
        if not self.settings.routes:
            return request
        target = self.settings.routes.target(request.model, request.session, pools=self.fleet.pools, rng=self._rng)
        return request if target == request.model else structs.replace(request, model=target)

    def recent(self) -> Sequence[Recent]:
        """The last decisions, newest first."""
        return tuple(reversed(self._recent))

    def holders(self, model: str, key: BlockKey) -> list[WorkerId]:
        """The workers of a served name that hold this block."""
        pool, mask = self.fleet.pools.get(model), self._index.holders(key)
        return [] if pool is None else [worker.id for worker in pool.workers if mask >> worker.slot & 1]

    def explain(self, request: InferenceRequest, blocks: PrefixBlocks, now: float) -> Decision:
        """The decision `route` would make, without making it. Raises what `route` raises."""
        return self.consider(request, blocks, now).decision

    def apply(self, policy: Policy, settings: RouterSettings) -> None:
        """From the next decision on. The length of `recent` is that of the start."""
        self.policy = self._scales.policy = policy
        self.settings = settings
        self._scales.slow_reads, self._scales.spill_margin_s = settings.slow_reads, settings.spill_margin_s
        self._ledger.ttl_s = settings.speculative_ttl_s
        self.sessions.apply(max_sessions=settings.max_sessions, ttl_s=settings.session_ttl_s)

    # ---------------------------------------------------------------- deciding

    def route(
        self,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        now: float,
        *,
        excluded: frozenset[WorkerId] = frozenset(),
        instead_of: Lease | None = None,
    ) -> Lease:
        """Choose a worker and reserve on it. `excluded` are workers tried before for this request, `instead_of` the
        lease on the last of them.

        Raises UnknownModel, and NoWorker when nobody in the pool is ready and not excluded.
        """
        return self.reserve(self.consider(request, blocks, now, excluded), request, blocks, now, instead_of=instead_of)

    def reserve(
        self,
        choice: Choice,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        now: float,
        *,
        instead_of: Lease | None = None,
        beside: Lease | None = None,
    ) -> Lease:
        """Make a decision that was considered at this moment: nothing may have happened since. `beside` is the lease on
        a worker that has the request already, and keeps it and its session."""
        worker, first = choice.worker, beside or instead_of
        reservation = Reservation(
            new_tokens=choice.new_tokens,
            cached_tokens=blocks.tokens - choice.new_tokens,
            output_tokens=choice.output_tokens,
            prefill_s=choice.own_s,
            streamed=request.stream,
            sent_at=now,
            wait_s=choice.wait_s,
            adapters=adapters_of(request, choice.pool),
        )
        rates = choice.pool.rates
        if worker.slowdown > SLOW and self.policy.wait_weight:
            charge(worker, choice.candidates, rates.prefill_s(choice.new_tokens, reservation.cached_tokens), now)
        booking = self._ledger.book(worker, reservation, blocks, choice.overlaps, now)
        try:
            return self._lease(choice, request, blocks, now, booking, first=first, beside=beside)
        except Exception:
            self._ledger.cancel(booking, now)
            raise

    def pin(self, session: str, worker: Worker, now: float) -> None:
        """The latest request of a session is with this worker."""
        self.sessions.keep(session, worker.id, now)
        if self._ledger.watcher is not None:
            self._ledger.watcher.pinned(session, worker)

    def expire(self, now: float) -> None:
        """About every half second: what has a life time ends."""
        self._ledger.expire(now)
        self._index.expire(now)
        self.sessions.expire(now)
        self.fleet.tick(now)

    def consider(
        self,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        now: float,
        tried: frozenset[WorkerId] = frozenset(),
    ) -> Choice:
        """The decision as it would be now; changes nothing. Raises what `route` raises."""
        pool = self.pool(request.model)
        session = request.session
        home = self.sessions.find(session, now) if session is not None else None
        leading = _leading(blocks)
        overhead_s, token_s, pair_s = pool.rates.prefill
        output = self._expected_output(request, pool)
        rates = pool.rates
        ask = Ask(
            blocks.tokens,
            output,
            pool.block_size,
            overhead_s,
            token_s,
            pair_s,
            home,
            leading,
            waited_s=rates.waited_s,
            settled_s=rates.settled_s,
        )
        unplaced = None if session is None or self._may_have(pool, home) else session
        adapters = adapters_of(request, pool)
        found, excluded = self._scales.best(pool, ask, request, blocks, unplaced, now, tried, adapters)
        if found is None:
            raise self._nobody(pool, request)
        at, raw, view, workers = found.at, found.raw, found.view, found.shard.workers
        row = found.scores.of(at)
        worker = workers[at]
        overlaps, bit = found.overlaps, 1 << worker.slot
        slow = overlaps.slow(worker.slot) if overlaps is not None and self._index.slow_slots & bit else _NOTHING_SLOW
        decision = Decision(
            request_id=request.request_id,
            model=pool.name,
            pool=worker.spec.pool,
            policy=self.policy.name,
            worker=worker.id,
            predicted_tokens=raw[at],
            available_tokens=max(raw),
            prompt_tokens=blocks.tokens,
            block_size=blocks.block_size,
            mode=blocks.mode,
            candidates=Candidates(found.shard.names, raw, found.trusts, found.scores),
            excluded=excluded,
            affinity="none" if session is None else self._affinity(home, found, excluded),
            reason=blocks.reason,
            decided_at=now,
            shard=found.number,
            home_shard=found.first,
            slow_tokens=slow,
        )
        hit = view.hits[at]
        # Policies that do not price in seconds leave the terms at 0; what others wait for must be known all the same.
        own_s = row[_OWN_S] or worker.slowdown * pool.rates.prefill_s(blocks.tokens - hit, hit)
        text = blocks.mode is PrefixMode.APPROXIMATE
        if blocks.text is not None and overlaps is not None:
            text = overlaps.tokens(worker.slot) < raw[at]
        return Choice(
            decision,
            worker,
            pool,
            workers,
            found.scores,
            at,
            blocks.tokens - hit,
            own_s,
            row[_WAIT_S],
            row[_IDLE_S],
            output,
            sum(slow.values()),
            text,
            overlaps,
        )

    def _lease(
        self,
        choice: Choice,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        now: float,
        booking: Booking,
        *,
        first: Lease | None,
        beside: Lease | None,
    ) -> Lease:
        """What else a decision changes, and who holds it."""
        worker, rates = choice.worker, choice.pool.rates
        decision = choice.decision
        if beside is not None:
            decision = structs.replace(decision, beside=beside.worker.id, affinity=_beside(decision.affinity))
        else:
            rates.learn_prompt(blocks.tokens)
        if choice.idle_s and decision.predicted_tokens < decision.available_tokens:
            rates.settled_s = rates.waited_s  # a prefix is brought to an idle worker: that has to be earned again
        if rates.regretted:
            pay(choice.candidates, choice.scores.costs, choice.at)
        if decision.shard != decision.home_shard:
            choice.pool.spilled += 1
        if first is None:
            choice.pool.retries.request(now)
        if request.session is not None and beside is None:
            self.pin(request.session, worker, now)
        record = Recent(decision)
        self._recent.append(record)
        basis = self._checks.basis(
            worker,
            decision,
            blocks,
            booking.speculation,
            slow=choice.slow,
            text=choice.text,
            instead_of=None if first is None else first.basis,
        )
        return Lease(self._ledger, self._checks, booking, request, choice.pool, record, basis)

    def _may_have(self, pool: Pool, home: WorkerId | None) -> bool:
        """Whether a session's worker may get requests of this pool now."""
        worker = self.fleet.workers.get(home) if home is not None else None
        return worker is not None and bool(pool.mask >> worker.slot & 1)

    def _affinity(self, home: WorkerId | None, found: Weighed, excluded: Excluded) -> str:
        """What became of a session: in one word, with the reason when it moves."""
        if home is None:
            return "new"
        if found.shard.workers[found.at].id == home:
            return "kept"
        worker = self.fleet.workers.get(home)
        if worker is None:
            return "moved_gone"
        if found.shard.mask >> worker.slot & 1:
            return "moved_busy"
        return _MOVED.get(dict(excluded).get(home, ""), "moved_other")

    @staticmethod
    def _nobody(pool: Pool, request: InferenceRequest) -> NoWorker | UnknownModel:
        if not any(admits(worker, request) for worker in pool.workers):
            return UnknownModel(f"model {pool.name!r} is not served, or not to this key", param="model")
        return NoWorker.ready(pool.name)

    @staticmethod
    def _expected_output(request: InferenceRequest, pool: Pool) -> int:
        """Tokens the answer is expected to take, rounded up to whole blocks as the engine reserves them."""
        if request.endpoint in _NO_ANSWER:
            return 0
        expected = int(pool.rates.output_tokens)
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        return answers(request) * (expected // pool.block_size + 1) * pool.block_size


# --------------------------------------------------------------------------- small rules


def adapters_of(request: InferenceRequest, pool: Pool) -> tuple[str, ...]:
    """The adapters a request needs: those its body names beside the model, else the one that its model is."""
    if request.adapters:
        return tuple(dict.fromkeys(request.adapters))
    return () if pool.adapter is None else (pool.adapter,)


def _beside(affinity: str) -> str:
    """What became of a session whose worker is not `tried` and failed, but late."""
    return "moved_late" if affinity == _MOVED["tried"] else affinity


def _leading(blocks: PrefixBlocks) -> int | None:
    """Name of the first prompt's leading blocks, `LEADING_TOKENS` of them or what there is."""
    blocks = blocks.text or blocks  # the same whether an engine has told the token ids or not
    if not blocks.chains or not blocks.chains[0].keys:
        return None
    keys = blocks.chains[0].keys
    return keys[min(len(keys), max(1, LEADING_TOKENS // blocks.block_size)) - 1]
