"""A second copy of a request whose worker is late: two workers race for the first byte.

Rules:
1. At most one second copy a request, of a request that may be computed twice without harm (`may_be_doubled`), and only
   while nobody has to wait for it (`choose`): what an overloaded pool is slow at must not be doubled.
2. Deciding on the second worker, reserving it and beginning its stream is one synchronous step, as for the first.
3. The first good answer (2xx) is the client's. The other worker's connection is closed in the same step, so that its
   engine hears of it, and its lease settled as `hedged`: that is no failure (but see `Fleet.overtaken`).
4. A worker that fails meanwhile is settled as a failed attempt and the other one waited for. When both have failed the
   last failure is returned, and it is for the attempts to say what is next.
5. `close` is synchronous and may come at any moment. The lease that the attempts stand on is theirs to settle.

When a request is late is `pool.hedging`'s to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.admission import Admission, WaitsFor
from gateway.errors import OVERTAKEN, GatewayError, NoWorker, UnknownModel, WorkerError
from gateway.leases import Lease, answers, kind_of, writing_s
from gateway.pool import HedgeRule, Kind, NoSecond, Refusal, Worker
from gateway.records import (
    Ending,
    Endpoint,
    Hedged,
    InferenceRequest,
    NoPrompt,
    Outcome,
    PrefixBlocks,
    Result,
    WorkerId,
)
from gateway.router import Choice, Router
from gateway.upstream.headers import AnswerHead
from gateway.upstream.http import UpstreamStream

if TYPE_CHECKING:
    # The attempts hold their race.
    from gateway.edge.attempts import Attempts
    from gateway.edge.gate import Edge

_DOUBLED = frozenset(
    (
        Endpoint.CHAT,
        Endpoint.COMPLETIONS,
        Endpoint.MESSAGES,
        Endpoint.GENERATE,
        Endpoint.EMBEDDINGS,
        Endpoint.RERANK,
        Endpoint.SCORE,
    )
)
"""Not `/v1/responses`: engines call tools for it and keep what they answered. Nor what costs a worker nothing."""

_ENGINES_SESSION = NoPrompt("session")
"""SGLang's `session_params`."""

TRIED_ELSEWHERE = frozenset((429, 500, 502, 503, 504))
"""Answers that speak of the worker's state, not of the request."""

_NO_WORKERS: frozenset[WorkerId] = frozenset()

_REFUSED = {WaitsFor.QUEUE: Refusal.QUEUE, WaitsFor.ROOM: Refusal.ROOM, WaitsFor.WAIT: Refusal.BUSY}


class HedgeRules:
    """When requests are late, by path and served model; where both have a word, the model's counts. Each entry is a
    percentile and a floor in seconds, None for what the base says; a percentile of 0 is off."""

    def __init__(
        self,
        percentile: float,
        floor_s: float,
        *,
        paths: Mapping[Endpoint, tuple[float | None, float | None]] | None = None,
        models: Mapping[str, tuple[float | None, float | None]] | None = None,
    ) -> None:
        base = HedgeRule(percentile, floor_s)
        self._base = base
        self._paths = {path: _changed(base, *change) for path, change in (paths or {}).items()}
        self._models = {
            (path, model): _changed(self._paths.get(path, base), *change)
            for model, change in (models or {}).items()
            for path in Endpoint
        }

    @property
    def any(self) -> bool:
        """Any request may get a second copy."""
        rules = (self._base, *self._paths.values(), *self._models.values())
        return any(rule.percentile for rule in rules)

    def of(self, request: InferenceRequest) -> HedgeRule | None:
        """The one for this request; None where it gets no second copy."""
        endpoint = request.endpoint
        rule = self._models.get((endpoint, request.model)) or self._paths.get(endpoint, self._base)
        return rule if rule.percentile and may_be_doubled(request) else None


def _changed(rule: HedgeRule, percentile: float | None, floor_s: float | None) -> HedgeRule:
    return HedgeRule(
        rule.percentile if percentile is None else percentile, rule.floor_s if floor_s is None else floor_s
    )


def may_be_doubled(request: InferenceRequest) -> bool:
    """Two workers may compute it and one of them be dropped. Not what an engine keeps a session for, and not several
    prompts or choices at once: nobody waits for the first byte of such a batch, and its copy is many times the work."""
    if request.engine_session or request.prompt == _ENGINES_SESSION:
        return False
    return request.endpoint in _DOUBLED and answers(request) == 1


def keeps_session(worker: Worker, request: InferenceRequest) -> bool:
    """The worker's engine is told of the request's session, so that its prefix stays there: nothing for two."""
    return request.session is not None and worker.facts.keeps_sessions


def late_after(rules: HedgeRules | None, request: InferenceRequest, choice: Choice) -> float | NoSecond:
    """Seconds after which the request would be late if it were sent now as chosen. Reserves nothing."""
    if rules is None or not rules.any:
        return NoSecond.OFF
    if not may_be_doubled(request) or keeps_session(choice.worker, request):
        return NoSecond.REQUEST
    rule = rules.of(request)
    if rule is None:
        return NoSecond.OFF
    kind, expected_s = kind_of(choice.output_tokens, streamed=request.stream), choice.wait_s + choice.own_s
    if kind is Kind.TEXT:
        expected_s += writing_s(choice.pool, choice.output_tokens, choice.worker.inflight_requests + 1)
    due_s = choice.pool.hedging.due_s(kind, expected_s, rule)
    return NoSecond.UNSEEN if due_s is None else due_s


def choose(
    router: Router,
    admission: Admission,
    request: InferenceRequest,
    blocks: PrefixBlocks,
    now: float,
    *,
    late: Lease,
    tried: frozenset[WorkerId] = _NO_WORKERS,
) -> Choice | Refusal:
    """The best other worker, behind another URL, that would begin with the request at once. Reserves nothing."""
    workers = router.fleet.workers.values()
    same = frozenset(worker.id for worker in workers if worker.spec.url == late.worker.spec.url)
    try:
        choice = router.consider(request, blocks, now, tried | same)
    except (NoWorker, UnknownModel):
        return Refusal.NO_WORKER
    worker, pool = choice.worker, choice.pool
    if pool.panic or keeps_session(worker, request):
        return Refusal.NO_WORKER
    waits = admission.waits_for(request, choice)
    if waits is not None:
        return _REFUSED[waits]
    if pool.crowded or worker.crowds(choice.new_tokens + choice.output_tokens):
        return Refusal.ROOM
    waiting = worker.load is not None and worker.load.waiting > 0
    if waiting or worker.wait_s(now) > admission.settings.hold_s:
        return Refusal.BUSY
    return choice if late.retries.has_room(now) else Refusal.BUDGET


Send = Callable[[Lease, UpstreamStream], Coroutine[Any, Any, AnswerHead]]
Settle = Callable[[Lease, Ending], Outcome]


@dataclass(slots=True, eq=False)
class _Runner:
    """A worker that has the request. `told` is its answer or error, until it is taken: an error that stayed here would
    hold on to what raised it."""

    lease: Lease
    stream: UpstreamStream
    task: asyncio.Task[None] | None = None
    told: AnswerHead | GatewayError | None = None

    async def run(self, send: Send) -> None:
        try:
            self.told = await send(self.lease, self.stream)
        except GatewayError as error:
            self.told = error

    @property
    def ended(self) -> bool:
        return self.task is not None and self.task.done()

    def take(self) -> AnswerHead | GatewayError:
        told, self.told = self.told, None
        if told is None and self.task is not None:
            self.task.result()  # a bug: raised here
        assert told is not None
        return told

    def stop(self) -> None:
        """The worker's connection is closed now."""
        self.stream.abort()
        task, self.task = self.task, None  # else they would keep each other: it ends with an error of its own
        if task is not None:
            task.cancel()


class Race:
    """Of one attempt."""

    __slots__ = (
        "_bell", "_blocks", "_doubled_at", "_edge", "_request", "_rule", "_runners", "_second", "_send", "_settle",
        "_work",
    )  # fmt: skip

    def __init__(
        self,
        work: Attempts,
        edge: Edge,
        rule: HedgeRule,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        *,
        send: Send,
        settle: Settle,
    ) -> None:
        """`send` sends the request to a worker and waits until its answer begins, `settle` ends the lease of one that
        is not waited for any more."""
        self._work = work
        self._edge = edge
        self._rule = rule
        self._request = request
        self._blocks = blocks
        self._send = send
        self._settle = settle
        self._runners: list[_Runner] = []
        self._second: _Runner | None = None
        self._doubled_at = 0.0
        self._bell: asyncio.Future[None] | None = None

    async def answer(self, lease: Lease, stream: UpstreamStream, *, expected_s: float, due_s: float) -> AnswerHead:
        """From the worker of `lease`, which is expected to begin within `expected_s` and late after `due_s`, or from a
        second one; the attempts stand on whichever it was. Raises GatewayError, of the last one that failed."""
        first = self._begin(lease, stream)
        try:
            await self._until_late(first, due_s)
            while True:
                ended = next((runner for runner in self._runners if runner.ended), None)
                if ended is None:
                    await self._news()
                    continue
                told = ended.take()
                if self._stands(ended, told, expected_s):
                    break
        finally:
            self.close()
        if isinstance(told, AnswerHead):
            return told
        try:
            raise told
        finally:
            del told  # else the error and this frame keep each other

    def close(self) -> None:
        """End what still runs: nobody waits for it any more. Later calls change nothing."""
        runners, self._runners = self._runners, []
        now = self._edge.clock()
        for runner in runners:
            self._give_up(runner, now)
        self._became(Hedged.ENDED)

    # ---------------------------------------------------------------- inside

    async def _until_late(self, first: _Runner, due_s: float) -> None:
        """Until it has ended, or a second worker has the request too. When that is refused, it is looked at again when
        it has taken twice as long."""
        await self._news(due_s)
        while not first.ended and not self._double(first.lease):
            await self._news(due_s)
            due_s *= 2

    async def _news(self, within_s: float | None = None) -> None:
        """Until one has ended, or this time has passed. Half the cost of `asyncio.wait`."""
        loop = asyncio.get_running_loop()
        self._bell = loop.create_future()
        timer = None if within_s is None else loop.call_later(within_s, self._ring)
        try:
            await self._bell
        finally:
            if timer is not None:
                timer.cancel()

    def _ring(self, _ended: asyncio.Task[None] | None = None) -> None:
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)

    def _double(self, late: Lease) -> bool:
        """Decide, reserve and begin, in one step; False where that is refused."""
        edge, request, now = self._edge, self._request, self._edge.clock()
        found = choose(edge.router, edge.turns.admission, request, self._blocks, now, late=late, tried=self._work.tried)
        if isinstance(found, Refusal):
            late.hedging.refused[found] += 1
            return False
        stream = edge.upstream.open(found.worker.spec)  # first: what fails here must not leave a lease
        lease = edge.router.reserve(found, request, self._blocks, now, beside=late)
        late.retries.retry(now)
        self._work.spent += 1
        self._second = self._begin(lease, stream)
        self._doubled_at = now
        edge.upstream.wrote(late.worker.id, now)
        return True

    def _begin(self, lease: Lease, stream: UpstreamStream) -> _Runner:
        runner = _Runner(lease, stream)
        runner.task = asyncio.get_running_loop().create_task(runner.run(self._send))
        runner.task.add_done_callback(self._ring)
        self._runners.append(runner)
        return runner

    def _stands(self, ended: _Runner, told: AnswerHead | GatewayError, expected_s: float) -> bool:
        """One has ended: whether what it told is the end of the race."""
        self._runners.remove(ended)
        now = self._edge.clock()
        second = ended is self._second
        well = isinstance(told, AnswerHead) and 200 <= told.status < 300
        decided = isinstance(told, AnswerHead) and told.status not in TRIED_ELSEWHERE
        if well and not second:
            ended.lease.hedging.began(ended.lease.kind, expected_s, now - ended.lease.sent_at)
        if not self._runners:
            if second:
                self._became(Hedged.WON if decided else Hedged.FAILED)
            return True
        if well and second:
            ended.lease.hedging.overtaken(ended.lease.kind, self._rule)
            self._stand_on(ended, now)
            late = self._runners.pop()
            if self._edge.upstream.wrote(late.lease.worker.id, self._doubled_at):
                late.lease.worker.heard(now)
            self._give_up(late, now, code=OVERTAKEN)
            self._became(Hedged.WON)
            return True
        if decided and not second:
            self._became(Hedged.LOST)
            return True
        match told:
            case WorkerError() | AnswerHead():
                # A 4xx of the second is about the request, perhaps: that the first may say.
                failed = _given_up(now, told.status) if decided else self._work.ending_of(told, now)
                self._left(ended, failed, now)
                return False
            case _:  # the request's own time has passed
                self._give_up(ended, now)
                return True

    def _left(self, ended: _Runner, ending: Ending, now: float) -> None:
        """It has failed, and the other one goes on."""
        work = self._work
        ended.stop()
        work.exclude(ended.lease)
        if ended is self._second:
            outcome = self._settle(ended.lease, ending)
            self._became(Hedged.FAILED)
            if self._edge.on_copy_failed is not None:
                self._edge.on_copy_failed(outcome)
            return
        self._stand_on(self._runners[0], now)
        outcome = self._settle(ended.lease, ending)
        work.retries += 1
        if self._edge.on_retry is not None:
            self._edge.on_retry(outcome)

    def _stand_on(self, runner: _Runner, now: float) -> None:
        self._work.lease, self._work.stream = runner.lease, runner.stream
        if self._request.session is not None:
            self._edge.router.pin(self._request.session, runner.lease.worker, now)

    def _give_up(self, runner: _Runner, now: float, *, code: str | None = None) -> None:
        runner.stop()
        if runner.lease is not self._work.lease:
            self._settle(runner.lease, _given_up(now, code=code))

    def _became(self, hedged: Hedged) -> None:
        """Of the second copy; the first word counts."""
        if self._second is not None and self._work.hedged is None:
            self._work.hedged = hedged
            self._second.lease.hedging.results[hedged] += 1


def _given_up(now: float, status: int = 0, *, code: str | None = None) -> Ending:
    return Ending(Result.HEDGED, status, now, error_code=code)
