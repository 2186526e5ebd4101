"""What is done about a worker whose index is doubted: the shell around `pool.trust`.

Rules:
1. Twice a second each worker's trust is told the state of its feeds (which tell of a change themselves, at once), and
   what it says is passed on: load polls come more often while its refresh is tightened. After a miss this is done at
   once, before the next request is placed.
2. An index is learned anew when `Trust.remedy` says so, which limits how often.
3. Each change of state is one line in the log, with the figures it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from gateway.pool import Fleet, Worker
from gateway.records import Finding, Outcome, TrustState, WorkerId
from gateway.upstream.membership import Membership


@dataclass(slots=True)
class _Told:
    """What was last said about a worker."""

    state: TrustState
    tightened: bool
    findings: tuple[Finding, ...]


class Refresh:
    """Call `tick` about twice a second, `record` with each outcome, `forget` when a worker has gone."""

    def __init__(self, fleet: Fleet, membership: Membership) -> None:
        self._fleet = fleet
        self._membership = membership
        self._told: dict[WorkerId, _Told] = {}
        self._log = structlog.get_logger("kvgate.trust")

    def tick(self, now: float) -> None:
        """Time has passed: feeds may have changed, doubts may have faded."""
        for worker in self._fleet.workers.values():
            self._look(worker, now)

    def record(self, outcome: Outcome, now: float) -> None:
        """A request has ended."""
        if outcome.miss_cause is not None and outcome.worker is not None:
            worker = self._fleet.workers.get(outcome.worker)
            if worker is not None:
                self._look(worker, now)

    def forget(self, worker_id: WorkerId) -> None:
        """It has left the fleet."""
        self._told.pop(worker_id, None)

    def _look(self, worker: Worker, now: float) -> None:
        feed = self._membership.feed_trust(worker.id)
        if feed is not None:
            worker.follow(feed, now)
        remedy = worker.belief.remedy(now)
        if remedy is not None:
            self._membership.relearn(worker.id, remedy.since)
            self._log.warning(
                "index of the worker is learned anew",
                worker=worker.id,
                dropped_before_s=None if remedy.since is None else round(now - remedy.since, 3),
                misses=worker.belief.misses,
                predictions=worker.belief.predictions,
            )
        self._tell(worker)

    def _tell(self, worker: Worker) -> None:
        belief = worker.belief
        told = self._told.get(worker.id)
        if told is None:
            # As a newcomer is taken to be: what differs is said.
            told = self._told[worker.id] = _Told(TrustState.CATCHING_UP, False, ())
        figures = {
            "worker": worker.id,
            "trust": round(belief.factor, 3),
            "feed": belief.feed.value,
            "misses": belief.misses,
            "predictions": belief.predictions,
        }
        if belief.state is not told.state:
            tell = self._log.info if belief.state is not TrustState.UNCERTAIN else self._log.warning
            tell("trust changed", state=belief.state.value, before=told.state.value, **figures)
            told.state = belief.state
        if belief.tightened is not told.tightened:
            self._membership.tighten(worker.id, belief.tightened)
            self._log.info("refresh tightened" if belief.tightened else "refresh relaxed", **figures)
            told.tightened = belief.tightened
        findings = belief.findings()
        if findings != told.findings:
            for finding in findings:
                self._log.warning("worker could serve better", worker=worker.id, **finding._asdict())
            told.findings = findings
