"""Load of the workers: what they say about themselves, read every `poll_s` seconds, or heard from a socket.

Rules:
1. A poll is never in a request's way: each URL has its own loop, its own connection and one deadline a poll. Ranks
   behind one URL are read by one poll.
2. A failed poll delivers nothing. It is counted and its reason kept; the age of the last sample says the rest.
3. SGLang's scheduler gauges in `/metrics` are refreshed every 40 decode iterations only, so `/v1/loads` is asked first
   (`/get_load` where a release does not have it yet) and `/metrics` seldom, for the counters. Both are there without
   `--enable-metrics`. Which paths a server has is found out again after a failure: it may be another release then.
4. A server that has had nothing to do for some polls, and has nothing of ours, is asked every third time only: polls of
   idle workers are most of what a large fleet costs. Its sample stays younger than what is forgotten.
5. Where a load socket (`load_socket`) tells the load of a worker, the load in a poll is not used: it may be the older
   one. Where all workers of the URL are told so, polls come as seldom as `/metrics` is read, for its counters; those
   are joined to what the socket says. A socket that falls silent leaves the next period to a poll again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from gateway.records import EngineKind, LoadSample, WorkerId, WorkerSpec
from gateway.upstream.control import Answer, ControlClient, ProbeFailed
from gateway.upstream.load_text import parse_loads, parse_metrics, parse_old_loads, parse_ranks
from gateway.upstream.poll_line import PollLine

COUNTER_POLLS = 15
"""SGLang: every this many polls `/metrics` is read too. Its counters only feed averages over minutes."""

TIGHTENED = 4.0
"""A tightened poll comes this many times as often, but no more often than `LEAST_POLL_S`."""

LEAST_POLL_S = 0.1

QUIET_POLLS = 3
IDLE_SKIPS = 2
"""Polls left out between two of an idle server, that is one that was so for `QUIET_POLLS` (rule 4)."""

JITTER = 0.1
"""Share of the period by which each pause is changed, so that many workers are not asked in one burst."""


@dataclass(slots=True)
class PollCounts:
    """What became of a worker's polls. `last_error` is None after a good one; `counters_error` tells why an SGLang
    worker's cumulative counters are missing although its load is known."""

    ok: int = 0
    failed: int = 0
    last_error: str | None = None
    counters_error: str | None = None


Samples = Mapping[int | None, LoadSample]
"""By rank; None is the key of a worker that is all ranks of its URL together."""


def _hears_nobody(rank: int | None) -> bool:
    return False


_SGLANG_LOADS: tuple[tuple[str, Callable[[bytes, Sequence[int]], Samples]], ...] = (
    ("/v1/loads?include=core", parse_loads),
    ("/get_load", parse_old_loads),
)


class LoadPoller:
    """Polls one URL until cancelled; good samples go to `on_sample(worker, sample)` at once, one for each worker
    behind it.

    `counts` is read by metrics and the admin port. `engine` is what probing found. `workers` says who is behind the
    URL, by rank, and may be changed while it runs; without it there is one worker with the name of `spec`. A rank that
    is not in the answer may be gone: the others' samples count, the poll is a failed one, and `on_missing` is called,
    once. `unused` says that nothing of ours is open there, `hears` whether a socket tells a worker's load (rule 5).
    """

    def __init__(
        self,
        spec: WorkerSpec,
        engine: EngineKind,
        *,
        client: ControlClient,
        on_sample: Callable[[WorkerId, LoadSample], None],
        random: Random,
        workers: Mapping[int | None, WorkerId] | None = None,
        on_missing: Callable[[], None] | None = None,
        unused: Callable[[], bool] | None = None,
        poll_s: float = 1.0,
        timeout_s: float = 2.0,
    ) -> None:
        self.workers: Mapping[int | None, WorkerId] = workers or {None: spec.name}
        self.hears: Callable[[int | None], bool] = _hears_nobody
        self.counts = PollCounts()
        self._spec = spec
        self._engine = engine
        self._client = client
        own = client.tls is not None or spec.url.startswith("http://")
        self._line = PollLine(spec.url, api_key=spec.api_key, tls=client.tls) if own else None
        self._on_sample = on_sample
        self._random = random
        self._usual_s = poll_s
        self._tightened = False
        self.period_s = poll_s
        """Seconds between two polls now."""
        self._timeout_s = timeout_s
        self._on_missing = on_missing
        self._missing: frozenset[int | None] | set[int | None] = frozenset()
        self._absent: set[str] = set()
        """Of SGLang's paths, those that the server does not have."""
        self._counters: Samples = {}
        self._until_counters = 0
        self._unused = unused or (lambda: False)
        self._quiet = 0
        self._skipped = 0

    async def run(self) -> None:
        """Never returns. The first poll comes after a small part of a period: a fleet's polls do not start as one."""
        try:
            await asyncio.sleep(self.period_s * self._random.random() * JITTER)
            while True:
                if not self.skips():
                    await self.poll()
                await asyncio.sleep(self.period_s * self._random.uniform(1 - JITTER, 1 + JITTER))
        finally:
            self.close()

    def skips(self) -> bool:
        """It is time for a poll: whether it is left out (rules 4 and 5)."""
        most = 0
        if all(map(self.hears, self.workers)):
            most = COUNTER_POLLS - 1
            self._until_counters = 0
        elif self._quiet >= QUIET_POLLS and not self._tightened and self._unused():
            most = IDLE_SKIPS
        skips = self._skipped < most
        self._skipped = self._skipped + 1 if skips else 0
        return skips

    def heard(self, loads: Samples) -> None:
        """What a socket has told of some of the workers."""
        self._quiet = 0  # once it is silent, polls must not be seldom for an earlier rest
        for rank, load in loads.items():
            worker = self.workers.get(rank)
            if worker is not None:
                counted = _joined(load, self._counters.get(rank))
                self._on_sample(worker, replace(counted, start_time_unix=None))  # of the process that was polled

    def restarted(self) -> None:
        """Counters are another process's: the next period reads them anew."""
        self._counters, self._until_counters = {}, 0
        self._skipped = COUNTER_POLLS

    def respec(self, spec: WorkerSpec) -> None:
        """The worker has another key; its address is the same."""
        if spec.api_key != self._spec.api_key and self._line is not None:
            self._line.close()
            self._line = PollLine(spec.url, api_key=spec.api_key, tls=self._client.tls)
        self._spec = spec

    def tighten(self, on: bool) -> None:
        """Poll more often from the next poll on, or as usual again."""
        self._tightened = on
        self.period_s = min(self._usual_s, max(LEAST_POLL_S, self._usual_s / TIGHTENED)) if on else self._usual_s

    def pace(self, poll_s: float) -> None:
        """Another usual period, from the next poll on."""
        self._usual_s = poll_s
        self.tighten(self._tightened)

    def close(self) -> None:
        """Drop the kept connection; a later poll opens one."""
        if self._line is not None:
            self._line.close()

    async def poll(self) -> None:
        """One poll; a failure is counted and kept in `counts.last_error`."""
        workers = self.workers
        try:
            samples = await self._samples([rank for rank in workers if rank is not None])
        except (ProbeFailed, ValueError) as error:
            self._quiet = 0
            self._absent.clear()
            self.counts.failed += 1
            self.counts.last_error = str(error)
            return
        busy = any(sample.running or sample.waiting for sample in samples.values())
        self._quiet = 0 if busy else self._quiet + 1
        for rank, sample in samples.items():
            if not self.hears(rank):
                self._on_sample(workers[rank], sample)
        missing = workers.keys() - samples.keys()
        if missing:
            self.counts.failed += 1
            self.counts.last_error = f"no load of data-parallel rank {', '.join(sorted(map(str, missing)))}"
            if missing != self._missing and self._on_missing is not None:
                self._on_missing()
        else:
            self.counts.ok += 1
            self.counts.last_error = None
        self._missing = missing

    async def _samples(self, ranks: Sequence[int]) -> Samples:
        if self._engine is EngineKind.SGLANG:
            for path, parse in _SGLANG_LOADS:
                if path in self._absent:
                    continue
                answer = await self._ask(path)
                if answer.status == 404:
                    self._absent.add(path)
                    continue
                if answer.status != 200:
                    raise ProbeFailed(f"{self._spec.url}{path} answered {answer.status}")
                samples = parse(answer.body, ranks)
                counters = await self._sglang_counters(ranks)
                return {rank: _joined(sample, counters.get(rank)) for rank, sample in samples.items()}
        return self._read_metrics(await self._get("/metrics"), ranks)

    def _read_metrics(self, text: bytes, ranks: Sequence[int]) -> Samples:
        return parse_ranks(text, self._engine, ranks) if ranks else {None: parse_metrics(text, self._engine)}

    async def _sglang_counters(self, ranks: Sequence[int]) -> Samples:
        """The counters of the last look into `/metrics`; empty where SGLang runs without `--enable-metrics`, which is
        no failure of the poll."""
        if self._until_counters > 0:
            self._until_counters -= 1
            return self._counters
        self._until_counters = COUNTER_POLLS - 1
        try:
            self._counters = self._read_metrics(await self._get("/metrics"), ranks)
            self.counts.counters_error = None
        except (ProbeFailed, ValueError) as error:
            self._counters = {}
            self.counts.counters_error = str(error)
        return self._counters

    async def _ask(self, target: str) -> Answer:
        if self._line is not None:
            return await self._line.get(target, timeout_s=self._timeout_s)
        return await self._client.get(self._spec.url + target, api_key=self._spec.api_key, timeout_s=self._timeout_s)

    async def _get(self, path: str) -> bytes:
        answer = await self._ask(path)
        if answer.status != 200:
            raise ProbeFailed(f"{self._spec.url}{path} answered {answer.status}")
        return answer.body


def _joined(load: LoadSample, counters: LoadSample | None) -> LoadSample:
    """A load with what only `/metrics` tells."""
    if counters is None:
        return load
    return replace(
        load,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        kv_blocks=counters.kv_blocks,
        start_time_unix=counters.start_time_unix,
        adapter_slots=counters.adapter_slots,
    )
