"""Replay of a trace on a virtual clock: the router, fleet, policy and index that serve, in front of simulated engines.

Owns the order of things in virtual time:

    arrival -> route (decide and reserve) -> submit to the engine -> its events go to the index as it emits them
            -> first token: lease.first_byte -> end: lease.settle, and the session's next turn may come
    every poll period: each engine's load -> fleet;   every half second: router.expire

Rules:
1. No network: the gateway learns of things when they happen, of cache events `event_delay_s` later. What it does not
   see when serving (queue order inside an engine, output lengths, the engine's speed) it does not see here.
2. The same inputs and seed give the same result, to the last bit.
3. A block of the trace is a run of tokens that only it has, so the index hashes and chains it as it does in service.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from gateway import keys
from gateway.admission import Admission, AdmissionSettings
from gateway.errors import GatewayError, QueueFull
from gateway.kv import KvIndex
from gateway.kv.events import KvEvent
from gateway.kv.events import Removed as BlocksRemoved
from gateway.kv.events import Stored as BlocksStored
from gateway.leases import Lease
from gateway.policy import Policy
from gateway.pool import Fleet, FleetSettings, InterTokenRates, PrefillRates, ShardSettings, Worker
from gateway.records import (
    BlockKey,
    Chain,
    Ending,
    Endpoint,
    EngineHash,
    EngineKind,
    InferenceRequest,
    LoadSample,
    NoPrompt,
    Outcome,
    PrefixBlocks,
    Result,
    StageTimes,
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router, RouterSettings
from gateway.sim.engine import (
    Cleared,
    EngineModel,
    Finished,
    FirstToken,
    Happening,
    Removed,
    SimulatedEngine,
    Started,
    Stored,
    Tokens,
)
from gateway.sim.trace import TURN_GAP_S, Turn

_MODEL = "trace"
_RANK = 0
_EXPIRE_S = 0.5

_ARRIVAL, _ENGINE, _POLL, _EXPIRE, _EVENTS, _CHANGE, _PUMP = range(7)
"""Kinds on the agenda. At one instant the order of entry decides."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Figures over all requests. `hit` is the share of prompt tokens found in a cache; TTFT in seconds from arrival.

    `imbalance` is the busiest worker's prefill time against the mean, `utilisation` the mean share of the time.
    `predicted` is the share of prompt tokens the router predicted as hits; `misses` counts route misses.
    """

    requests: int
    hit: float
    predicted: float
    misses: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    end_p50_s: float
    imbalance: float
    utilisation: float
    shares: tuple[float, ...]
    """Each worker's share of the requests."""
    refused: int = 0
    """Requests turned away, those included that their sessions would have made afterwards."""


@dataclass(slots=True)
class _Flight:
    """One request on a worker."""

    turn: Turn
    lease: Lease
    arrived_at: float
    cached_tokens: int = 0
    first_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Waiter:
    """One request that waits at the gateway."""

    replay: Replay
    turn: Turn
    arrived_at: float

    def placed(self, lease: Lease) -> None:
        self.replay.begin(self.turn, lease, self.arrived_at)

    def refused(self, error: Exception) -> None:
        if not isinstance(error, GatewayError):
            raise error  # a bug: it ends the simulation
        self.replay.turn_away(self.turn)


@dataclass(slots=True)
class _Station:
    """A worker and the engine behind it."""

    worker: Worker
    engine: SimulatedEngine
    version: int = 0
    """Counts agenda entries, so that all but the newest are ignored."""


@dataclass(slots=True)
class _Blocks:
    """Our keys and the made-up tokens of trace blocks."""

    size: int
    seed: BlockKey
    known: dict[int, BlockKey] = field(default_factory=dict)

    def tokens(self, blocks: Iterable[int]) -> list[int]:
        size = self.size
        return [block for block in blocks for _ in range(size)]

    def chain(self, turn: Turn) -> PrefixBlocks:
        parent, known = self.seed, self.known
        found: list[BlockKey] = []
        for block in turn.blocks:
            key = known.get(block)
            if key is None:
                key = known[block] = keys.chain(parent, self.tokens((block,)), self.size)[0]
            found.append(key)
            parent = key
        return PrefixBlocks((Chain(found, turn.prompt_tokens),), turn.prompt_tokens, self.size)


class Replay:
    """One run. Construct, `run` once, read the report; `router` and `fleet` stay for a look at what was learned.

    `speeds` gives each engine's speed, all 1 by default. `priors` are the speeds the gateway assumes at the start.
    `sessions` says whether requests carry their session's name, `sharding` when the pool is split. `changes` are made
    at their times, in seconds: they may look at the run, call `join` and `set_speed`.
    With `admission` requests wait at the gateway as they do in service; without, every one is placed on arrival.
    `max_inflight` as in `FleetSettings`.
    """

    def __init__(
        self,
        turns: Sequence[Turn],
        *,
        policy: Policy,
        model: EngineModel,
        block_size: int,
        workers: int,
        seed: int = 0,
        poll_s: float = 1.0,
        sessions: bool = True,
        speeds: Sequence[float] | None = None,
        priors: tuple[PrefillRates, InterTokenRates] | None = None,
        settings: RouterSettings | None = None,
        sharding: ShardSettings | None = None,
        event_delay_s: float = 0.0,
        changes: Sequence[tuple[float, Callable[[Replay], None]]] = (),
        admission: AdmissionSettings | None = None,
        max_inflight: int | None = None,
    ) -> None:
        self.fleet = Fleet(
            FleetSettings(sharding=sharding or ShardSettings(), max_inflight=max_inflight), priors=priors
        )
        self.index = KvIndex()
        self.router = Router(self.fleet, self.index, policy, rng=Random(seed), settings=settings)
        self.admission: Admission | None = None
        if admission is not None:
            self.admission = Admission(self.router, self._wake, settings=admission)
        self._refused = 0
        self._pump_wanted = False
        self._pumps = 0
        self._turns = turns
        self._poll_s = poll_s
        self._name_sessions = sessions
        self._blocks = _Blocks(block_size, keys.namespace())
        self._agenda: list[tuple[float, int, int, int, int]] = []
        self._entries = 0
        self._now = 0.0
        self._model = model
        self._stations: list[_Station] = []
        for number in range(workers):
            self.join(speed=speeds[number] if speeds else 1.0)
        self._changes = changes
        self._event_delay_s = event_delay_s
        self._late: deque[KvEvent] = deque()
        self._next: dict[int, int] = {turn.after: turn.number for turn in turns if turn.after is not None}
        self._flights: dict[int, _Flight] = {}
        self.outcomes: list[Outcome] = []

    @property
    def now(self) -> float:
        """Virtual time, seconds."""
        return self._now

    def join(self, *, speed: float = 1.0) -> None:
        """One more worker, empty, called w0, w1, ... in order."""
        number, block_size = len(self._stations), self._blocks.size
        engine = SimulatedEngine(self._model, block_size=block_size, speed=speed)
        facts = WorkerFacts(EngineKind.UNKNOWN, "", (_MODEL,), block_size=block_size, kv_blocks=engine.capacity_blocks)
        worker = self.fleet.add(WorkerSpec(WorkerId(f"w{number}"), f"sim://w{number}"), facts, self._now)
        self.index.bind(worker.slot, block_size=block_size)
        self._stations.append(_Station(worker, engine))

    def set_speed(self, number: int, speed: float) -> None:
        """A worker's engine is that fast from now on."""
        station = self._stations[number]
        self._take(station, station.engine.set_speed(speed, self._now))

    def holders(self, blocks: Sequence[int]) -> int:
        """How many engines have all these blocks of the trace, which begin a prompt."""
        return sum(station.engine.held(blocks) == len(blocks) for station in self._stations)

    def run(self) -> ReplayReport:
        """Until the last request has ended."""
        for turn in self._turns:
            if turn.after is None:
                self._enter(turn.at_s, _ARRIVAL, turn.number)
        left = len(self._turns)
        self._enter(0.0, _POLL)
        self._enter(0.0, _EXPIRE)
        for number, (at, _) in enumerate(self._changes):
            self._enter(at, _CHANGE, number)
        while len(self.outcomes) + self._refused < left:
            self._now, _, kind, number, version = heapq.heappop(self._agenda)
            if kind == _ARRIVAL:
                self._arrive(self._turns[number])
            elif kind == _ENGINE:
                station = self._stations[number]
                if version == station.version:
                    self._take(station, station.engine.advance(self._now))
            elif kind == _POLL:
                self._poll()
                self._enter(self._now + self._poll_s, _POLL)
            elif kind == _EVENTS:
                self.index.apply(self._stations[number].worker.slot, _RANK, [self._late.popleft()])
            elif kind == _CHANGE:
                self._changes[number][1](self)
            elif kind == _EXPIRE:
                self.router.expire(self._now)
                self._enter(self._now + _EXPIRE_S, _EXPIRE)
            elif version == self._pumps:
                self._pump_wanted = True
            while self._pump_wanted:
                self._pump()
        return self._report()

    def _enter(self, at: float, kind: int, number: int = 0, version: int = 0) -> None:
        self._entries += 1
        heapq.heappush(self._agenda, (at, self._entries, kind, number, version))

    # ---------------------------------------------------------------- what happens

    def _arrive(self, turn: Turn) -> None:
        session = str(turn.session) if self._name_sessions and turn.session is not None else None
        request = InferenceRequest(
            Endpoint.COMPLETIONS, str(turn.number), _MODEL, NoPrompt("trace"), stream=True, session=session
        )
        blocks = self._blocks.chain(turn)
        if self.admission is None:
            self.begin(turn, self.router.route(request, blocks, self._now), self._now)
            return
        waiter = _Waiter(self, turn, self._now)
        try:
            self.admission.admit(request, blocks, self._now, until=math.inf, waiter=waiter)
        except QueueFull as error:
            waiter.refused(error)

    def _wake(self) -> None:
        self._pump_wanted = True

    def _pump(self) -> None:
        self._pump_wanted = False
        self._pumps += 1
        assert self.admission is not None
        again = self.admission.pump(self._now)
        if again is not None:
            self._enter(again, _PUMP, 0, self._pumps)

    def turn_away(self, turn: Turn) -> None:
        """A request has waited too long or had no place to wait; what its session would have asked next is not."""
        following: int | None = turn.number
        while following is not None:
            self._refused += 1
            following = self._next.get(following)

    def begin(self, turn: Turn, lease: Lease, arrived_at: float) -> None:
        """A request has its worker."""
        self._flights[turn.number] = _Flight(turn, lease, arrived_at)
        station = self._stations[lease.worker.slot]
        happenings = station.engine.submit(
            turn.number,
            turn.blocks,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=max(1, turn.output_tokens),
            now=self._now,
        )
        self._take(station, happenings)

    def _take(self, station: _Station, happenings: Sequence[Happening]) -> None:
        """Passes on what an engine reports, in its order, and asks to be woken for what comes next."""
        slot = station.worker.slot
        for happening in happenings:
            match happening:
                case Started(request=number, cached_tokens=cached):
                    self._flights[number].cached_tokens = cached
                case Stored(blocks=blocks, parent=parent):
                    stored = BlocksStored(
                        [EngineHash(block) for block in blocks],
                        None if parent is None else EngineHash(parent),
                        self._blocks.tokens(blocks),
                        self._blocks.size,
                    )
                    self._announce(slot, stored)
                case Removed(blocks=blocks):
                    self._announce(slot, BlocksRemoved([EngineHash(block) for block in blocks]))
                case FirstToken(request=number, at=at):
                    flight = self._flights[number]
                    flight.first_at = at
                    flight.lease.first_byte(at)
                case Finished(request=number, at=at):
                    self._finish(self._flights.pop(number), at)
                case Tokens() | Cleared():
                    pass  # not at this grain; never asked for
        station.version += 1
        wake = station.engine.next_event_at()
        if wake is not None:
            self._enter(wake, _ENGINE, slot, station.version)

    def _announce(self, slot: int, event: KvEvent) -> None:
        if self._event_delay_s:
            self._late.append(event)
            self._enter(self._now + self._event_delay_s, _EVENTS, slot)
        else:
            self.index.apply(self._stations[slot].worker.slot, _RANK, [event])

    def _finish(self, flight: _Flight, at: float) -> None:
        turn = flight.turn
        usage = Usage(turn.prompt_tokens, max(1, turn.output_tokens), flight.cached_tokens)
        ending = Ending(Result.COMPLETED, 200, at, usage, first_byte_at=flight.first_at, last_byte_at=at)
        self.outcomes.append(flight.lease.settle(ending, started_at=flight.arrived_at, stages=StageTimes()))
        following = self._next.get(turn.number)
        if following is not None:
            self._enter(max(self._turns[following].at_s, at + TURN_GAP_S), _ARRIVAL, following)

    def _poll(self) -> None:
        for station in self._stations:
            engine = station.engine
            self._take(station, engine.advance(self._now))
            counters = engine.counters
            sample = LoadSample(
                running=float(engine.running),
                waiting=float(engine.waiting),
                kv_usage=engine.kv_usage,
                prefix_queries=float(counters.queried_tokens),
                prefix_hits=float(counters.hit_tokens),
            )
            self.fleet.load(station.worker.id, sample, self._now)

    # ---------------------------------------------------------------- figures

    def _report(self) -> ReplayReport:
        outcomes = self.outcomes
        count = len(outcomes)
        ttft = sorted(outcome.ttft_s or 0.0 for outcome in outcomes)
        ends = sorted(outcome.ended_at - outcome.started_at for outcome in outcomes)
        prompt = sum(outcome.prompt_tokens for outcome in outcomes)
        busy = [station.engine.counters.prefill_busy_s for station in self._stations]
        span = max(o.ended_at for o in outcomes) - min(o.started_at for o in outcomes)
        placed = [station.engine.counters.finished for station in self._stations]
        return ReplayReport(
            requests=count,
            hit=sum(outcome.delivered_tokens or 0 for outcome in outcomes) / prompt,
            predicted=sum(outcome.predicted_tokens for outcome in outcomes) / prompt,
            misses=sum(1 for outcome in outcomes if outcome.missed_tokens),
            ttft_mean_s=sum(ttft) / count,
            ttft_p50_s=_quantile(ttft, 0.5),
            ttft_p90_s=_quantile(ttft, 0.9),
            ttft_p99_s=_quantile(ttft, 0.99),
            end_p50_s=_quantile(ends, 0.5),
            imbalance=max(busy) / (sum(busy) / len(busy)),
            utilisation=sum(busy) / len(busy) / span,
            shares=tuple(number / count for number in placed),
            refused=self._refused,
        )


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
