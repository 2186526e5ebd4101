"""One rank's KV event feed: turns of work around its sockets (`feed_sockets`), `kv.feed_state` and the index.

Rules:
1. All decisions about sequence numbers are the state machine's; this file executes its actions in order.
2. Work is done in turns of at most `turn_s`, or `turn_blocks` blocks where a batch is longer; then the loop serves
   others. All feeds of a process share one lock, so that together they take one turn per pass of the loop.
3. A new connection of the subscription is told to the state machine before what comes over it.
4. A broken message is counted and never ends the feed. What does end `run` (a malformed endpoint, a closed context) is
   raised to the supervisor. Cancelling `run` at any point closes the sockets without lingering.

The subscription is connected before the first replay request, so that batches published in between arrive live and wait
their turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from gateway.kv.events import (
    Cleared,
    ForeignMessage,
    KvEvent,
    MalformedMessage,
    Removed,
    Stored,
    batch_rank,
    decode_batch,
    parse_live,
    parse_reply,
)
from gateway.kv.feed_state import FeedState
from gateway.kv.feed_words import (
    Action,
    Apply,
    AskReplay,
    EndPreview,
    FeedCounters,
    FeedPhase,
    FeedPoint,
    Preview,
    Purge,
)
from gateway.kv.index import KvIndex
from gateway.kv.lives import BlockLives
from gateway.kv.numbers import Applied
from gateway.kv.pieces import LARGE_BYTES, cost, large_pieces, pieces
from gateway.records import EventSource, Slot, Tier, TrustState, WorkerId
from gateway.upstream.feed_sockets import FeedSockets, Subscription

_MAX_OTHER_RANKS: Final = 64
_MAX_WANTED: Final = 16


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How much one feed does before others get their turn."""

    turn_s: float = 0.002
    turn_blocks: int = 1_000


class FeedTotals:
    """What one feed brought to the index since it was made, for metrics. Blocks are the engine's; `events` is by kind
    (`stored`, `removed`, `cleared`), `skipped` by the decoder's reason, `ignored` by the index's."""

    __slots__ = ("events", "ignored", "removed", "repeated", "skipped", "stored")

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.stored: Counter[Tier] = Counter()
        self.removed: Counter[Tier] = Counter()
        self.ignored: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.repeated = 0

    def add(self, applied: Applied) -> None:
        """Add what one call of `KvIndex.apply` changed."""
        # `Counter.update` costs more than applying a small batch.
        for tier, blocks in applied.stored.items():
            self.stored[tier] += blocks
        for tier, blocks in applied.removed.items():
            self.removed[tier] += blocks
        for reason, blocks in applied.ignored.items():
            self.ignored[reason] += blocks
        self.repeated += applied.repeated


@dataclass(frozen=True, slots=True)
class _Lane:
    """One publisher of the endpoint: its state, and the rank its blocks are kept under."""

    rank: int
    state: FeedState


_Wish = Callable[[FeedState, float], list[Action]]
"""What somebody wants of a feed's state now."""

_WORSE: Final = (TrustState.TRUSTED, TrustState.CATCHING_UP, TrustState.UNCERTAIN, TrustState.BLIND)
"""From best to worst."""


def worst_trust(states: Iterable[TrustState]) -> TrustState:
    """The worst of them; without any nothing is heard."""
    return max(states, key=_WORSE.index, default=TrustState.BLIND)


class KvFeed:
    """Subscribes to one rank of one worker and keeps the index in step. Make a new one when its address changes.

    `clock` gives monotonic seconds. `turns` is the lock all feeds of the process share (rule 2). `on_trust` is called
    when `trust` has changed, before anything else runs.
    """

    def __init__(
        self,
        worker: WorkerId,
        slot: Slot,
        source: EventSource,
        *,
        index: KvIndex,
        context: zmq.Context[Any],
        clock: Callable[[], float],
        turns: asyncio.Lock,
        on_trust: Callable[[], None] = lambda: None,
        state: FeedState | None = None,
        limits: TurnLimits | None = None,
    ) -> None:
        self.worker = worker
        self.slot = slot
        self.source = source
        self.totals = FeedTotals()
        self.lives = BlockLives()
        self._state = state or FeedState(can_replay=source.replay_endpoint is not None)
        self._lane = _Lane(source.rank, self._state)
        self._others: dict[int, _Lane] = {}
        self._heard_rank: int | None = None
        self._index = index
        self._sockets = FeedSockets(source, context)
        self._clock = clock
        self._turns = turns
        self._on_trust = on_trust
        self._told_trust: TrustState | None = None
        self._limits = limits or TurnLimits()
        self._actions: deque[tuple[_Lane, Action]] = deque()
        self._purging: Generator[int, None, None] | None = None
        self._doing: tuple[_Lane, Apply | Preview, Iterator[KvEvent]] | None = None
        self._begun: deque[Generator[int, None, None]] = deque()  # purges that somebody else has begun
        self._unfinished: _Lane | None = None  # what waited for its blocks is being placed
        self._previewed: set[int] = set()  # ranks with a preview
        self._wanted: deque[_Wish] = deque(maxlen=_MAX_WANTED)
        self._running = False
        self._wake = asyncio.Event()

    @property
    def caught_up(self) -> bool:
        """Whether the index shows what this rank published: replay done, nothing received waits to be applied."""
        busy = (
            self._actions
            or self._begun
            or self._doing is not None
            or self._purging is not None
            or self._unfinished is not None
        )
        return self._state.caught_up and not busy

    @property
    def point(self) -> FeedPoint | None:
        """How far it has come, when the index shows exactly that; None while it does not, or the feed is doubted."""
        return self._state.point if self.caught_up and not self._others and not self._wanted else None

    def resume(self, point: FeedPoint) -> None:
        """The index has what another process had applied up to this point. Before the first `run`."""
        self._state.resume(point)

    @property
    def phase(self) -> FeedPhase:
        """The state machine's phase."""
        return self._state.phase

    @property
    def trust(self) -> TrustState:
        """How far the index shows what this rank holds, or the worst of the ranks that publish here."""
        if not self._others:
            return self._state.trust
        # One batch under another number is no rank: nothing more may come that could end its doubt.
        ranks = (lane.state for lane in self._others.values() if lane.state.counters.batches > 1)
        return worst_trust(state.trust for state in (self._state, *ranks))

    @property
    def doubt(self) -> str | None:
        """Why a feed that looks whole is not believed; None when it is."""
        return self._state.doubt

    @property
    def counters(self) -> FeedCounters:
        """The state machine's counters: batches, gaps, replays, resets, errors."""
        return self._state.counters

    @property
    def other_ranks(self) -> tuple[int, ...]:
        """Further ranks that publish at this address; none where every rank has its own, as engines place them."""
        return tuple(self._others)

    def resync(self) -> None:
        """Forget the rank and learn it anew, at the feed's next turn."""
        self._want(FeedState.resync)

    def relearn(self, since: float) -> None:
        """Drop what the rank announced and learn again what came after `since` (our clock), at the feed's next turn.
        From now on nothing of it counts."""
        for lane in self._lanes():
            steps = self._index.purging(self.slot, lane.rank, most=self._limits.turn_blocks)
            next(steps, None)
            if self._running:
                self._begun.append(steps)
            else:
                steps.close()
        self._want(lambda state, now: state.relearn(since, now))

    def process_started(self, at_unix: float) -> None:
        """The worker's process started then: what is older belongs to another process."""
        self._want(lambda state, now: state.on_process_started(at_unix, now))

    def served(self, blocks: int, started_at: float) -> None:
        """A request of this rank that began at `started_at` (our clock) ended with so many blocks computed anew."""
        if self._state.on_served(blocks, started_at, self._clock()):
            self._wake.set()

    def _lanes(self) -> list[_Lane]:
        return [self._lane, *self._others.values()]

    def _want(self, ask: _Wish) -> None:
        self._wanted.append(ask)
        self._wake.set()

    async def run(self) -> None:
        """Follow the feed until cancelled. Raises zmq.ZMQError when an endpoint is malformed or the context closed.

        May be called again after it ended: the rank is then learned anew.
        """
        try:
            with self._sockets.subscribed() as subscription:
                for lane in self._lanes():
                    self._add(lane, lane.state.on_opened(self._clock()))
                self._running = True
                while True:
                    async with self._turns:
                        idle = self._turn(subscription)
                    if idle:
                        await self._wait(subscription)
                    else:
                        await asyncio.sleep(0)
        finally:
            self._running = False
            self._actions.clear()
            self._doing = self._unfinished = None
            for purging in (self._purging, *self._begun):
                if purging is not None:
                    purging.close()
            self._purging = None
            self._begun.clear()

    async def _wait(self, subscription: Subscription) -> None:
        """Until a socket has something, the state's deadline is reached, or somebody wants something."""
        deadline = self._state.deadline
        wait_s = None if deadline is None else max(0.0, deadline - self._clock())
        await self._sockets.wait(subscription, self._wake, lambda: self._wanted, wait_s)

    # ------------------------------------------------------------------ work

    def _turn(self, subscription: Subscription) -> bool:
        """Work until there is nothing to do (True) or the turn is over (False)."""
        until = self._clock() + self._limits.turn_s
        idle = True
        while self._step(subscription):
            if self._clock() >= until:
                idle = False
                break
        trust = self.trust
        if trust is not self._told_trust:
            self._told_trust = trust
            self._on_trust()
        return idle

    def _step(self, subscription: Subscription) -> bool:
        """The next small piece of work; False when there is none. What was received is applied before more is taken,
        so nothing piles up here; replies come before live messages, which wait in the socket."""
        if self._purging is not None:
            if next(self._purging, None) is None:
                self._purging = None
            return True
        if self._unfinished is not None:
            self._apply(self._unfinished, ())
            return True
        if self._doing is not None:
            self._apply_some(*self._doing)
            return True
        if self._actions:
            self._execute(*self._actions.popleft())
            return True
        if self._begun:
            self._purging = self._begun.popleft()
            return True
        if self._wanted:
            wish = self._wanted.popleft()
            for lane in self._lanes():
                self._add(lane, wish(lane.state, self._clock()))
            return True
        if self._sockets.replays:
            if not self._state.asking:
                self._sockets.close_replay()
            elif (reply := self._sockets.reply()) is not None:
                self._on_reply(reply)
                return True
        deadline = self._state.deadline
        if deadline is not None and self._clock() >= deadline:
            self._add(self._lane, self._state.on_tick(self._clock()))
            return True
        frames = subscription.live()
        # Asked for after the message: the first one of a new connection comes after its handshake.
        connected = subscription.connected()
        if connected:
            for lane in self._lanes():
                self._add(lane, lane.state.on_connected(self._clock()))
        if frames is not None:
            self._on_live(frames)
        return connected or frames is not None

    def _add(self, lane: _Lane, actions: list[Action], *, first: bool = False) -> None:
        tagged = [(lane, action) for action in actions]
        if first:  # ahead of what else is to be done: later batches must not be purged with it
            self._actions.extendleft(reversed(tagged))
        else:
            self._actions.extend(tagged)

    def _on_live(self, frames: list[bytes]) -> None:
        try:
            message = parse_live(frames)
        except MalformedMessage:
            self.counters.errors += 1
            return
        lane = self._lane_of(message.payload)
        if lane is not None:
            self._add(lane, lane.state.on_live(message.seq, message.payload, self._clock()))

    def _on_reply(self, frames: list[bytes]) -> None:
        try:
            message = parse_reply(frames)
        except MalformedMessage:
            self.counters.errors += 1
            return
        if message is None:
            self._add(self._lane, self._state.on_replay_end(self._clock()))
        elif self._lane_of(message.payload) is self._lane:
            self._add(self._lane, self._state.on_replay(message.seq, message.payload, self._clock()))
        else:
            self.totals.skipped["other_rank"] += 1

    def _lane_of(self, payload: bytes) -> _Lane | None:
        """Whose batch this is. Engines place every rank at an address of its own, and then its number does not matter;
        where a relay joins several, each has its own sequence, and none but the first heard has a replay."""
        rank = batch_rank(payload)
        if rank is None or rank == self._heard_rank:
            return self._lane
        if self._heard_rank is None:
            self._heard_rank = rank
            return self._lane
        lane = self._others.get(rank)
        if lane is None:
            if len(self._others) >= _MAX_OTHER_RANKS:
                self.totals.skipped["other_rank"] += 1
                return None
            kept_under = self._heard_rank if rank == self.source.rank else rank
            lane = self._others[rank] = _Lane(kept_under, FeedState(can_replay=False))
            self._add(lane, lane.state.on_connected(self._clock()))
        return lane

    def _execute(self, lane: _Lane, action: Action) -> None:
        match action:
            case Apply():
                if lane.rank in self._previewed:
                    self._purging = self._index.ending_preview(
                        self.slot, lane.rank, most=self._limits.turn_blocks, keep_shown=True
                    )
                self._decode(lane, action)
            case Preview():
                self._previewed.add(lane.rank)
                self._decode(lane, action)
            case EndPreview():
                self._previewed.discard(lane.rank)
                self._purging = self._index.ending_preview(self.slot, lane.rank, most=self._limits.turn_blocks)
            case Purge():
                self.lives.forget()
                self._purging = self._index.purging(self.slot, lane.rank, most=self._limits.turn_blocks)
            case AskReplay():
                self._sockets.ask(action.from_seq)

    def _decode(self, lane: _Lane, action: Apply | Preview) -> None:
        payload, counted, most = action.payload, isinstance(action, Apply), self._limits.turn_blocks
        # What a preview shows comes again, and counts then.
        kinds = self.totals.events if counted else Counter()
        skipped = self.totals.skipped if counted else Counter()
        try:
            if len(payload) > LARGE_BYTES:
                found = large_pieces(payload, most=most, kinds=kinds, skipped=skipped)
            else:
                batch = decode_batch(payload)
                if isinstance(batch, ForeignMessage):
                    found = batch
                else:
                    if batch.skipped:
                        skipped.update(batch.skipped)
                    found = pieces(batch.events, most=most, kinds=kinds)
        except MalformedMessage:
            if counted:
                self._add(lane, lane.state.on_undecodable(), first=True)
            return
        if isinstance(found, ForeignMessage):
            skipped["foreign"] += 1
        else:
            self._doing = lane, action, found

    def _apply_some(self, lane: _Lane, action: Apply | Preview, waiting: Iterator[KvEvent]) -> None:
        """Apply or preview events up to the limit of blocks."""
        if self._index.learned(self.slot) and not self._index.announces(self.slot):
            self._purging = self._index.hearing(self.slot, most=self._limits.turn_blocks)
            return
        events: list[Stored | Removed] = []
        blocks = 0
        for event in waiting:
            if isinstance(event, Cleared):
                actions = lane.state.on_cleared(action.seq, self._clock())
                if actions:  # nothing before this batch counts: it is applied at once
                    self._add(lane, actions, first=True)
                    self._doing = None
                    return
                if isinstance(action, Apply):
                    self.lives.forget()
                    self._purging = self._index.purging(
                        self.slot, lane.rank, most=self._limits.turn_blocks, cleared=True
                    )
                    break
                continue  # a preview shows no clear
            blocks += cost(event)
            events.append(event)
            if blocks >= self._limits.turn_blocks:
                break
        else:
            self._doing = None
        if isinstance(action, Preview):
            self._index.preview(self.slot, lane.rank, events)
            return
        self._apply(lane, events)

    def _apply(self, lane: _Lane, events: Sequence[Stored | Removed]) -> None:
        applied = self._index.apply(self.slot, lane.rank, events)
        self._unfinished = lane if applied.unfinished else None
        self.totals.add(applied)
        if lane.state.phase is FeedPhase.LIVE:
            self.lives.note(events, self._clock())
        else:
            self.lives.forget()
        if applied.removed or applied.ignored:
            unknown = applied.ignored.get("unknown_removal", 0)
            self._add(lane, lane.state.on_applied(sum(applied.removed.values()), unknown, self._clock()), first=True)
