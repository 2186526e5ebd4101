"""One rank's KV event feed over ZMQ: sockets around `kv.feed_state` and the index.

Rules:
1. All decisions about sequence numbers are the state machine's; this file moves bytes and executes actions in order.
2. Work is done in turns of at most `turn_s`, or `turn_blocks` blocks where a batch is longer; then the loop serves
   others. All feeds of a process share one lock, so that together they take one turn per pass of the loop.
3. Each replay request has a connection of its own: replies to an earlier request cannot be mistaken for replies to it.
4. A broken message is counted and never ends the feed. What does end `run` (a malformed endpoint, a closed context) is
   raised to the supervisor. Cancelling `run` at any point closes the sockets without lingering.

Sockets are read directly, woken by their file descriptor: zmq.asyncio makes a future and a poll per message, which
costs several times what decoding it does. The subscription is made before the first replay request, so that batches
published in between arrive live and wait their turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import zmq

from gateway.kv.events import (
    ForeignMessage,
    KvEvent,
    MalformedMessage,
    Removed,
    Stored,
    decode_batch,
    parse_live,
    parse_reply,
    replay_request,
)
from gateway.kv.feed_state import Action, Apply, AskReplay, FeedCounters, FeedPhase, FeedState, Purge
from gateway.kv.index import Applied, KvIndex
from gateway.records import EventSource, Slot, Tier, TrustState, WorkerId

# Messages zmq holds for us while the loop is busy; beyond it TCP pushes back, and the engine keeps, then drops, them.
_RECEIVE_LIMIT: Final = 20_000

_MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2_000

# A half-open connection is noticed, and made anew, after this long.
_HEARTBEAT_MS: Final = 10_000
_HEARTBEAT_TIMEOUT_MS: Final = 30_000


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


class KvFeed:
    """Subscribes to one rank of one worker and keeps the index in step. Make a new one when its address changes.

    `clock` gives monotonic seconds. `turns` is the lock all feeds of the process share (rule 2).
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
        state: FeedState | None = None,
        limits: TurnLimits | None = None,
    ) -> None:
        self.worker = worker
        self.slot = slot
        self.source = source
        self.totals = FeedTotals()
        self._state = state or FeedState(can_replay=source.replay_endpoint is not None)
        self._index = index
        self._context = context
        self._clock = clock
        self._turns = turns
        self._limits = limits or TurnLimits()
        self._replay: zmq.Socket[bytes] | None = None
        self._actions: deque[Action] = deque()
        self._events: deque[KvEvent] = deque()
        self._resync_wanted = False
        self._wake = asyncio.Event()

    @property
    def caught_up(self) -> bool:
        """Whether the index shows what this rank published: replay done, nothing received waits to be applied."""
        return self._state.caught_up and not self._actions and not self._events

    @property
    def phase(self) -> FeedPhase:
        """The state machine's phase."""
        return self._state.phase

    @property
    def trust(self) -> TrustState:
        """How far the index shows what this rank holds."""
        return self._state.trust

    @property
    def counters(self) -> FeedCounters:
        """The state machine's counters: batches, gaps, replays, resets, errors."""
        return self._state.counters

    def resync(self) -> None:
        """Forget the rank and learn it anew, at the feed's next turn."""
        self._resync_wanted = True
        self._wake.set()

    async def run(self) -> None:
        """Follow the feed until cancelled. Raises zmq.ZMQError when an endpoint is malformed or the context closed.

        May be called again after it ended: the rank is then learned anew.
        """
        try:
            with self._socket(zmq.SUB) as subscription:
                subscription.setsockopt(zmq.SUBSCRIBE, self.source.topic.encode())
                subscription.connect(self.source.endpoint)
                self._actions.extend(self._state.on_connected(self._clock()))
                while True:
                    async with self._turns:
                        idle = self._turn(subscription)
                    if idle:
                        await self._wait(subscription)
                    else:
                        await asyncio.sleep(0)
        finally:
            self._actions.clear()
            self._events.clear()
            self._close_replay()

    # ------------------------------------------------------------------ work

    def _turn(self, subscription: zmq.Socket[bytes]) -> bool:
        """Work until there is nothing to do (True) or the turn is over (False)."""
        until = self._clock() + self._limits.turn_s
        while self._step(subscription):
            if self._clock() >= until:
                return False
        return True

    def _step(self, subscription: zmq.Socket[bytes]) -> bool:
        """The next small piece of work; False when there is none. What was received is applied before more is taken,
        so nothing piles up here; replies come before live messages, which wait in the socket."""
        if self._events:
            self._apply_some()
            return True
        if self._actions:
            self._execute(self._actions.popleft())
            return True
        if self._resync_wanted:
            self._resync_wanted = False
            self._actions.extend(self._state.resync(self._clock()))
            return True
        if self._replay is not None:
            if self._state.phase is not FeedPhase.REPLAYING:
                self._close_replay()
            elif (reply := _receive(self._replay)) is not None:
                self._on_reply(reply)
                return True
        self._actions.extend(self._state.on_tick(self._clock()))
        if self._actions:
            return True
        frames = _receive(subscription)
        if frames is None:
            return False
        self._on_live(frames)
        return True

    def _on_live(self, frames: list[bytes]) -> None:
        try:
            message = parse_live(frames)
        except MalformedMessage:
            self.counters.errors += 1
            return
        self._actions.extend(self._state.on_live(message.seq, message.payload, self._clock()))

    def _on_reply(self, frames: list[bytes]) -> None:
        try:
            message = parse_reply(frames)
        except MalformedMessage:
            self.counters.errors += 1
            return
        if message is None:
            self._actions.extend(self._state.on_replay_end(self._clock()))
        else:
            self._actions.extend(self._state.on_replay(message.seq, message.payload, self._clock()))

    def _execute(self, action: Action) -> None:
        match action:
            case Apply():
                self._decode(action.payload)
            case Purge():
                self._index.purge(self.slot, self.source.rank)
            case AskReplay():
                self._ask(action.from_seq)

    def _decode(self, payload: bytes) -> None:
        try:
            batch = decode_batch(payload)
        except MalformedMessage:
            # Ahead of what else is to be done: later batches must not be purged with it.
            self._actions.extendleft(reversed(self._state.on_undecodable()))
            return
        if isinstance(batch, ForeignMessage):
            self.totals.skipped["foreign"] += 1
            return
        if batch.skipped:
            self.totals.skipped.update(batch.skipped)
        self._events.extend(batch.events)

    def _apply_some(self) -> None:
        """Apply events up to the limit of blocks; one event is never split."""
        events: list[KvEvent] = []
        blocks = 0
        waiting = self._events
        kinds = self.totals.events
        while waiting and blocks < self._limits.turn_blocks:
            event = waiting.popleft()
            events.append(event)
            match event:
                case Stored():
                    kinds["stored"] += 1
                    blocks += len(event.hashes)
                case Removed():
                    kinds["removed"] += 1
                    blocks += len(event.hashes)
                case _:
                    kinds["cleared"] += 1
        self.totals.add(self._index.apply(self.slot, self.source.rank, events))

    # ------------------------------------------------------------------ sockets

    async def _wait(self, subscription: zmq.Socket[bytes]) -> None:
        """Until a socket has something, the state's deadline is reached, or `resync` is called."""
        loop = asyncio.get_running_loop()
        sockets = [subscription] if self._replay is None else [subscription, self._replay]
        descriptors = [int(socket.getsockopt(zmq.FD)) for socket in sockets]
        deadline = self._state.deadline
        wait_s = None if deadline is None else max(0.0, deadline - self._clock())
        self._wake.clear()
        for descriptor in descriptors:
            loop.add_reader(descriptor, self._wake.set)
        try:
            # The descriptor tells of changes only: what came before it was watched must be asked for.
            if self._resync_wanted or any(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN for socket in sockets):
                return
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)

    @contextmanager
    def _socket(self, kind: int) -> Iterator[zmq.Socket[bytes]]:
        socket = zmq.Socket(self._context, kind)
        try:
            _configure(socket)
            yield socket
        finally:
            socket.close(linger=0)

    def _ask(self, from_seq: int) -> None:
        self._close_replay()
        endpoint = self.source.replay_endpoint
        if endpoint is None:
            return
        self._replay = zmq.Socket(self._context, zmq.DEALER)
        _configure(self._replay)
        self._replay.connect(endpoint)
        self._replay.send_multipart(replay_request(from_seq), zmq.NOBLOCK)

    def _close_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None


def _configure(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, 1)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
