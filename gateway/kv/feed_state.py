"""State of one rank's event feed: sequence numbers in, actions out. No sockets, no clock; time is an argument.

    starting --connected--> replaying --end of replay, nothing missing--> live
                  |            |   ^                                        |
                  |            |   `--- number missing, replay there -------+
                  |            `------- replay of no use ----> lost <-------' number missing, no replay
                  `-- no replay ----> live (first number 0) or lost

Rules:
1. `Apply` actions leave in sequence order, each number at most once between two purges.
2. `live`: every batch since the engine's start, or since its last restart, was applied. `lost`: history is missing and
   cannot be had. The index was purged when it went missing, so it is a true part of the engine's cache, not all of it.
3. A number above the expected one is a gap: replay from the expected one while live batches wait in a bounded buffer;
   where no replay can help, purge and go on.
4. A live number that does not grow means a new process: the sequence of one process only grows, and what a replay
   already delivered is told apart by the batch's own time. A restart purges.
5. A replay that begins above the number asked for means that the engine no longer has the rest: purge, go on there.
6. A replay may stop early without an end marker (vLLM before 0.33 drops the tail of long ones), so silence is a timeout
   and the next missing number is asked for again. Only tries that bring nothing count against the limit, and after the
   last one replays rest for a while, so that a broken endpoint is not asked all the time.

The caller executes actions in the order given, hands every reply to the *latest* request back (a new request means a
new connection), and calls `on_tick` when `deadline` has passed.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from gateway.kv.events import batch_time
from gateway.records import TrustState


class FeedPhase(StrEnum):
    """Where a feed stands; see the module's drawing."""

    STARTING = "starting"
    REPLAYING = "replaying"
    LIVE = "live"
    LOST = "lost"


class Apply(NamedTuple):
    """Decode this payload and apply its events."""

    seq: int
    payload: bytes


class AskReplay(NamedTuple):
    """Ask the engine for every batch from this number on, over a new connection; replies to earlier requests are
    worthless from now on."""

    from_seq: int


class Purge(NamedTuple):
    """Forget everything this rank announced. `reason`: `restart`, `gap`, `history_gone`, `undecodable`, `resync`."""

    reason: str


Action = Apply | AskReplay | Purge


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Bounds of one feed. `reply_timeout_s` is the longest silence in a replay; it doubles with each try in vain.
    `replay_rest_s` is how long no replay is asked for after `replay_tries` in vain."""

    reply_timeout_s: float = 1.0
    replay_tries: int = 3
    replay_rest_s: float = 60.0
    buffered_batches: int = 20_000
    buffered_bytes: int = 64 * 1024 * 1024


@dataclass(slots=True)
class FeedCounters:
    """What happened on a feed since it was made. `replays` is by result: `complete`, `history_gone`, `timed_out`
    (given up), `unavailable` (a gap, and no endpoint or it rests). `buffer_overflows` are live batches that did not fit
    while a replay ran; they come back as a gap. `last_event_unix` is the engine's own time of the newest batch."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    resets: int = 0
    errors: int = 0
    buffer_overflows: int = 0
    replays: Counter[str] = field(default_factory=Counter)
    purges: Counter[str] = field(default_factory=Counter)
    last_event_unix: float | None = None
    last_applied_at: float | None = None


class FeedState:
    """The state machine of one (worker, rank). Every `on_...` method returns actions to execute in order."""

    __slots__ = (
        "_brought",
        "_buffer",
        "_buffer_bytes",
        "_can_replay",
        "_expected",
        "_heard",
        "_last_live",
        "_limits",
        "_newest_ts",
        "_rest_until",
        "_tries",
        "_truncated",
        "_whole",
        "counters",
        "deadline",
        "phase",
    )

    def __init__(self, *, can_replay: bool, limits: FeedLimits | None = None) -> None:
        self.phase = FeedPhase.STARTING
        self.counters = FeedCounters()
        self.deadline: float | None = None
        """When `on_tick` has something to do; None: never."""
        self._limits = limits or FeedLimits()
        self._can_replay = can_replay
        self._rest_until = 0.0
        self._tries = 0
        self._brought = False  # the replay asked for last brought something new
        self._truncated = False  # the replay asked for last began above the number asked for
        self._buffer: deque[Apply] = deque()
        self._buffer_bytes = 0
        self._expected = 0
        self._last_live: int | None = None
        self._newest_ts: float | None = None
        self._whole = True
        self._heard = False  # the engine has said something: a batch, or the end of a replay

    @property
    def caught_up(self) -> bool:
        """Whether all that can be known of this rank was handed out: nothing is being replayed or waited for."""
        return self.phase in (FeedPhase.LIVE, FeedPhase.LOST)

    @property
    def trust(self) -> TrustState:
        """How far what was handed out may be believed: `blind` while nothing was ever heard from the engine,
        `catching_up` while something is being replayed, `uncertain` when history is missing."""
        if not self.caught_up:
            return TrustState.CATCHING_UP
        if not self._heard:
            return TrustState.BLIND
        return TrustState.TRUSTED if self.phase is FeedPhase.LIVE else TrustState.UNCERTAIN

    @property
    def expected(self) -> int:
        """The next sequence number to apply; 0 while nothing was applied."""
        return self._expected

    # ------------------------------------------------------------------ inputs

    def on_connected(self, now: float) -> list[Action]:
        """The subscription is set up: fetch what was published before it. Called again, it means `resync`."""
        if self.phase is not FeedPhase.STARTING:
            return self.resync(now)
        return self._begin(now)

    def resync(self, now: float) -> list[Action]:
        """Forget the rank and learn it anew, as far as the engine still knows its history."""
        self._start_over()
        self._whole = self._can_replay
        return [self._purge("resync"), *self._begin(now)]

    def on_live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch from the subscription."""
        self._heard = True
        last, self._last_live = self._last_live, seq
        if last is not None and seq <= last:
            return self._restarted(seq, payload, now)
        if seq < self._expected:
            if self._is_newer(payload):
                return self._restarted(seq, payload, now)
            self.counters.duplicates += 1  # a replay was faster
            return []
        if self.phase is FeedPhase.REPLAYING:
            self._keep(seq, payload)
            return []
        if seq == self._expected:
            return [self._apply(seq, payload, now)]
        self._keep(seq, payload)
        return self._drain(now)

    def on_replay(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch of the replay asked for last."""
        if self.phase is not FeedPhase.REPLAYING:
            return []
        self._heard = True
        if seq < self._expected:
            self.counters.duplicates += 1
            return []
        actions: list[Action] = []
        if seq > self._expected:
            if self._brought:
                # A hole inside the replay: replies were dropped on the way, or the engine lost a batch for good. The
                # next request tells which: it brings the number, or begins above it.
                return [self._ask(now)]
            self._truncated = True
            self.counters.replays["history_gone"] += 1
            actions += self._lose("history_gone", seq)
        self._brought = True
        self._tries = 0
        self.deadline = now + self._limits.reply_timeout_s
        actions.append(self._apply(seq, payload, now))
        return actions

    def on_replay_end(self, now: float) -> list[Action]:
        """The end marker of the replay asked for last."""
        if self.phase is not FeedPhase.REPLAYING:
            return []
        self._heard = True
        if not self._truncated:
            self.counters.replays["complete"] += 1
        if not self._brought:
            self._tries += 1  # were it in vain for ever, a gap would be asked for again and again
        return self._drain(now)

    def on_tick(self, now: float) -> list[Action]:
        """Time passed; does something only once `deadline` is reached."""
        if self.deadline is None or now < self.deadline:
            return []
        if not self._brought:
            self._tries += 1
        if self._tries < self._limits.replay_tries:
            return [self._ask(now)]
        self.counters.replays["timed_out"] += 1
        self._rest_until = now + self._limits.replay_rest_s
        if self._expected == 0:
            self._whole = False
        return self._drain(now, given_up=True)

    def on_undecodable(self) -> list[Action]:
        """The payload of the latest `Apply` was no batch of events. What it said is lost, removals perhaps."""
        self.counters.errors += 1
        actions = self._lose("undecodable", self._expected)
        if self.phase is FeedPhase.LIVE:
            self.phase = FeedPhase.LOST
        return actions

    # ------------------------------------------------------------------ steps

    def _begin(self, now: float) -> list[Action]:
        if self._can_replay:
            self._tries = 0
            return [self._ask(now)]
        self.phase = FeedPhase.LIVE if self._whole else FeedPhase.LOST
        return []

    def _ask(self, now: float) -> Action:
        self.phase = FeedPhase.REPLAYING
        self._brought = False
        self._truncated = False
        self.deadline = now + self._limits.reply_timeout_s * 2**self._tries
        return AskReplay(self._expected)

    def _apply(self, seq: int, payload: bytes, now: float) -> Action:
        self._expected = seq + 1
        self.counters.batches += 1
        self.counters.last_applied_at = now
        ts = batch_time(payload)
        if ts is not None:
            self._newest_ts = self.counters.last_event_unix = ts
        return Apply(seq, payload)

    def _drain(self, now: float, *, given_up: bool = False) -> list[Action]:
        """No replay runs (any more): apply what waits, and decide about the number missing before it."""
        actions: list[Action] = []
        while self._buffer:
            seq, payload = self._buffer[0]
            if seq > self._expected:
                if self._expected:
                    self.counters.gaps += 1
                if self._can_replay and now >= self._rest_until and self._tries < self._limits.replay_tries:
                    actions.append(self._ask(now))
                    return actions
                if self._expected and not given_up:
                    self.counters.replays["unavailable"] += 1
                given_up = False  # the next gap is another one
                actions += self._lose("gap", seq)
            self._buffer.popleft()
            self._buffer_bytes -= len(payload)
            if seq == self._expected:
                actions.append(self._apply(seq, payload, now))
        self._tries = 0
        self.deadline = None
        self.phase = FeedPhase.LIVE if self._whole else FeedPhase.LOST
        return actions

    def _lose(self, reason: str, go_on_from: int) -> list[Action]:
        """History up to `go_on_from` is gone: what was applied may be wrong by now, so it goes, if there is any."""
        purge = [self._purge(reason)] if self._expected else []
        self._whole = False
        self._expected = go_on_from
        return purge

    def _restarted(self, seq: int, payload: bytes, now: float) -> list[Action]:
        self.counters.resets += 1
        self._start_over()
        self._last_live = seq
        self._keep(seq, payload)
        purge: list[Action] = [self._purge("restart")]
        return purge + (self._begin(now) if seq and self._can_replay else self._drain(now))

    def _start_over(self) -> None:
        self._expected = 0
        self._whole = True
        self._last_live = None
        self._newest_ts = None
        self._buffer.clear()
        self._buffer_bytes = 0
        self.deadline = None

    def _purge(self, reason: str) -> Action:
        self.counters.purges[reason] += 1
        return Purge(reason)

    def _keep(self, seq: int, payload: bytes) -> None:
        limits = self._limits
        fits = not self._buffer or self._buffer_bytes + len(payload) <= limits.buffered_bytes
        if not fits or len(self._buffer) >= limits.buffered_batches:
            self.counters.buffer_overflows += 1
            return
        self._buffer.append(Apply(seq, payload))
        self._buffer_bytes += len(payload)

    def _is_newer(self, payload: bytes) -> bool:
        ts = batch_time(payload)
        return self._newest_ts is not None and ts is not None and ts > self._newest_ts
