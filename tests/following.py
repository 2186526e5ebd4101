"""A rank's feed without sockets: `FeedState` and `KvIndex` joined as the feed joins them, on a clock of the test."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from gateway.kv.events import Cleared, ForeignMessage, MalformedMessage, decode_batch
from gateway.kv.feed_state import FeedState
from gateway.kv.feed_words import Action, Apply, AskReplay, EndPreview, FeedLimits, FeedPhase, Preview, Purge
from gateway.kv.index import KvIndex
from gateway.kv.numbers import Applied
from gateway.records import Slot


class Follower:
    """Executes actions in the order given. `asked` is the number the latest open replay request starts at, None when
    none is open; `asks` are all there were; `applied` is what the latest batch changed."""

    def __init__(
        self, index: KvIndex, slot: Slot, rank: int = 0, *, can_replay: bool, limits: FeedLimits | None = None
    ) -> None:
        self.index = index
        self.slot = slot
        self.rank = rank
        self.state = FeedState(can_replay=can_replay, limits=limits)
        self.asked: int | None = None
        self.asks: list[int] = []
        self.applied: Applied | None = None

    def connect(self, now: float) -> None:
        """The subscription is set up."""
        self._execute(self.state.on_connected(now), now)

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """A batch of the subscription."""
        self._execute(self.state.on_live(seq, payload, now), now)

    def answer(self, replies: Iterable[tuple[int, bytes]], now: float, *, end: bool = True) -> list[int]:
        """Replies to the open request; without `end` the end marker got lost. What comes after a newer request, or
        after the replay was over, is dropped with its connection. Returns the numbers that were taken."""
        asked = len(self.asks)
        taken: list[int] = []
        for seq, payload in replies:
            if self.asked is None or len(self.asks) != asked:
                return taken
            taken.append(seq)
            self._execute(self.state.on_replay(seq, payload, now), now)
        if end and self.asked is not None and len(self.asks) == asked:
            self._execute(self.state.on_replay_end(now), now)
        return taken

    def tick(self, now: float) -> None:
        """Time passed."""
        self._execute(self.state.on_tick(now), now)

    def resync(self, now: float) -> None:
        """Learn the rank anew."""
        self._execute(self.state.resync(now), now)

    def _execute(self, actions: list[Action], now: float) -> None:
        waiting = list(actions)
        while waiting:
            match waiting.pop(0):
                case EndPreview():
                    self.index.end_preview(self.slot, self.rank)
                case Preview(seq=seq, payload=payload):
                    self._preview(seq, payload, waiting, now)
                case Apply(seq=seq, payload=payload):
                    try:
                        batch = decode_batch(payload)
                    except MalformedMessage:
                        waiting = [*self.state.on_undecodable(), *waiting]
                        continue
                    if not isinstance(batch, ForeignMessage):
                        if any(isinstance(event, Cleared) for event in batch.events):
                            waiting[:0] = self.state.on_cleared(seq, now)
                        self.applied = self.index.apply(self.slot, self.rank, batch.events)
                case Purge():
                    self.index.purge(self.slot, self.rank)
                case AskReplay(from_seq=from_seq):
                    self.asked = from_seq
                    self.asks.append(from_seq)
        if not self.state.asking:
            self.asked = None

    def _preview(self, seq: int, payload: bytes, waiting: list[Action], now: float) -> None:
        try:
            batch = decode_batch(payload)
        except MalformedMessage:
            return
        if isinstance(batch, ForeignMessage):
            return
        cleared = any(isinstance(event, Cleared) for event in batch.events)
        actions = self.state.on_cleared(seq, now) if cleared else []
        if actions:
            waiting[:0] = actions
        else:
            self.index.preview(self.slot, self.rank, batch.events)


def payload(ts: float) -> bytes:
    return msgspec.msgpack.encode([ts, [], 0])


def live(feed: FeedState, *numbers: int, now: float = 0.0) -> list[Action]:
    """Live batches whose own time grows with their number."""
    return [action for seq in numbers for action in feed.on_live(seq, payload(100.0 + seq), now)]


def replay(feed: FeedState, *numbers: int, now: float = 0.0) -> list[Action]:
    return [action for seq in numbers for action in feed.on_replay(seq, payload(100.0 + seq), now)]


def short(actions: list[Action]) -> list[object]:
    """Applied numbers as they are, questions as `ask N`, purges by their reason."""
    words: list[object] = []
    for action in actions:
        match action:
            case Apply():
                words.append(action.seq)
            case AskReplay():
                words.append(f"ask {action.from_seq}")
            case Purge():
                words.append(action.reason)
            case Preview():
                words.append(f"show {action.seq}")
            case EndPreview():
                words.append("end")
    return words


def started(*, can_replay: bool = True, limits: FeedLimits | None = None) -> FeedState:
    """A feed that is live, with batches 0 to 2 applied."""
    feed = FeedState(can_replay=can_replay, limits=limits)
    feed.on_connected(0.0)
    if can_replay:
        replay(feed, 0, 1, 2)
        feed.on_replay_end(0.0)
    else:
        live(feed, 0, 1, 2)
    assert feed.phase is FeedPhase.LIVE
    return feed
