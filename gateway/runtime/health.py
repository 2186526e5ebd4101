"""What is done about workers whose health is in question: the shell around `pool.health`.

Rules:
1. Each change of a worker's state is one line in the log, and so is each begin and end of a pool's panic.
2. A worker whose breaker is half open is asked for one token, by one request at a time and nobody's. So a worker that
   accepts and never answers is found out although its `/health` says 200, and one that was repaired comes back without
   any traffic.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from gateway.pool import Fleet, Worker, WorkerState
from gateway.records import Endpoint, WorkerId, WorkerSpec
from gateway.runtime.supervisor import Supervisor
from gateway.upstream.control import ControlClient, ProbeFailed
from gateway.upstream.ranks import RANK_HEADER

_BAD = (WorkerState.EJECTED, WorkerState.GONE)


class HealthWatch:
    """Call `tick` about twice a second, after the fleet's. A trial that takes longer than `trial_s` has failed."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        control: ControlClient,
        tasks: Supervisor,
        clock: Callable[[], float],
        trial_s: float,
    ) -> None:
        self._fleet = fleet
        self._control = control
        self._tasks = tasks
        self._clock = clock
        self._trial_s = trial_s
        self._panics: set[str] = set()
        self._log = structlog.get_logger("kvgate.health")

    def apply(self, *, trial_s: float) -> None:
        """Another limit, from the next trial on."""
        self._trial_s = trial_s

    def tick(self, now: float) -> None:
        """Tell what has changed; begin the trials that are due."""
        for worker in self._fleet.workers.values():
            if worker.health.changes:
                self._tell(worker, now)
            if worker.health.wants_trial:
                self._begin_trial(worker)
        panics = {name for name, pool in self._fleet.pools.items() if pool.panic}
        for name in sorted(panics - self._panics):
            self._log.warning("too many workers are ejected: all of them are used", model=name)
        for name in sorted(self._panics - panics):
            self._log.info("enough workers serve again: ejected ones are left out", model=name)
        self._panics = panics

    def _tell(self, worker: Worker, now: float) -> None:
        health = worker.health
        for change in health.changes:
            tell = self._log.warning if change.state in _BAD else self._log.info
            trial_in_s = health.half_open_in_s(now) if change.state is WorkerState.EJECTED else None
            tell(
                "worker state changed",
                worker=worker.id,
                state=change.state.value,
                before=change.before.value,
                reason=change.reason,
                trial_in_s=None if trial_in_s is None else round(trial_in_s, 1),
            )
        health.changes.clear()

    def _begin_trial(self, worker: Worker) -> None:
        name = f"trial {worker.id}"
        if name not in self._tasks.names:
            self._tasks.start(name, lambda: self._try(worker.id))

    async def _try(self, worker_id: WorkerId) -> None:
        worker = self._fleet.workers.get(worker_id)
        if worker is None:
            return
        model = next(iter(worker.spec.models or worker.facts.models), "")
        try:
            await self._ask_for_one_token(worker.spec, model)
        except ProbeFailed as error:
            self._log.info("trial failed", worker=worker_id, reason=error.message)
            passed = False
        else:
            passed = True
        if self._fleet.workers.get(worker_id) is worker:  # else its name may be another's by now
            self._fleet.tried(worker_id, self._clock(), passed=passed)

    async def _ask_for_one_token(self, spec: WorkerSpec, model: str) -> None:
        """An answer below 500 passes: a model that completes no text says so by one. Raises ProbeFailed."""
        body = msgspec.json.encode({"model": model, "prompt": "1", "max_tokens": 1})
        rank = {RANK_HEADER: str(spec.rank.asked)} if spec.rank is not None else {}
        url = spec.url + Endpoint.COMPLETIONS.value
        answer = await self._control.post(url, body, api_key=spec.api_key, timeout_s=self._trial_s, headers=rank)
        if answer.status >= 500:
            raise ProbeFailed(f"{url} answered {answer.status}")
