"""Joins the core: which worker gets a request, and what is kept until the request is over.

Rules:
1. `route` decides and reserves in one synchronous step. Nothing may happen between reading loads and counting the
   request; every caller gets a lease.
2. A lease is settled exactly once, whatever happened to the request; later calls return the same outcome. Settling
   never waits for anything.
3. A decision enters the request's blocks into the index for its worker at once, before any event says so. They stay
   while its prefill runs and `speculative_ttl_s` longer, by when the worker's own events have confirmed them; a
   request that ends before its first byte takes them back at once. Where no event will say so they are remembered
   when the prefill is over (`kv.approximate`), and what the worker then reports as cached corrects that.
4. `explain` is the same computation without the reservation.
5. Overlaps are believed as far as the worker's trust goes: the score sees overlap times trust, the decision record the
   overlap itself, and a route miss is measured against the latter.
6. What a prediction rested on is kept with its lease, so that a miss can be told a cause when the request has ended;
   a request that hit costs a comparison.

It keeps no clock and does no I/O: `now` is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from gateway.checks import Basis, Checks
from gateway.errors import BadRequest, NoWorker, UnknownModel
from gateway.kv import KvIndex, Overlaps, Remembered, Speculation
from gateway.policy import LEADING_TOKENS, Ask, Candidates, Policy, View, pick
from gateway.pool import Fleet, Pool, Reservation, RetryBudget, Sessions, Worker, eligible
from gateway.records import (
    Decision,
    Ending,
    Endpoint,
    InferenceRequest,
    Outcome,
    PrefixBlocks,
    PrefixMode,
    Result,
    Slot,
    StageTimes,
    Terms,
    TextPrompt,
    Tier,
    TokenPrompt,
    WorkerId,
)

_RETRY_AFTER_S = 1.0
"""What a client is told when no worker is ready: about one probe period."""

_NO_ANSWER = frozenset({Endpoint.EMBEDDINGS, Endpoint.RERANK, Endpoint.SCORE, Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Endpoints that generate no tokens."""


_MAX_CHOICES = 128
"""OpenAI's limit of `n`. The client's number may be any; what is reserved for one request must stay a sane amount."""

_SLOW_TIERS = (Tier.CPU, Tier.DISK, Tier.REMOTE)

_OWN_S = Terms._fields.index("own_s")


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`read_tokens_per_s` is how fast a worker brings blocks of a slow tier back to its GPU: a first figure for hosts
    over PCIe, local NVMe and the network; a slow-tier overlap only counts where reading beats recomputing."""

    speculative_ttl_s: float = 2.0
    recent_decisions: int = 256
    max_sessions: int = 1_000_000
    session_ttl_s: float = 3600.0
    cpu_read_tokens_per_s: float = 60_000.0
    disk_read_tokens_per_s: float = 20_000.0
    remote_read_tokens_per_s: float = 40_000.0

    def read_s(self, tier: Tier, tokens: int) -> float:
        """Seconds to read `tokens` from a tier."""
        match tier:
            case Tier.GPU:
                return 0.0
            case Tier.CPU:
                return tokens / self.cpu_read_tokens_per_s
            case Tier.DISK:
                return tokens / self.disk_read_tokens_per_s
            case Tier.REMOTE:
                return tokens / self.remote_read_tokens_per_s


@dataclass(slots=True)
class Recent:
    """A decision, and its outcome once there is one."""

    decision: Decision
    outcome: Outcome | None = None


@dataclass(slots=True)
class _Choice:
    """What `route` and `explain` have in common."""

    decision: Decision
    worker: Worker
    pool: Pool
    hit: int
    own_s: float
    output_tokens: int
    slow: int
    text: bool
    overlaps: Overlaps | None


@dataclass(slots=True)
class _Booking:
    """What one lease holds: the reservation on its worker, and the blocks promised to the index while they last."""

    worker: Worker
    reservation: Reservation
    speculation: Speculation | None
    blocks: PrefixBlocks
    beside: Speculation | None = None
    """The same for the blocks of its text, where its token ids are told by an engine."""
    remembered: Remembered | None = None
    closed: bool = False


class _Ledger:
    """Open bookings: counts them on workers and in the index, and takes both back."""

    __slots__ = ("_fading", "_fleet", "_index", "_ttl_s", "open")

    def __init__(self, fleet: Fleet, index: KvIndex, ttl_s: float) -> None:
        self._fleet = fleet
        self._index = index
        self._ttl_s = ttl_s
        self._fading: deque[tuple[float, Speculation]] = deque()
        """Promises of prefilled requests, soonest end first (every one lives equally long)."""
        self.open = 0

    def book(
        self, worker: Worker, reservation: Reservation, blocks: PrefixBlocks, overlaps: Overlaps | None, now: float
    ) -> _Booking:
        self.open += 1
        self._fleet.reserve(worker, reservation, now)
        speculation = self._index.speculate(worker.slot, blocks, overlaps) if blocks.chains else None
        beside = self._index.speculate(worker.slot, blocks.text) if blocks.text is not None else None
        return _Booking(worker, reservation, speculation, blocks, beside)

    def prefilled(self, booking: _Booking, now: float) -> bool:
        """True when it made good for a failure of the worker."""
        worker, blocks, reservation = booking.worker, booking.blocks, booking.reservation
        credited = worker.health.watched and self._fleet.answered(worker, now, sent_at=reservation.sent_at)
        worker.first_byte(reservation, now)
        if booking.speculation is not None:
            booking.remembered = self._index.remember(worker.slot, blocks, worker.kv_capacity, now)
            if booking.remembered is not None:
                self._retract(booking)
                return credited
            self._fading.append((now + self._ttl_s, booking.speculation))
            if booking.beside is not None:
                self._fading.append((now + self._ttl_s, booking.beside))
            booking.speculation = booking.beside = None
        return credited

    def close(self, booking: _Booking, ending: Ending, *, credited: bool) -> None:
        if booking.closed:
            return
        booking.closed = True
        now = ending.ended_at
        self.open -= 1
        self._fleet.ended(booking.worker, ending, sent_at=booking.reservation.sent_at, credited=credited)
        self._fleet.release(booking.worker, booking.reservation, now)
        self._retract(booking)

    def _retract(self, booking: _Booking) -> None:
        for speculation in (booking.speculation, booking.beside):
            if speculation is not None:
                self._index.retract(speculation)
        booking.speculation = booking.beside = None

    def reported(self, booking: _Booking, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """The worker's own figures for a request that was remembered."""
        known, worker = booking.remembered, booking.worker
        if known is not None and prompt_tokens > 0:
            # Tokens of a text are an estimate: brought to its scale.
            text = booking.blocks.text or booking.blocks
            delivered = cached_tokens * text.tokens / prompt_tokens if known.text else cached_tokens
            sent_at = booking.reservation.sent_at
            self._index.contradict(worker.slot, known, delivered=delivered, sent_at=sent_at, now=now)

    def expire(self, now: float) -> None:
        fading = self._fading
        while fading and fading[0][0] <= now:
            self._index.retract(fading.popleft()[1])


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
    ) -> None:
        self.fleet = fleet
        self.policy = policy
        self.settings = settings or RouterSettings()
        self.sessions = Sessions(max_sessions=self.settings.max_sessions, ttl_s=self.settings.session_ttl_s)
        self._index = index
        self._ledger = _Ledger(fleet, index, self.settings.speculative_ttl_s)
        self._checks = Checks(index)
        self._rng = rng
        self._slow_slots = 0
        self._recent: deque[Recent] = deque(maxlen=self.settings.recent_decisions)

    # ---------------------------------------------------------------- looking

    @property
    def open_leases(self) -> int:
        """Leases not settled yet."""
        return self._ledger.open

    def pool(self, model: str) -> Pool:
        """The pool that serves `model`; with "" (SGLang's own paths name no model) the only model's.

        Raises UnknownModel, naming a few that are served, and BadRequest for "" among several models.
        """
        pools = self.fleet.pools
        pool = pools.get(model)
        if pool is None and not model:
            bases = {pool.model for pool in pools.values()}
            if len(bases) > 1:
                raise BadRequest("model is missing: several models are served here", param="model")
            pool = pools.get(bases.pop()) if bases else None
        if pool is None:
            raise UnknownModel.among(model, pools)
        return pool

    def recent(self) -> Sequence[Recent]:
        """The last decisions, newest first."""
        return tuple(reversed(self._recent))

    def explain(self, request: InferenceRequest, blocks: PrefixBlocks, now: float) -> Decision:
        """The decision `route` would make, without making it. Raises what `route` raises."""
        return self._choose(request, blocks, now, frozenset()).decision

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
        choice = self._choose(request, blocks, now, excluded)
        worker = choice.worker
        reservation = Reservation(
            new_tokens=blocks.tokens - choice.hit,
            cached_tokens=choice.hit,
            output_tokens=choice.output_tokens,
            prefill_s=choice.own_s,
            streamed=request.stream,
            sent_at=now,
        )
        booking = self._ledger.book(worker, reservation, blocks, choice.overlaps, now)
        choice.pool.rates.learn_prompt(blocks.tokens)
        if instead_of is None:
            choice.pool.retries.request(now)
        if request.session is not None:
            self.sessions.keep(request.session, worker.id, now)
        record = Recent(choice.decision)
        self._recent.append(record)
        basis = self._checks.basis(
            worker,
            choice.decision,
            blocks,
            booking.speculation,
            slow=choice.slow,
            text=choice.text,
            instead_of=None if instead_of is None else instead_of.basis,
        )
        return Lease(self._ledger, self._checks, booking, request, choice.pool, record, basis)

    def expire(self, now: float) -> None:
        """About every half second: what has a life time ends."""
        self._ledger.expire(now)
        self._index.expire(now)
        self.sessions.expire(now)
        self.fleet.tick(now)
        # Asking each overlap for its slow part costs as much as scoring: only done once a slower tier holds anything.
        resident = self._index.resident
        self._slow_slots = sum(
            1 << worker.slot
            for worker in self.fleet.workers.values()
            if any(resident(worker.slot, tier) for tier in _SLOW_TIERS)
        )

    def _choose(
        self, request: InferenceRequest, blocks: PrefixBlocks, now: float, tried: frozenset[WorkerId]
    ) -> _Choice:
        pool = self.pool(request.model)
        workers, excluded = eligible(pool, request.endpoint, blocks, tried)
        if not workers:
            raise NoWorker(f"no worker of model {pool.name!r} is ready", retry_after_s=_RETRY_AFTER_S)
        slots = pool.slots if workers is pool.ready else [worker.slot for worker in workers]
        tokens = blocks.tokens
        chains = blocks.chains
        overlaps: Overlaps | None = None
        if chains:
            overlaps = self._index.overlap(blocks, pool.mask)
            raw = overlaps.tokens_of(slots)
            if blocks.text is not None:
                raw = list(map(max, raw, self._index.overlap(blocks.text, pool.mask).tokens_of(slots)))
            view = self._view(pool, workers, slots, raw, overlaps)
        else:
            raw = [0] * len(workers)
            view = self._view(pool, workers, slots, raw, None)
        session = request.session
        home = self.sessions.find(session, now) if session is not None else None
        rates = pool.rates
        output = self._expected_output(request, pool)
        overhead_s, token_s, pair_s = rates.prefill
        ask = Ask(tokens, output, pool.block_size, overhead_s, token_s, pair_s, home, _leading(blocks))
        rows = self.policy.score(ask, view, now)
        unplaced = session if home is None else None
        at = pick(self.policy, view, rows, session=unplaced, rng=self._rng)
        worker = workers[at]
        decision = Decision(
            request_id=request.request_id,
            model=pool.name,
            pool=worker.spec.pool,
            policy=self.policy.name,
            worker=worker.id,
            predicted_tokens=raw[at],
            available_tokens=max(raw),
            prompt_tokens=tokens,
            block_size=blocks.block_size,
            mode=blocks.mode,
            candidates=Candidates([w.id for w in workers], raw, [w.trust for w in workers], rows),
            excluded=excluded,
            affinity=_affinity(session, home, worker.id),
            reason=blocks.reason,
            decided_at=now,
        )
        hit = view.hits[at]
        # Policies that do not price in seconds leave the terms at 0; what others wait for must be known all the same.
        own_s = rows[at][_OWN_S] or worker.slowdown * rates.prefill_s(tokens - hit, hit)
        bit = 1 << worker.slot
        slow = sum(overlaps.slow(worker.slot).values()) if overlaps is not None and self._slow_slots & bit else 0
        text = blocks.mode is PrefixMode.APPROXIMATE
        if blocks.text is not None and overlaps is not None:
            text = overlaps.tokens(worker.slot) < raw[at]
        return _Choice(decision, worker, pool, hit, own_s, output, slow, text, overlaps)

    def _view(
        self, pool: Pool, workers: Sequence[Worker], slots: Sequence[Slot], raw: list[int], overlaps: Overlaps | None
    ) -> View:
        size = pool.block_size
        hits = [
            hit if worker.trust == 1.0 else int(hit * worker.trust) for worker, hit in zip(workers, raw, strict=True)
        ]
        held = [
            blocks * size if worker.kv_capacity else 0
            for worker, blocks in zip(workers, self._index.gpu_blocks(slots), strict=True)
        ]
        read_s: list[float] | None = None
        if overlaps is not None and self._slow_slots & pool.mask:
            for position, worker in enumerate(workers):
                slow = overlaps.slow(worker.slot)
                if slow:
                    read_s = read_s or [0.0] * len(workers)
                    hits[position], read_s[position] = self._slow_hit(pool, worker, hits[position], slow.items())
        return View(workers, hits, held, read_s)

    def _slow_hit(self, pool: Pool, worker: Worker, hit: int, slow: Iterable[tuple[Tier, int]]) -> tuple[int, float]:
        """Overlap that pays, and the seconds to read its slow part: each tier counts when reading is the faster."""
        seconds = 0.0
        for tier, tokens in slow:
            read_s = self.settings.read_s(tier, tokens)
            if read_s < worker.slowdown * tokens * pool.rates.prefill.token_s:
                seconds += read_s
            else:
                hit = max(0, hit - tokens)
        return hit, seconds

    @staticmethod
    def _expected_output(request: InferenceRequest, pool: Pool) -> int:
        """Tokens the answer is expected to take, rounded up to whole blocks as the engine reserves them."""
        if request.endpoint in _NO_ANSWER:
            return 0
        expected = int(pool.rates.output_tokens)
        if request.max_tokens is not None:
            expected = min(expected, request.max_tokens)
        return _answers(request) * (expected // pool.block_size + 1) * pool.block_size


class Lease:
    """A reservation on `worker`, made by one decision. Not shared between tasks; settled by whoever holds it."""

    __slots__ = (
        "_booking",
        "_checks",
        "_credited",
        "_first_byte_at",
        "_ledger",
        "_outcome",
        "_pool",
        "_record",
        "_request",
        "basis",
        "decision",
        "worker",
    )

    def __init__(
        self,
        ledger: _Ledger,
        checks: Checks,
        booking: _Booking,
        request: InferenceRequest,
        pool: Pool,
        record: Recent,
        basis: Basis,
    ) -> None:
        self.worker = booking.worker
        self.decision = record.decision
        self.basis = basis
        self._checks = checks
        self._ledger = ledger
        self._booking = booking
        self._request = request
        self._pool = pool
        self._record = record
        self._first_byte_at: float | None = None
        self._credited = False
        """Its first byte made good for a failure of the worker: taken back when the answer breaks off."""
        self._outcome: Outcome | None = None

    @property
    def retries(self) -> RetryBudget:
        """Its pool's."""
        return self._pool.retries

    def first_byte(self, now: float) -> None:
        """The first body byte of a successful answer: for a stream, this request's prefill is over. Later calls, and
        calls after `settle`, change nothing."""
        if self._first_byte_at is None and self._outcome is None:
            self._first_byte_at = now
            self._credited = self._ledger.prefilled(self._booking, now)

    def settle(self, ending: Ending, *, started_at: float, stages: StageTimes, retries: int = 0) -> Outcome:
        """The request is over. Puts the in-flight numbers back, teaches the speeds and makes the outcome; once.

        `started_at` is when the request reached the gateway, seconds.
        """
        if self._outcome is not None:
            return self._outcome
        self._ledger.close(self._booking, ending, credited=self._credited)  # first: nothing below may keep it open
        outcome = self._outcome = self._record.outcome = self._make_outcome(ending, started_at, stages, retries)
        if ending.usage is not None and outcome.delivered_tokens is not None:
            self._ledger.reported(self._booking, ending.usage.prompt_tokens, outcome.delivered_tokens, ending.ended_at)
        self._learn(ending, outcome)
        return outcome

    def _learn(self, ending: Ending, outcome: Outcome) -> None:
        if ending.result is not Result.COMPLETED or not outcome.completion_tokens:
            return
        rates = self._pool.rates
        rates.learn_text(self._booking.blocks.text_bytes, outcome.prompt_tokens)
        rates.learn_output(outcome.completion_tokens / _answers(self._request))
        if outcome.inter_token_s is not None:
            rates.learn_inter_token(float(self.worker.inflight_requests + 1), outcome.inter_token_s)

    def _make_outcome(self, ending: Ending, started_at: float, stages: StageTimes, retries: int) -> Outcome:
        decision, usage, request = self.decision, ending.usage, self._request
        # Of several prompts engines report one's cached tokens: nothing to hold against the prediction for all.
        delivered = usage.cached_tokens if usage is not None and _prompts(request) == 1 else None
        prompt_tokens = usage.prompt_tokens if usage is not None else decision.prompt_tokens
        missed_tokens, cause = self._checks.settle(self.basis, delivered, prompt_tokens, ending.ended_at)
        first_at = ending.first_byte_at if ending.first_byte_at is not None else self._first_byte_at
        return Outcome(
            request_id=request.request_id,
            endpoint=request.endpoint,
            model=decision.model,
            pool=decision.pool,
            worker=self.worker.id,
            result=ending.result,
            status=ending.status,
            stream=request.stream,
            started_at=started_at,
            ended_at=ending.ended_at,
            prompt_tokens=prompt_tokens,
            available_tokens=decision.available_tokens,
            predicted_tokens=decision.predicted_tokens,
            delivered_tokens=delivered,
            completion_tokens=usage.completion_tokens if usage is not None else None,
            missed_tokens=missed_tokens,
            miss_cause=cause,
            ttft_s=first_at - started_at if first_at is not None else None,
            inter_token_s=_inter_token_s(ending, first_at, _answers(request)) if request.stream else None,
            chunks=ending.chunks,
            retries=retries,
            affinity=decision.affinity,
            mode=decision.mode,
            stages=stages,
            error_code=ending.error_code,
            tenant=request.tenant,
        )


# --------------------------------------------------------------------------- small rules


def _prompts(request: InferenceRequest) -> int:
    match request.prompt:
        case TextPrompt(texts):
            return len(texts)
        case TokenPrompt(token_lists):
            return len(token_lists)
        case _:
            return 1


def _answers(request: InferenceRequest) -> int:
    """How many texts the worker is to write: choices of each prompt."""
    return _prompts(request) * min(request.choices, _MAX_CHOICES)


def _leading(blocks: PrefixBlocks) -> int | None:
    """Name of the first prompt's leading blocks, `LEADING_TOKENS` of them or what there is."""
    blocks = blocks.text or blocks  # the same whether an engine has told the token ids or not
    if not blocks.chains or not blocks.chains[0].keys:
        return None
    keys = blocks.chains[0].keys
    return keys[min(len(keys), max(1, LEADING_TOKENS // blocks.block_size)) - 1]


def _affinity(session: str | None, home: WorkerId | None, chosen: WorkerId) -> str:
    if session is None:
        return "none"
    if home is None:
        return "new"
    return "kept" if home == chosen else "moved"


def _inter_token_s(ending: Ending, first_at: float | None, answers: int) -> float | None:
    """Mean seconds between tokens of one answer of a stream, None when too short to say."""
    if first_at is None or ending.last_byte_at is None or ending.usage is None:
        return None
    tokens = ending.usage.completion_tokens / answers
    return max(0.0, ending.last_byte_at - first_at) / (tokens - 1.0) if tokens >= 2.0 else None
