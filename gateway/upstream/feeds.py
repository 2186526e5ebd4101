"""The members' part of the index: the block size it is kept in, and the event feeds that fill it.

Rules:
1. The index keeps a worker's blocks in the block size of its pool's keys. When a newcomer changes that size, the
   pool's workers are bound anew and their feeds learn them anew.
2. What is forgotten goes in steps, so that requests go on; meanwhile the worker holds nothing.
3. All feeds share one lock (`kv_feed`); who changes a worker's size has it too, so no feed has its turn then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import zmq

from gateway.kv import KvIndex
from gateway.pool import Fleet
from gateway.records import EventSource, WorkerId
from gateway.upstream.kv_feed import KvFeed
from gateway.upstream.members import Member, Seat, Tasks

_FORGOTTEN_AT_ONCE: Final = 1_000
"""Blocks forgotten in one turn of the loop, half a millisecond."""


class Feeds:
    """Feeds of all seats; `members` is read, never changed."""

    def __init__(
        self,
        fleet: Fleet,
        index: KvIndex,
        members: Mapping[WorkerId, Member],
        *,
        tasks: Tasks,
        context: zmq.Context[Any],
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._members = members
        self._tasks = tasks
        self._context = context
        self._clock = clock
        self._turns = asyncio.Lock()
        self.before: Callable[[Member, Seat, KvFeed], Awaitable[None]] | None = None
        """What may be known of a rank before its feed runs: each waits for it, and it has limits of its own."""

    def start(self, seat: Seat, sources: Iterable[EventSource]) -> None:
        """Follow these ranks of a seat."""
        for source in sources:
            feed = seat.feeds[source] = KvFeed(
                seat.spec.name,
                seat.slot,
                source,
                index=self._index,
                context=self._context,
                clock=self._clock,
                turns=self._turns,
                on_trust=lambda: self._trust_changed(seat),
            )
            self._tasks.start(seat.feed_name(source), partial(self._run, seat, feed))

    async def stop(self, seat: Seat, sources: Sequence[EventSource]) -> None:
        """Follow them no more, and forget what they announced."""
        for source in sources:
            await self._tasks.stop(seat.feed_name(source))
            seat.feeds.pop(source)
            await _in_steps(self._index.purging(seat.slot, source.rank, most=_FORGOTTEN_AT_ONCE))
        if sources and not seat.feeds:
            await self.forget_learned(seat)  # from here on it is learned from routing

    async def forget_learned(self, seat: Seat) -> None:
        """What was learned from routing is not believed any more."""
        await _in_steps(self._index.forgetting(seat.slot, most=_FORGOTTEN_AT_ONCE))

    def release(self, seat: Seat) -> None:
        """Nothing writes to its slot any more: the index has it back."""
        self._index.release(seat.slot)

    async def fit_block_sizes(self) -> None:
        """Bind every worker in the block size of its pool's keys (rule 1): newcomers at once, others when what they
        hold in the old size is gone."""
        changed: list[tuple[Member, Seat]] = []
        for member in self._members.values():
            for seat in member.seats.values():
                if not seat.block_size:
                    self._bind(member, seat)
                elif self._wrong_size(member, seat):
                    changed.append((member, seat))
        for member, seat in changed:
            async with self._turns:
                if not self._wrong_size(member, seat):
                    continue
                for feed in seat.feeds.values():
                    feed.resync()  # before the first step: what is half gone is neither to be believed nor copied
                for clear in (self._index.purging, self._index.forgetting):
                    if self._wrong_size(member, seat):
                        await _in_steps(clear(seat.slot, most=_FORGOTTEN_AT_ONCE))
                self._bind(member, seat)

    def _wrong_size(self, member: Member, seat: Seat) -> bool:
        """Whether a worker is still to be bound; it may have left meanwhile, and its slot may be another's."""
        return member.seats.get(seat.spec.name) is seat and seat.block_size != self._key_block_size(seat)

    def _key_block_size(self, seat: Seat) -> int:
        return self._fleet.key_block_size(self._fleet.workers[seat.spec.name])

    def _bind(self, member: Member, seat: Seat) -> None:
        """Bind one worker, unless that is done or it has left meanwhile."""
        if self._wrong_size(member, seat):
            worker = self._fleet.workers[seat.spec.name]
            seat.block_size = self._key_block_size(seat)
            self._index.bind(seat.slot, block_size=seat.block_size, engine=worker.facts.engine)

    def _trust_changed(self, seat: Seat) -> None:
        """At once: a request that is decided next is judged by what the feeds are then."""
        worker = self._fleet.workers.get(seat.spec.name)
        if worker is not None:
            worker.follow(seat.trust, self._clock())

    async def _run(self, seat: Seat, feed: KvFeed) -> None:
        if self.before is not None:
            await self.before(self._members[seat.spec.member], seat, feed)
        await feed.run()


async def _in_steps(steps: Generator[int, None, None]) -> None:
    """Let others work between two steps; when cancelled, the rest is done at once."""
    with contextlib.closing(steps):
        for _ in steps:
            await asyncio.sleep(0)
