"""Workers over the admin port: look at them, add, remove, drain, learn anew, reset.

A worker is named by its name, or, for all data-parallel ranks behind one server, by the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Body, Response

from gateway.admin.answer import ErrorAnswer
from gateway.admin.failures import IsRank, NothingToLearn
from gateway.admin.rows import paced, written
from gateway.admin.views import AdminViews
from gateway.admin.worker_answers import JoiningAnswer, SourceAnswer, WorkerAnswer, WorkerList
from gateway.errors import NotFound
from gateway.records import WorkerId
from gateway.settings import WorkerSettings

_NAMES_SHOWN = 20

_NEW = {"url": "http://10.0.0.5:8000", "name": "w5", "pool": "default", "weight": 1.0}


def worker_routes(views: AdminViews) -> APIRouter:
    """The paths below `/admin/workers`."""
    routes = APIRouter(prefix="/admin/workers", tags=["workers"])
    fleet = views.router.fleet

    @routes.get("", response_model=WorkerList)
    async def list_workers() -> Response:
        """Every worker, by name."""
        now, sessions = views.clock(), _sessions(views)
        readings = {reading.worker: reading for reading in views.readings.workers()}
        feeds = {feed.worker: feed for feed in views.readings.feeds()}
        workers = sorted(fleet.workers.values(), key=lambda worker: worker.id)
        joining = [name for name in sorted(readings) if name not in fleet.workers]
        answers = [
            WorkerAnswer.of(worker, readings.get(name), feeds.get(name), sessions=sessions.get(name, 0), now=now)
            async for name, worker in paced((worker.id, worker) for worker in workers)
        ]
        return written(
            WorkerList(
                workers=answers,
                joining=[JoiningAnswer(id=name, error=readings[name].error) for name in joining],
                sources=[SourceAnswer.of(source) for source in views.readings.sources()],
            )
        )

    @routes.get("/{worker_id}")
    async def get_worker(worker_id: str) -> WorkerAnswer:
        """One worker."""
        return _answer(views, WorkerId(worker_id))

    @routes.post(
        "",
        status_code=201,
        responses={409: {"model": ErrorAnswer}, 502: {"model": ErrorAnswer}, 503: {"model": ErrorAnswer}},
    )
    async def add_worker(settings: Annotated[WorkerSettings, Body(examples=[_NEW])]) -> WorkerList:
        """Probe a worker and let it join; the keys are those of `workers` in the configuration file. The answer has one
        worker, or one for each data-parallel rank. It is not written into the file: a restart of the gateway forgets
        it."""
        spec = settings.spec({str(name) for name in views.members()})
        await views.add_worker(spec)
        names = _workers_of(spec.name, views) or [spec.name]
        return WorkerList(workers=[_answer(views, name) for name in names], joining=[], sources=[])

    @routes.delete("/{worker_id}", status_code=204, responses={409: {"model": ErrorAnswer}})
    async def remove_worker(worker_id: str) -> None:
        """Take a worker out, also one that has not joined yet. It gets no new requests; open ones run to their end.
        Data-parallel ranks go with their server: name that."""
        worker = fleet.workers.get(WorkerId(worker_id))
        if worker is not None and worker.spec.rank is not None:
            raise IsRank(f"{worker_id!r} is a rank of {worker.spec.member!r} and leaves with it: delete that")
        await views.remove_worker(_known(WorkerId(worker_id), views.members()))

    @routes.post("/{worker_id}/drain")
    async def drain_worker(worker_id: str) -> WorkerList:
        """No new requests for a worker, or for all ranks of a server; open ones run to their end. It stays so, also
        over its restart, until `undrain`."""
        return _change(views, worker_id, partial(fleet.drain, on=True))

    @routes.post("/{worker_id}/undrain")
    async def undrain_worker(worker_id: str) -> WorkerList:
        """New requests again."""
        return _change(views, worker_id, partial(fleet.drain, on=False))

    @routes.post("/{worker_id}/reset")
    async def reset_worker(worker_id: str) -> WorkerList:
        """Forget what is held against a worker's health: its breaker closes at once, without a slow start."""
        return _change(views, worker_id, fleet.reset)

    @routes.post("/{worker_id}/resync", responses={409: {"model": ErrorAnswer}})
    async def resync_worker(worker_id: str) -> WorkerList:
        """Forget what the index knows of a worker and learn it anew from its events: from a replay where it has one,
        else from what it announces from now on. It gets requests all the while."""
        names = _named(views, worker_id)
        if not sum(views.resync(name) for name in names):
            raise NothingToLearn(
                f"{worker_id!r} has no event feed: what is known of it was learned from the requests sent to it, and "
                "is corrected by what it reports"
            )
        return WorkerList(workers=[_answer(views, name) for name in names], joining=[], sources=[])

    return routes


def _change(views: AdminViews, worker_id: str, change: Callable[[WorkerId, float], None]) -> WorkerList:
    """Do something to a worker, or to all ranks of a server; how they are now."""
    names = _named(views, worker_id)
    for name in names:
        change(name, views.clock())
    return WorkerList(workers=[_answer(views, name) for name in names], joining=[], sources=[])


def _named(views: AdminViews, worker_id: str) -> list[WorkerId]:
    """The worker of that name, or all ranks of that server."""
    workers = views.router.fleet.workers
    if worker_id in workers:
        return [WorkerId(worker_id)]
    names = _workers_of(WorkerId(worker_id), views)
    if names:
        return names
    if worker_id in views.members():
        raise NotFound(f"{worker_id!r} has not joined yet: it has not answered a probe", code="worker_not_found")
    _known(WorkerId(worker_id), workers)
    return []


def _known(worker_id: WorkerId, workers: Collection[WorkerId]) -> WorkerId:
    if worker_id not in workers:
        raise NotFound(
            f"no worker is named {worker_id!r}; {_hint(worker_id, sorted(workers))}", code="worker_not_found"
        )
    return worker_id


def _hint(worker_id: str, names: list[str]) -> str:
    nearest = get_close_matches(worker_id, names, n=1)
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    there_are = f"there are: {', '.join(names[:_NAMES_SHOWN]) or 'none'}{more}"
    return f"did you mean {nearest[0]!r}? {there_are}" if nearest else there_are


def _workers_of(member: WorkerId, views: AdminViews) -> list[WorkerId]:
    """The data-parallel ranks that are workers of a server, in their order; itself, where it has none."""
    return [worker.id for worker in views.router.fleet.workers.values() if worker.spec.member == member]


def _answer(views: AdminViews, worker_id: WorkerId) -> WorkerAnswer:
    workers = views.router.fleet.workers
    if worker_id not in workers and (ranks := _workers_of(worker_id, views)):
        raise NotFound(f"{worker_id!r} is the workers {', '.join(ranks)}; name one", code="worker_not_found")
    worker = workers[_known(worker_id, workers)]
    reading = next((reading for reading in views.readings.workers() if reading.worker == worker_id), None)
    feed = next((feed for feed in views.readings.feeds() if feed.worker == worker_id), None)
    sessions = _sessions(views).get(worker_id, 0)
    return WorkerAnswer.of(worker, reading, feed, sessions=sessions, now=views.clock())


def _sessions(views: AdminViews) -> dict[str, int]:
    return {str(worker): count for worker, count in views.router.sessions.by_worker().items()}
