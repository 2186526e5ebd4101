"""All workers, and the pools they form.

Rules:
1. A worker has a slot, a bit in the masks of the index. Slots are used again only when the worker that had one is
   gone *and* its last lease is settled, so nothing late can touch a newcomer.
2. A worker that leaves with requests in flight and comes back under the same name and address is the same worker: its
   load is still known.
3. There is one pool for each served model name, adapters included; names that one worker serves side by side are the
   same model. A pool filters: a request never goes to a worker outside it.
4. A worker's health (`pool.health`) changes seldom; when it does, its crews are renewed at once (`Crew.renew`), each
   once, however many pools it stands behind.
5. Speeds are learned once for each base model, so that an adapter's requests teach its base and the other way round.

It keeps no clock and does no I/O; probing and polling report here.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from gateway.errors import FleetFull
from gateway.pool.crew import Crew
from gateway.pool.health import Evidence, Health, HealthSettings, evidence_of
from gateway.pool.pool import DEFAULT_BLOCK_SIZE, Pool
from gateway.pool.rates import INTER_TOKEN_PRIOR, PREFILL_PRIOR, InterTokenRates, PoolRates, PrefillRates
from gateway.pool.reservations import Reservation, Sent
from gateway.pool.room import Room
from gateway.pool.shards import ShardSettings
from gateway.pool.trust import MISS_THRESHOLD, Trust
from gateway.pool.worker import STALE_S, Worker
from gateway.records import Ending, LoadSample, Result, Slot, WorkerFacts, WorkerId, WorkerSpec

ANY_MODEL = "*"
"""In a configured block size: every model that is not named itself."""

MAX_WORKERS = 1024
"""Slots; masks are integers of that many bits."""


class ServedModel(NamedTuple):
    """One name clients may use. `base` is the model an adapter belongs to; `max_model_len` the shortest in the pool."""

    name: str
    base: str | None
    max_model_len: int | None


_WAITS_FORGOTTEN = 0.05
"""A tick of half a second: waits are credited for about ten seconds."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """`block_sizes` gives configured block sizes by base model name; a load sample older than `stale_s` is forgotten.
    `miss_threshold` is the route-miss rate above which a worker's refresh is tightened. `health` says when a worker is
    ejected, `retry_ratio` how many retries a pool may make, `sharding` when a pool is split, `max_inflight` how many
    requests a worker should have at a time (None: learned)."""

    block_sizes: Mapping[str, int] = field(default_factory=dict)
    stale_s: float = STALE_S
    miss_threshold: float = MISS_THRESHOLD
    health: HealthSettings = field(default_factory=HealthSettings)
    retry_ratio: float = 0.2
    sharding: ShardSettings = field(default_factory=ShardSettings)
    max_inflight: int | None = None


class Fleet:
    """Every worker by name and every pool by served model name. `priors` are the speeds assumed before any is seen."""

    def __init__(
        self,
        settings: FleetSettings | None = None,
        *,
        priors: tuple[PrefillRates, InterTokenRates] | None = None,
    ) -> None:
        self.settings = settings or FleetSettings()
        self._priors = priors or (PREFILL_PRIOR, INTER_TOKEN_PRIOR)
        self._workers: dict[WorkerId, Worker] = {}
        self._leaving: dict[Slot, Worker] = {}
        self._pools: dict[str, Pool] = {}
        self._crews: dict[tuple[Worker, ...], Crew] = {}
        self._crews_of: dict[WorkerId, list[Crew]] = {}
        self._rates: dict[str, PoolRates] = {}
        self._free: list[int] = []
        self._slots = 0
        self._picks = 0
        self.workers: Mapping[WorkerId, Worker] = MappingProxyType(self._workers)
        self.pools: Mapping[str, Pool] = MappingProxyType(self._pools)

    # ---------------------------------------------------------------- membership

    def add(self, spec: WorkerSpec, facts: WorkerFacts, now: float) -> Worker:
        """A worker joins, ready. One of the same name is replaced; with the same address it keeps its open load.

        Raises FleetFull above `MAX_WORKERS`.
        """
        if spec.name in self._workers:
            self.remove(spec.name, now)
        block_size = spec.block_size or facts.block_size or DEFAULT_BLOCK_SIZE
        worker = self._returning(spec)
        if worker is not None:
            worker.respec(spec)
            worker.refit(facts, block_size)
        else:
            rates = self._rates_of(_base_model(spec, facts))
            worker = Worker(
                spec.name,
                self._take_slot(),
                spec,
                facts,
                rates,
                block_size,
                added_at=now,
                stale_s=self.settings.stale_s,
            )
            worker.belief = Trust(threshold=self.settings.miss_threshold)
            worker.room = Room(self.settings.max_inflight)
        worker.health = Health(self.settings.health, now)
        self._workers[worker.id] = worker
        self._refit_pools()
        return worker

    def remove(self, worker_id: WorkerId, now: float) -> None:
        """A worker leaves; unknown names are ignored. Its open leases stay valid until they are settled."""
        worker = self._workers.pop(worker_id, None)
        if worker is None:
            return
        worker.health.leave(now, "removed")
        self._leaving[worker.slot] = worker
        self._free_slot(worker)
        self._refit_pools()

    def respec(self, spec: WorkerSpec, now: float) -> None:
        """A worker is configured anew, at the same address: what is known of it stays. Unknown names are ignored."""
        worker = self._workers.get(spec.name)
        if worker is not None:
            before = _pooled(worker)
            worker.respec(spec)
            self._known(worker, worker.facts, before, now)

    def facts(self, worker_id: WorkerId, facts: WorkerFacts, now: float) -> None:
        """Probing found something new; unknown names are ignored."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            self._known(worker, facts, _pooled(worker), now)

    def _known(self, worker: Worker, facts: WorkerFacts, before: tuple[object, ...], now: float) -> None:
        """Pools are made anew only where they depend on what has changed: most probes find something else."""
        with self._moving(worker):
            worker.refit(facts, worker.spec.block_size or facts.block_size or DEFAULT_BLOCK_SIZE)
            worker.tick(now)
        if _pooled(worker) != before:
            self._refit_pools()

    def apply(self, settings: FleetSettings) -> None:
        """From now on these, for every worker; what is known of them stays."""
        self.settings = settings
        for worker in (*self._workers.values(), *self._leaving.values()):
            worker.stale_s = settings.stale_s
            worker.belief.threshold = settings.miss_threshold
            worker.health.settings = settings.health
            worker.room.configure(settings.max_inflight)
        for pool in self._pools.values():
            pool.retries.ratio = settings.retry_ratio
        self._refit_pools()

    def load(self, worker_id: WorkerId, sample: LoadSample, now: float) -> None:
        """A poll of a worker's load; unknown names are ignored."""
        worker = self._workers.get(worker_id)
        if worker is not None:
            with self._moving(worker):
                worker.observe(sample, now)

    def share(self, worker: Worker, others: Sent, now: float) -> None:
        """What the other replicas have sent to a worker has changed."""
        with self._moving(worker):
            worker.share(others, now)

    def tick(self, now: float) -> None:
        """About twice a second: what depends on time alone is renewed."""
        for rates in self._rates.values():
            rates.forget_waits(_WAITS_FORGOTTEN)
            rates.regretted = False
        for worker in self._workers.values():
            if worker.health.watched or worker.full:
                with self._moving(worker) as health:
                    worker.tick(now)
                    health.tick(now)
            else:  # time changes nothing
                worker.tick(now)
        for pool in self._pools.values():
            pool.retries.tick(now)

    def key_block_size(self, worker: Worker) -> int:
        """Tokens a block of the keys its pools use; its own block size is a multiple."""
        pool = self._pools.get(_base_model(worker.spec, worker.facts))
        return worker.block_size if pool is None else pool.block_size

    def behind(self, worker: Worker) -> frozenset[WorkerId]:
        """The workers that share the server of this one, itself included: its other data-parallel ranks. What fails
        one of them is likely to fail all."""
        if worker.spec.rank is None:
            return frozenset((worker.id,))
        member, url = worker.spec.member, worker.spec.url
        return frozenset(
            (worker.id, *(w.id for w in self._workers.values() if (w.spec.member, w.spec.url) == (member, url)))
        )

    def models(self) -> list[ServedModel]:
        """What `/v1/models` must show: every name with a worker behind it, sorted, base models first."""
        served = [
            ServedModel(pool.name, pool.model if pool.adapter else None, pool.shortest) for pool in self._pools.values()
        ]
        return sorted(served, key=lambda model: (model.base is not None, model.name))

    # ---------------------------------------------------------------- health

    def leaving(self, worker_id: WorkerId, now: float, *, reason: str) -> None:
        """Nobody listens at its address (any more); unknown names are ignored, here and below."""
        with self._named(worker_id) as health:
            health.leave(now, reason)

    def back(self, worker_id: WorkerId, now: float) -> None:
        """It was gone and answered a probe."""
        with self._named(worker_id) as health:
            health.back(now)

    def drain(self, worker_id: WorkerId, now: float, *, on: bool) -> None:
        """No new requests for it, or new ones again; open ones run to their end."""
        with self._named(worker_id) as health:
            health.drain(now, on=on)

    def withhold(self, worker_id: WorkerId, now: float, *, reason: str | None) -> None:
        """No new requests for it because what runs it says so, or new ones again (None)."""
        with self._named(worker_id) as health:
            health.withhold(now, reason)

    def reset(self, worker_id: WorkerId, now: float) -> None:
        """Forget what is held against its health."""
        with self._named(worker_id) as health:
            health.reset(now)

    def probed(self, worker_id: WorkerId, now: float, *, passed: bool) -> None:
        """A regular probe of it passed or failed; one that found nobody is `leaving`."""
        with self._named(worker_id) as health:
            health.probed(now, passed=passed)

    def tried(self, worker_id: WorkerId, now: float, *, passed: bool) -> None:
        """The trial that its health asked for (`Health.wants_trial`)."""
        with self._named(worker_id) as health:
            health.tried(now, passed=passed)

    def answered(self, worker: Worker, now: float, *, sent_at: float) -> bool:
        """It answered a request sent at `sent_at`; only needed while `worker.health.watched`. True when that made good
        for a failure."""
        with self._moving(worker) as health:
            return health.answered(now, sent_at=sent_at)

    def ended(self, worker: Worker, ending: Ending, *, sent_at: float, credited: bool) -> None:
        """A request or an attempt is over; `credited`: `answered` was true of it."""
        if ending.result is Result.COMPLETED and not worker.health.watched:
            return  # nearly always
        match evidence_of(ending):
            case Evidence.GOOD if worker.health.watched and not credited:
                self.answered(worker, ending.ended_at, sent_at=sent_at)
            case Evidence.BAD:
                why = ending.error_code or f"http_{ending.status}"
                with self._moving(worker) as health:
                    health.failed(ending.ended_at, sent_at=sent_at, why=why, credited=credited)

    def overtaken(self, worker: Worker, reservation: Reservation, now: float) -> None:
        """Another worker has answered this late request, which is about to be released. To lose is no failure; to
        answer nobody for so long is."""
        if worker.overtaken(reservation, now):
            with self._moving(worker) as health:
                health.failed(now, sent_at=reservation.sent_at, why="silent", doubtful=True)

    @contextmanager
    def _named(self, worker_id: WorkerId) -> Iterator[Health]:
        worker = self._workers.get(worker_id)
        if worker is None:
            yield Health()  # nobody's
            return
        with self._moving(worker) as health:
            yield health

    @contextmanager
    def _moving(self, worker: Worker) -> Iterator[Health]:
        """The crews of a worker are renewed when what happens to it changes who may get requests."""
        health = worker.health
        before = health.state, health.full, worker.full
        try:
            yield health
        finally:
            if (health.state, health.full, worker.full) != before:
                for crew in self._crews_of.get(worker.id, ()):
                    crew.renew(self.settings.health.panic_ratio)

    # ---------------------------------------------------------------- reservations

    def reserve(self, worker: Worker, reservation: Reservation, now: float) -> None:
        """A request is placed on `worker`."""
        self._picks += 1
        worker.picked = self._picks
        if worker.health.limit is None and worker.room.limit is None:  # nearly always
            worker.reserve(reservation, now)
            return
        with self._moving(worker) as health:
            worker.reserve(reservation, now)
            if health.limit is not None:
                health.sent()

    def release(self, worker: Worker, reservation: Reservation, now: float) -> None:
        """It is over. The last one of a worker that has left frees the worker's slot."""
        if worker.health.limit is None and worker.room.limit is None:
            worker.release(reservation, now)
        else:
            with self._moving(worker) as health:
                if health.limit is not None and reservation.open:
                    health.over(sent_at=reservation.sent_at)
                worker.release(reservation, now)
        if self._leaving:
            self._free_slot(worker)

    # ---------------------------------------------------------------- inside

    def _returning(self, spec: WorkerSpec) -> Worker | None:
        for slot, worker in self._leaving.items():
            if worker.id == spec.name and worker.spec.url == spec.url:
                return self._leaving.pop(slot)
        return None

    def _take_slot(self) -> Slot:
        if self._free:
            return Slot(heapq.heappop(self._free))
        if self._slots >= MAX_WORKERS:
            raise FleetFull(
                f"a fleet has at most {MAX_WORKERS} workers, each data-parallel rank and each worker that left with "
                "open requests included; remove some, or start another gateway"
            )
        self._slots += 1
        return Slot(self._slots - 1)

    def _free_slot(self, worker: Worker) -> None:
        """Rule 1, for a worker that may have left and may be idle."""
        if not worker.inflight_requests and self._leaving.get(worker.slot) is worker:
            del self._leaving[worker.slot]
            heapq.heappush(self._free, worker.slot)

    def _rates_of(self, model: str) -> PoolRates:
        rates = self._rates.get(model)
        if rates is None:
            if len(self._rates) >= MAX_WORKERS:
                del self._rates[next(iter(self._rates))]  # the oldest; its workers keep it, newcomers start afresh
            rates = self._rates[model] = PoolRates(*self._priors)
        return rates

    def _refit_pools(self) -> None:
        bases = _bases(self._workers.values())
        alike: dict[tuple[object, ...], list[Worker]] = {}  # mostly a whole fleet serves the same
        for worker in self._workers.values():
            worker.rates = self._rates_of(bases.get(_base_model(worker.spec, worker.facts), ""))
            serves = _names(worker.spec, worker.facts), *worker.facts.adapters.items()
            alike.setdefault(serves, []).append(worker)
        members: dict[tuple[str, str, str | None], list[list[Worker]]] = {}
        sizes: dict[str, int] = {}
        for some in alike.values():
            size = math.gcd(*(worker.block_size for worker in some))
            for served in _served(some[0], bases):
                members.setdefault(served, []).append(some)
                sizes[served[1]] = math.gcd(sizes.get(served[1], 0), size)
        given: dict[str, int] = {}
        for name, base in bases.items():
            if name in self.settings.block_sizes:
                given.setdefault(base, self.settings.block_sizes[name])
        places = {worker.id: place for place, worker in enumerate(self._workers.values())}
        kept = set()
        for (name, base, adapter), groups in members.items():
            if name in kept:
                continue  # two bases claim one adapter name: the first worker's wins, the others do not serve it
            kept.add(name)
            pool = self._pools.get(name)
            if pool is None or (pool.model, pool.adapter) != (base, adapter):
                rates = self._rates_of(base)
                pool = Pool(name, model=base, adapter=adapter, rates=rates, retry_ratio=self.settings.retry_ratio)
                self._pools[name] = pool
            size = given.get(base) or self.settings.block_sizes.get(ANY_MODEL) or sizes[base]
            workers = groups[0] if len(groups) == 1 else sorted(chain(*groups), key=lambda worker: places[worker.id])
            pool.crew, pool.block_size = self._crew(tuple(workers)), size
        for name in [name for name in self._pools if name not in kept]:
            del self._pools[name]
        self._refit_crews()

    def _crew(self, workers: tuple[Worker, ...]) -> Crew:
        """The one of these workers."""
        crew = self._crews.get(workers)
        if crew is None or crew.sharding != self.settings.sharding:
            crew = self._crews[workers] = Crew(workers, sharding=self.settings.sharding)
        return crew

    def _refit_crews(self) -> None:
        """All of them, after the pools have got theirs; those without a pool are forgotten."""
        self._crews = {pool.crew.workers: pool.crew for pool in self._pools.values()}
        self._crews_of.clear()
        for crew in self._crews.values():
            crew.refit(self.settings.health.panic_ratio)
            for worker in crew.workers:
                self._crews_of.setdefault(worker.id, []).append(crew)


def _names(spec: WorkerSpec, facts: WorkerFacts) -> tuple[str, ...]:
    """Base model names a worker serves: those configured for it, else those it reported."""
    return spec.models or facts.models


def _pooled(worker: Worker) -> tuple[object, ...]:
    """All of a worker that its pools and their crews depend on, its state apart."""
    spec, facts = worker.spec, worker.facts
    served = _names(spec, facts), facts.adapters
    return *served, worker.block_size, facts.max_model_len, facts.engine, spec.tenants, spec.role


def _base_model(spec: WorkerSpec, facts: WorkerFacts) -> str:
    names = _names(spec, facts)
    return names[0] if names else ""


def _bases(workers: Iterable[Worker]) -> dict[str, str]:
    """Served base name -> the name its model goes by here: names that one worker serves are one model, also where
    another worker serves only some of them. The first worker's first name stands for all."""
    bases: dict[str, str] = {}
    for worker in workers:
        names = _names(worker.spec, worker.facts)
        known = [bases[name] for name in names if name in bases]
        for name in names:
            bases.setdefault(name, known[0] if known else names[0])
        for other in {base for base in known if base != known[0]}:
            bases.update({name: known[0] for name, base in bases.items() if base == other})
    return bases


def _served(worker: Worker, bases: Mapping[str, str]) -> list[tuple[str, str, str | None]]:
    """(served name, base model, adapter) for everything a worker serves."""
    served: list[tuple[str, str, str | None]] = [
        (name, bases[name], None) for name in _names(worker.spec, worker.facts)
    ]
    served += [(adapter, bases.get(base, base), adapter) for adapter, base in worker.facts.adapters.items()]
    return served
