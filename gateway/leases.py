"""What a decision reserved, kept until its request is over.

Rules:
1. A lease is settled exactly once, whatever happened to the request; later calls return the same outcome. Settling
   never waits for anything.
2. A decision enters the request's blocks into the index for its worker at once, before any event says so. They stay
   while its prefill runs and `speculative_ttl_s` longer, by when the worker's own events have confirmed them; a
   request that ends before its first byte takes them back at once. Where no event will say so they are remembered
   when the prefill is over (`kv.approximate`), and what the worker then reports as cached corrects that.

Who gets a lease is decided in `router`. No clock and no I/O: `now` is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.checks import Basis, Checks
from gateway.errors import OVERTAKEN
from gateway.insight import PrefixInsight
from gateway.kv import KvIndex, Overlaps, Remembered, Speculation
from gateway.pool import Fleet, Hedging, Kind, Pool, Reservation, RetryBudget, Worker
from gateway.records import (
    Decision,
    Ending,
    Hedged,
    InferenceRequest,
    Outcome,
    PrefixBlocks,
    Result,
    StageTimes,
    TextPrompt,
    TokenPrompt,
)

_MAX_CHOICES = 128
"""OpenAI's limit of `n`. The client's number may be any; what is reserved for one request must stay a sane amount."""


_TOLD = frozenset((Result.COMPLETED, Result.HEDGED))
"""How a request or a copy of it ends whose status the worker has said."""


@dataclass(slots=True)
class Recent:
    """A decision, and its outcome once there is one."""

    decision: Decision
    outcome: Outcome | None = None


@dataclass(slots=True)
class Booking:
    """What one lease holds: the reservation on its worker, and the blocks promised to the index while they last."""

    worker: Worker
    reservation: Reservation
    speculation: Speculation | None
    blocks: PrefixBlocks
    beside: Speculation | None = None
    """The same for the blocks of its text, where its token ids are told by an engine."""
    remembered: Remembered | None = None
    closed: bool = False


class Watcher(Protocol):
    """Is told of every booking, synchronously (`replicas.Journal`; the simulator's in a test of several routers)."""

    def placed(self, booking: Booking) -> None:
        """It was made."""
        ...

    def prefilled(self, booking: Booking) -> None:
        """Its worker has answered: the prefill is over."""
        ...

    def closed(self, booking: Booking) -> None:
        """Its request is over. Comes once, also without `prefilled` before it."""
        ...

    def pinned(self, session: str, worker: Worker) -> None:
        """The session's latest request went there."""
        ...


def _nobody_waits() -> None:
    pass


class Ledger:
    """Open bookings: counts them on workers and in the index, and takes both back."""

    __slots__ = ("_fading", "_fleet", "_index", "insight", "on_room", "open", "ttl_s", "watcher")

    def __init__(self, fleet: Fleet, index: KvIndex, ttl_s: float, insight: PrefixInsight) -> None:
        self.insight = insight
        self.watcher: Watcher | None = None
        self._fleet = fleet
        self._index = index
        self.ttl_s = ttl_s
        self._fading: deque[tuple[float, Speculation]] = deque()
        """Promises of prefilled requests, soonest end first (every one lives equally long, until `ttl_s` changes)."""
        self.open = 0
        self.on_room: Callable[[], None] = _nobody_waits

    def book(
        self, worker: Worker, reservation: Reservation, blocks: PrefixBlocks, overlaps: Overlaps | None, now: float
    ) -> Booking:
        self._fleet.reserve(worker, reservation, now)
        self.open += 1
        booking = Booking(worker, reservation, None, blocks)
        try:
            if blocks.chains:
                booking.speculation = self._index.speculate(worker.slot, blocks, overlaps)
            if blocks.text is not None:
                booking.beside = self._index.speculate(worker.slot, blocks.text)
            if self.watcher is not None:
                self.watcher.placed(booking)
        except Exception:
            self.cancel(booking, now)
            raise
        return booking

    def cancel(self, booking: Booking, now: float) -> None:
        """A bug has kept it from becoming a lease: nobody else could close it."""
        self.close(booking, Ending(Result.REFUSED, 0, now), credited=False)

    def prefilled(self, booking: Booking, now: float) -> bool:
        """True when it made good for a failure of the worker."""
        worker, blocks, reservation = booking.worker, booking.blocks, booking.reservation
        credited = worker.health.watched and self._fleet.answered(worker, now, sent_at=reservation.sent_at)
        worker.first_byte(reservation, now)
        if self.watcher is not None:
            self.watcher.prefilled(booking)
        if booking.speculation is not None:
            promised = (booking.speculation,) if booking.beside is None else (booking.speculation, booking.beside)
            known = self._index.remember(worker.slot, blocks, worker.kv_capacity, now, promised=promised)
            if known is not None:
                booking.remembered = known
                booking.speculation = booking.beside = None
                return credited
            self._fading.append((now + self.ttl_s, booking.speculation))
            if booking.beside is not None:
                self._fading.append((now + self.ttl_s, booking.beside))
            booking.speculation = booking.beside = None
        return credited

    def close(self, booking: Booking, ending: Ending, *, credited: bool) -> None:
        if booking.closed:
            return
        booking.closed = True
        now = ending.ended_at
        self.open -= 1
        self._fleet.ended(booking.worker, ending, sent_at=booking.reservation.sent_at, credited=credited)
        if ending.status >= 400 and ending.result in _TOLD:
            booking.worker.heard(now)
        if ending.error_code == OVERTAKEN:
            self._fleet.overtaken(booking.worker, booking.reservation, now)
        self._fleet.release(booking.worker, booking.reservation, now)
        self._retract(booking)
        if self.watcher is not None:
            self.watcher.closed(booking)

    def _retract(self, booking: Booking) -> None:
        for speculation in (booking.speculation, booking.beside):
            if speculation is not None:
                self._index.retract(speculation)
        booking.speculation = booking.beside = None

    def reported(self, booking: Booking, prompt_tokens: int, cached_tokens: int, now: float) -> None:
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


def kind_of(output_tokens: int, *, streamed: bool) -> Kind:
    """What the beginning of an answer waits for."""
    if streamed:
        return Kind.STREAM
    return Kind.TEXT if output_tokens else Kind.OTHER


def writing_s(pool: Pool, output_tokens: int, running: int) -> float:
    """Seconds to write an answer while so many requests run on its worker, its own counted."""
    floor_s, each_s = pool.rates.inter_token
    return output_tokens * (floor_s + each_s * running)


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
        ledger: Ledger,
        checks: Checks,
        booking: Booking,
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

    @property
    def hedging(self) -> Hedging:
        """Its pool's."""
        return self._pool.hedging

    @property
    def kind(self) -> Kind:
        """What the beginning of the answer waits for."""
        reservation = self._booking.reservation
        return kind_of(reservation.output_tokens, streamed=reservation.streamed)

    @property
    def sent_at(self) -> float:
        """When it was made, seconds."""
        return self._booking.reservation.sent_at

    def expected_s(self) -> float:
        """Seconds from then until the answer should begin, with the batch that its worker has now."""
        reservation = self._booking.reservation
        seconds = reservation.wait_s + reservation.prefill_s
        if self.kind is Kind.TEXT:
            seconds += writing_s(self._pool, reservation.output_tokens, self.worker.inflight_requests)
        return seconds

    def first_byte(self, now: float) -> None:
        """The first body byte of a successful answer: for a stream, this request's prefill is over. Later calls, and
        calls after `settle`, change nothing."""
        if self._first_byte_at is None and self._outcome is None:
            self._first_byte_at = now
            self._credited = self._ledger.prefilled(self._booking, now)
            self._ledger.on_room()

    def settle(
        self,
        ending: Ending,
        *,
        started_at: float,
        stages: StageTimes,
        retries: int = 0,
        hedged: Hedged | None = None,
    ) -> Outcome:
        """The request is over. Puts the in-flight numbers back, teaches the speeds and makes the outcome; once.

        `started_at` is when the request reached the gateway, seconds; `hedged` what became of its second copy.
        """
        if self._outcome is not None:
            return self._outcome
        self._ledger.close(self._booking, ending, credited=self._credited)  # first: nothing below may keep it open
        outcome = self._outcome = self._record.outcome = self._make_outcome(ending, started_at, stages, retries, hedged)
        if ending.usage is not None and outcome.delivered_tokens is not None:
            self._ledger.reported(self._booking, ending.usage.prompt_tokens, outcome.delivered_tokens, ending.ended_at)
        self._learn(ending, outcome)
        if ending.result is Result.COMPLETED:
            self._ledger.insight.observe(self._pool.name, self._booking.blocks)
        self._ledger.on_room()
        return outcome

    def _learn(self, ending: Ending, outcome: Outcome) -> None:
        if ending.result is not Result.COMPLETED or not outcome.completion_tokens:
            return
        rates = self._pool.rates
        rates.learn_text(self._booking.blocks.text_bytes, outcome.prompt_tokens)
        rates.learn_output(outcome.completion_tokens / answers(self._request))
        if outcome.inter_token_s is not None:
            rates.learn_inter_token(float(self.worker.inflight_requests + 1), outcome.inter_token_s)

    def _make_outcome(
        self, ending: Ending, started_at: float, stages: StageTimes, retries: int, hedged: Hedged | None
    ) -> Outcome:
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
            promised_tokens=self.basis.only_promised,
            slow_tokens=decision.slow_tokens,
            delivered_tokens=delivered,
            completion_tokens=usage.completion_tokens if usage is not None else None,
            missed_tokens=missed_tokens,
            miss_cause=cause,
            ttft_s=first_at - started_at if first_at is not None else None,
            inter_token_s=_inter_token_s(ending, first_at, answers(request)) if request.stream else None,
            chunks=ending.chunks,
            retries=retries,
            hedged=hedged,
            affinity=decision.affinity,
            mode=decision.mode,
            stages=stages,
            error_code=ending.error_code,
            tenant=request.tenant,
            trace=ending.trace,
        )


def _prompts(request: InferenceRequest) -> int:
    prompt = request.prompt
    if isinstance(prompt, TextPrompt):
        return len(prompt.texts)
    return len(prompt.token_lists) if isinstance(prompt, TokenPrompt) else 1


def answers(request: InferenceRequest) -> int:
    """How many texts the worker is to write: choices of each prompt."""
    return _prompts(request) * min(request.choices, _MAX_CHOICES)


def _inter_token_s(ending: Ending, first_at: float | None, answers: int) -> float | None:
    """Mean seconds between tokens of one answer of a stream, None when too short to say."""
    if first_at is None or ending.last_byte_at is None or ending.usage is None:
        return None
    tokens = ending.usage.completion_tokens / answers
    return max(0.0, ending.last_byte_at - first_at) / (tokens - 1.0) if tokens >= 2.0 else None
