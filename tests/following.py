"""A rank's feed without sockets: `FeedState` and `KvIndex` joined as the feed joins them, on a clock of the test."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.kv.events import ForeignMessage, MalformedMessage, decode_batch
from gateway.kv.feed_state import Action, Apply, AskReplay, FeedLimits, FeedState, Purge
from gateway.kv.index import Applied, KvIndex
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
        self._execute(self.state.on_connected(now))

    def live(self, seq: int, payload: bytes, now: float) -> None:
        """A batch of the subscription."""
        self._execute(self.state.on_live(seq, payload, now))

    def answer(self, replies: Iterable[tuple[int, bytes]], now: float, *, end: bool = True) -> None:
        """Replies to the open request; without `end` the end marker got lost. What comes after a newer request, or
        after the replay was given up, is dropped with its connection."""
        asked = len(self.asks)
        for seq, payload in replies:
            if self.asked is None or len(self.asks) != asked:
                return
            self._execute(self.state.on_replay(seq, payload, now))
        if end and self.asked is not None and len(self.asks) == asked:
            self._execute(self.state.on_replay_end(now))

    def tick(self, now: float) -> None:
        """Time passed."""
        self._execute(self.state.on_tick(now))

    def resync(self, now: float) -> None:
        """Learn the rank anew."""
        self._execute(self.state.resync(now))

    def _execute(self, actions: list[Action]) -> None:
        waiting = list(actions)
        while waiting:
            match waiting.pop(0):
                case Apply(payload=payload):
                    try:
                        batch = decode_batch(payload)
                    except MalformedMessage:
                        waiting = [*self.state.on_undecodable(), *waiting]
                        continue
                    if not isinstance(batch, ForeignMessage):
                        self.applied = self.index.apply(self.slot, self.rank, batch.events)
                case Purge():
                    self.index.purge(self.slot, self.rank)
                case AskReplay(from_seq=from_seq):
                    self.asked = from_seq
                    self.asks.append(from_seq)
        if self.state.caught_up:
            self.asked = None
