"""Several gateways over one fleet, with and without what they tell each other: traces on the virtual clock.

    python -m benchmarks.replicas [--traces DIR] [--only NAME] [--delay S] [--at-once]

Requests of a trace go to one replica after the other. Each has a router, a fleet and an index of its own; events and
polls reach all of them. With the exchange, the serving journal and peers talk in the serving messages: news `batch_s`
after the first of them, a full state a second, `delay` on the way. Requests wait at the gateway as in service. Messages
and bytes are for each request. No network, no noise: the same figures every time.
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from benchmarks.scoring import CASES, WORKERS, Case
from gateway.admission import Admission, AdmissionSettings
from gateway.kv import KvIndex
from gateway.kv.events import KvEvent
from gateway.policy import make_policy
from gateway.pool import Fleet
from gateway.records import EngineKind, WorkerFacts, WorkerId, WorkerSpec
from gateway.replicas import Journal, Peers
from gateway.replicas.messages import decode, encode
from gateway.router import Router
from gateway.sim.engine import PRESETS
from gateway.sim.engine_records import Happening
from gateway.sim.replay import _PUMP, Replay, ReplayReport
from gateway.sim.trace import Turn, arrivals, read_trace

TRACES = Path(__file__).parent.parent / "tests" / "golden" / "traces"
BATCH_S, STATE_S = 0.02, 1.0
DELAY_S = 0.002
REPLICAS = (1, 2, 8)


class _Site:
    """One replica: its own core and what it tells."""

    def __init__(self, number: int, fleet: Fleet, index: KvIndex, router: Router) -> None:
        self.fleet, self.index, self.router = fleet, index, router
        self.admission: Admission | None = None
        self.news_at: float | None = None
        self.changed = False
        self.journal = Journal(number, fleet, index, on_change=self._wake)
        self.peers = Peers(number, fleet, index, router.sessions)
        router.watch(self.journal)

    def _wake(self) -> None:
        self.changed = True


@dataclass(slots=True)
class Traffic:
    """What was said: messages, bytes of one copy each, and CPU seconds of encoding and of hearing."""

    messages: int = 0
    bytes: int = 0
    say_s: float = 0.0
    hear_s: float = 0.0


class ReplicaReplay(Replay):
    """A replay through `replicas` routers instead of one. The base sees one at a time, the one whose turn it is."""

    def __init__(
        self, case: Case, turns: list[Turn], *, replicas: int, shared: bool, hold: bool, delay_s: float, seed: int = 1
    ) -> None:
        model = PRESETS[case.preset]
        policy = make_policy("seconds", rng=Random(seed))
        super().__init__(turns, policy=policy, model=model, block_size=case.block_size, workers=WORKERS, seed=seed)
        self.traffic = Traffic()
        self._shared = shared
        self._delay_s = delay_s
        self._letters: list[tuple[float, int, int, bytes]] = []
        self._numbers = count()
        self._state_at = STATE_S
        self._sites = [_Site(1, self.fleet, self.index, self.router)]
        for number in range(2, replicas + 1):
            self._sites.append(self._another(number, case.block_size, seed))
        if hold:
            for site in self._sites:
                site.admission = Admission(site.router, self._wake, settings=AdmissionSettings())
        self._turn = count()

    def _another(self, number: int, block_size: int, seed: int) -> _Site:
        fleet, index = Fleet(), KvIndex()
        rng = Random(seed + number)
        router = Router(fleet, index, make_policy("seconds", rng=rng), rng=rng)
        for at, station in enumerate(self._stations):
            blocks = station.engine.capacity_blocks
            facts = WorkerFacts(EngineKind.UNKNOWN, "", ("trace",), block_size=block_size, kv_blocks=blocks)
            worker = fleet.add(WorkerSpec(WorkerId(f"w{at}"), f"sim://w{at}"), facts, 0.0)
            index.bind(worker.slot, block_size=block_size)
        return _Site(number, fleet, index, router)

    # ---------------------------------------------------------------- what happens

    def _arrive(self, turn: Turn) -> None:
        self._carry()
        site = self._sites[next(self._turn) % len(self._sites)]
        self.router, self.admission = site.router, site.admission
        super()._arrive(turn)
        self._plan()

    def _take(self, station, happenings: list[Happening]) -> None:  # type: ignore[no-untyped-def, override]
        self._carry()
        super()._take(station, happenings)
        self._plan()

    def _announce(self, slot: int, event: KvEvent) -> None:
        for site in self._sites:
            site.index.apply(self._stations[slot].worker.slot, 0, [event])

    def _poll(self) -> None:
        for site in self._sites:
            self.fleet = site.fleet
            super()._poll()
            site.router.expire(self._now)

    def _pump(self) -> None:
        self._carry()
        self._pump_wanted = False
        self._pumps += 1
        again = [site.admission.pump(self._now) for site in self._sites if site.admission is not None]
        soonest = min((at for at in again if at is not None), default=None)
        if soonest is not None:
            self._enter(soonest, _PUMP, 0, self._pumps)
        self._plan()

    # ---------------------------------------------------------------- messages

    def _plan(self) -> None:
        for site in self._sites:
            if site.changed:
                site.changed = False
                if site.news_at is None:
                    site.news_at = self._now + BATCH_S

    def _carry(self) -> None:
        """Say and hear what is due: nothing has changed since, so saying it late is saying it then."""
        if not self._shared or len(self._sites) == 1:
            return
        while True:
            news_at = min((site.news_at for site in self._sites if site.news_at is not None), default=float("inf"))
            letter_at = self._letters[0][0] if self._letters else float("inf")
            at = min(news_at, letter_at, self._state_at)
            if at > self._now:
                return
            if at == letter_at:
                self._deliver()
            elif at == news_at:
                for site in self._sites:
                    if site.news_at is not None and site.news_at <= at:
                        site.news_at = None
                        self._say(site, at, full=False)
            else:
                self._state_at += STATE_S
                for site in self._sites:
                    self._say(site, at, full=True)
                    site.peers.tick(at)

    def _say(self, site: _Site, at: float, *, full: bool) -> None:
        began = time.process_time()
        messages = site.journal.state(at) if full else site.journal.news(at)
        payloads = [encode(message) for message in messages]
        self.traffic.say_s += time.process_time() - began
        for payload in payloads:
            self.traffic.messages += 1
            self.traffic.bytes += len(payload)
            heapq.heappush(self._letters, (at + self._delay_s, next(self._numbers), site.journal.replica, payload))

    def _deliver(self) -> None:
        at, _, sender, payload = heapq.heappop(self._letters)
        began = time.process_time()
        for site in self._sites:
            if site.journal.replica != sender:
                site.peers.hear(decode(payload), at)
        self.traffic.hear_s += time.process_time() - began


def run(
    case: Case, traces: Path, *, replicas: int, shared: bool, hold: bool, delay_s: float
) -> tuple[ReplayReport, Traffic]:
    """One replay. Raises OSError when there is no such trace."""
    rows = read_trace(traces / case.file)
    turns = arrivals(rows, block_size=case.block_size, rate=case.rate, max_rows=case.max_rows)
    replay = ReplicaReplay(case, turns, replicas=replicas, shared=shared, hold=hold, delay_s=delay_s)
    return replay.run(), replay.traffic


def main() -> int:
    """Print a table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--only", action="append", choices=tuple(CASES))
    parser.add_argument("--delay", type=float, default=DELAY_S, help="seconds a message takes")
    parser.add_argument("--at-once", action="store_true", help="place every request on arrival, hold none")
    options = parser.parse_args()
    titles = (
        "trace",
        "replicas",
        "exchange",
        "hit rate",
        "TTFT mean s",
        "p99 s",
        "busiest / mean",
        "messages",
        "bytes",
    )
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for name in options.only or CASES:
        for replicas in REPLICAS:
            for shared in (False, True) if replicas > 1 else (False,):
                report, traffic = run(
                    CASES[name],
                    options.traces,
                    replicas=replicas,
                    shared=shared,
                    hold=not options.at_once,
                    delay_s=options.delay,
                )
                what = "-" if replicas == 1 else ("yes" if shared else "no")
                print(
                    f"| {name} | {replicas} | {what} | {report.hit:.3f} | {report.ttft_mean_s:.2f} | "
                    f"{report.ttft_p99_s:.2f} | {report.imbalance:.3f} | {traffic.messages / report.requests:.1f} | "
                    f"{traffic.bytes / report.requests:.0f} |",
                    flush=True,
                )
                if traffic.messages:
                    print(
                        f"  say {1e6 * traffic.say_s / traffic.messages:.0f} us, "
                        f"hear {1e6 * traffic.hear_s / traffic.messages / (replicas - 1):.0f} us a message",
                        file=sys.stderr,
                    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
