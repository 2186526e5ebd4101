"""A warm start: what other processes left in the store, and what this one leaves there.

Rules:
1. A feed that starts looks for a copy of its rank's blocks first, puts it into the index in steps, and lets the engine
   prove that it is still the same process (`FeedState.resume`); the replay then brings what came after it. A process
   that is not ready yet waits for this as it waits for the replay.
2. A copy of another start of the engine's process, of another key size, or one that cannot be read is not used. Without
   a store, without a copy, or with a store that does not answer in time the replay alone tells, as ever.
3. Copies are taken every `snapshot_s`, rank after rank, of feeds with a replay: without one nothing could prove them
   right. One that has not changed is written again before it ends. The loop only copies the tables; the rest is done
   in a thread.
4. Learned speeds are taken over where nothing was learned yet.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

import structlog

from gateway.kv import FeedPoint, KvIndex
from gateway.kv.feed_words import FeedPhase
from gateway.pool import Fleet
from gateway.records import EventSource
from gateway.replicas import Shelf
from gateway.replicas.messages import worker_key
from gateway.replicas.snapshots import (
    MAX_BYTES,
    SPEEDS_NAME,
    RankSnapshot,
    Speeds,
    decode_rank,
    decode_speeds,
    encode_rank,
    encode_speeds,
    rank_name,
)
from gateway.replicas.store import STORE_ERRORS
from gateway.upstream.kv_feed import KvFeed
from gateway.upstream.members import Member, Seat
from gateway.upstream.membership import Membership

_AT_ONCE: Final = 1_000
"""Blocks placed in one turn of the loop, a millisecond."""


REWRITTEN_EVERY: Final = 10
"""Periods after which also a copy that has not changed is written again: it lives for twenty."""

_LOOKS: Final = 600
"""Workers that join in the first five minutes begin with the speeds that were left."""


class Warmth:
    """`warm` is called for each feed before it runs; `keep` is run by the supervisor."""

    def __init__(self, shelf: Shelf, fleet: Fleet, index: KvIndex, *, snapshot_s: float) -> None:
        self.shelf = shelf
        self._fleet = fleet
        self._index = index
        self._snapshot_s = snapshot_s
        self.written: dict[tuple[int, int], FeedPoint] = {}
        """How far the copies written by this process go, by worker and rank; forgotten now and then."""
        self._periods = 0
        self._speeds: Speeds | None = None
        self._looks = 0
        self.results: Counter[str] = Counter()
        """`written`, `restored`, copies not used: `none`, `other_start`, `other_size`, `store`, and not written:
        `too_large`."""
        self._log = structlog.get_logger("kvgate.replicas")

    # ------------------------------------------------------------------ taking over

    async def warm(self, member: Member, seat: Seat, feed: KvFeed) -> None:
        """Put into the index what another process left of this feed's rank."""
        if feed.source.replay_endpoint is None or feed.phase is not FeedPhase.STARTING:
            return
        name = rank_name(worker_key(seat.spec), feed.source.rank)
        try:
            value = await self.shelf.get(name)
        except STORE_ERRORS as error:
            self._log.info("no warm start", worker=seat.spec.name, reason=f"{type(error).__name__}: {error}")
            self.results["store"] += 1
            return
        snapshot = await asyncio.to_thread(decode_rank, value)
        result = "none" if snapshot is None else await self._restore(member, seat, feed.source, snapshot)
        self.results[result] += 1
        if snapshot is not None and result == "restored":
            feed.resume(snapshot.point)
            self._log.info(
                "warm start", worker=seat.spec.name, rank=feed.source.rank, blocks=snapshot.blocks.blocks,
                after=snapshot.point.seq,
            )  # fmt: skip

    async def _restore(self, member: Member, seat: Seat, source: EventSource, snapshot: RankSnapshot) -> str:
        started = member.facts.start_time_unix if member.facts is not None else None
        if None not in (started, snapshot.started_unix) and started != snapshot.started_unix:
            return "other_start"
        steps = self._index.restoring(seat.slot, source.rank, snapshot.blocks, most=_AT_ONCE)
        whole = False
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
        except StopIteration as end:
            whole = bool(end.value)
        finally:
            steps.close()
            if not whole:
                self._index.purge(seat.slot, source.rank)
        return "restored" if whole else "other_size"

    def tick(self) -> None:
        """About twice a second: speeds of pools and workers that are new here."""
        speeds = self._speeds
        if speeds is None or self._looks > _LOOKS:
            return
        self._looks += 1
        for pool in self._fleet.pools.values():
            learned = speeds.pools.pop(pool.model, None)
            if learned is not None and not pool.rates.samples:
                pool.rates.take_over(learned)
        for worker in self._fleet.workers.values():
            learned = speeds.workers.pop(worker_key(worker.spec), None) if speeds.workers else None
            if learned is not None and not worker.speed.samples:
                worker.speed.take_over(learned)
                worker.relearn()

    # ------------------------------------------------------------------ leaving behind

    async def keep(self, membership: Membership) -> None:
        """Fetch speeds, then write copies and speeds, until cancelled."""
        while True:
            try:
                if self._speeds is None:
                    self._speeds = decode_speeds(await self.shelf.get(SPEEDS_NAME)) or Speeds({}, {})
                else:
                    await self._write(membership)
            except STORE_ERRORS:
                self.results["store"] += 1
            await asyncio.sleep(self._snapshot_s if self._speeds is not None else min(1.0, self._snapshot_s))

    async def _write(self, membership: Membership) -> None:
        period_s = 0.9 * self._snapshot_s
        self._periods += 1
        if self._periods % REWRITTEN_EVERY == 0:
            self.written.clear()
        if await self.shelf.claim(SPEEDS_NAME, period_s):
            await self.shelf.put(SPEEDS_NAME, encode_speeds(self._learned()))
        for member in list(membership.members.values()):
            for seat in list(member.seats.values()):
                for source, feed in list(seat.feeds.items()):
                    await self._write_rank(member, seat, source, feed, period_s)

    async def _write_rank(self, member: Member, seat: Seat, source: EventSource, feed: KvFeed, period_s: float) -> None:
        key = worker_key(seat.spec), source.rank
        if source.replay_endpoint is None or feed.point is None or feed.point == self.written.get(key):
            return
        if not await self.shelf.claim(rank_name(*key), period_s):
            return
        if seat.feeds.get(source) is not feed:
            return  # it has left meanwhile, and its slot may be another worker's
        # Nothing is awaited between these two: the copy is that of the point.
        point = feed.point
        blocks = self._index.snapshot(seat.slot, source.rank) if point is not None else None
        if point is None or blocks is None:
            return
        started = member.facts.start_time_unix if member.facts is not None else None
        value = await asyncio.to_thread(encode_rank, RankSnapshot(started, point, blocks))
        if len(value) > MAX_BYTES:
            self.results["too_large"] += 1  # nobody would read it
        else:
            await self.shelf.put(rank_name(*key), value)
            self.results["written"] += 1
        self.written[key] = point

    def _learned(self) -> Speeds:
        pools = {pool.model: pool.rates.learned() for pool in self._fleet.pools.values() if pool.rates.samples}
        workers = {
            worker_key(worker.spec): worker.speed.learned()
            for worker in self._fleet.workers.values()
            if worker.speed.samples
        }
        return Speeds(pools, workers)
