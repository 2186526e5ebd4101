"""State of one rank's event feed: sequence numbers in, actions out. No sockets, no clock; time is an argument.

    starting --connected--> replaying --all of it came--> live <------- what was missing came -------.
        |                    |     ^                       |                                         |
        |                    |     '-- restart, resync ----+---------- number missing -------> repairing
        | nobody there       |                             |                                         |
        v                    v                             v                                         |
       lost <------- no replay, or of no use ------ number missing, no replay <---- replay of no use-'

Rules:
1. `Apply` actions leave in sequence order, each number at most once between two purges.
2. `live`: every batch since the engine's start, its last restart or its last clear was applied. `lost`: history is
   missing and cannot be had; what was applied was purged when it went missing, so what is held is a true part of the
   engine's cache, not all of it. A clear ends `lost`, and so does a whole replay found later.
3. A number above the expected one is a gap: replay from the expected one. While a replay runs, live batches wait in a
   bounded buffer, and are previewed at once: a repair holds nothing up, and its result is that of the right order
   whatever the missing batches say. Where no replay can help, purge and go on.
4. A clear makes everything before it void, so one in a batch that waits ends the replay.
5. The sequence of one process only grows. A live number that does not, or one the replay was faster with but of a newer
   time, is a new process: purge, learn anew.
6. A new process may have passed the number we expect while we were cut off. So after each reconnection the replay is
   asked for the last batch applied, and must show the very same bytes; without replay only the exact next number is
   taken for the same process. A process that started after the first batch applied, and removals of unknown blocks in
   a feed that was whole (`on_applied`), say the same.
7. A replay that begins above the number asked for means that the engine no longer has the rest: purge, go on there.
8. A replay may stop early without an end marker (vLLM before 0.33 drops the tail of long ones), so silence is a timeout
   and the next missing number is asked for again. A try that brought something is continued at once; others get slower,
   are at most `tries_a_minute`, and after `replay_tries` in vain the replay rests. Afterwards a lost feed is tried now
   and then, without giving up what it has.
9. A worker that serves while its feed is silent is doubted until the feed is heard again.

The caller executes actions in the order given, hands every reply to the *latest* request back (a new request means a
new connection), and calls `on_tick` when `deadline` has passed.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from gateway.kv.events import batch_time, first_number
from gateway.kv.feed_words import (
    Action,
    Apply,
    AskReplay,
    EndPreview,
    FeedCounters,
    FeedLimits,
    FeedPhase,
    Preview,
    Purge,
)
from gateway.records import TrustState

_WAITING = (FeedPhase.STARTING, FeedPhase.REPLAYING, FeedPhase.REPAIRING)


# Start times are told in ticks of the kernel, and rounded by some.
_CLOCK_S = 1.0


class _For(Enum):
    """What a replay is asked for: the beginning; what is missing; proof of the same process; whether there is more."""

    START = "start"
    REPAIR = "repair"
    CHECK = "check"
    PROBE = "probe"


class _Mark(NamedTuple):
    """One batch, recognised by its bytes."""

    seq: int
    digest: int


class FeedState:
    """The state machine of one (worker, rank). Every `on_...` method returns actions to execute in order."""

    __slots__ = (
        "_ask_at",
        "_asked",
        "_base",
        "_brought",
        "_buffer",
        "_buffer_bytes",
        "_can_replay",
        "_contradiction_after",
        "_doubt",
        "_gap_before",
        "_heard",
        "_last_live",
        "_limits",
        "_live_at",
        "_lives",
        "_mark",
        "_newest_ts",
        "_next",
        "_oldest_ts",
        "_previewing",
        "_proof",
        "_purpose",
        "_removals",
        "_reply_by",
        "_rest_s",
        "_rest_until",
        "_silent_by",
        "_tries",
        "_unknown_removals",
        "_whole",
        "counters",
        "phase",
    )

    def __init__(self, *, can_replay: bool, limits: FeedLimits | None = None) -> None:
        self.phase = FeedPhase.STARTING
        self.counters = FeedCounters()
        self._limits = limits or FeedLimits()
        self._can_replay = can_replay
        self._heard = False  # the engine has said something: a batch, or the end of a replay
        self._purpose: _For | None = None
        self._ask_at: float | None = None  # the replay is asked for then
        self._reply_by: float | None = None  # it was asked for, and should say something until then
        self._asked: deque[float] = deque(maxlen=self._limits.tries_a_minute)
        self._tries = 0  # in vain, one after the other
        self._rest_s = self._limits.replay_rest_s
        self._rest_until = 0.0
        self._live_at: float | None = None
        self._contradiction_after = 0.0
        self._buffer: deque[Apply] = deque()
        self._forget()

    def _forget(self) -> None:
        """As if nothing had ever been applied."""
        self._buffer.clear()
        self._buffer_bytes = 0
        self._previewing = False
        self._brought = False  # the replay asked for last brought something new
        self._next = 0
        self._base = 0  # batches before it count no more
        self._gap_before: int | None = None  # the batch that showed the gap counted last
        self._mark: _Mark | None = None  # the last batch applied
        self._proof: _Mark | None = None  # what the first reply must be
        self._last_live: int | None = None
        self._lives: deque[tuple[float, int]] = deque(maxlen=self._limits.remembered_batches)  # what came live when
        self._oldest_ts: float | None = None
        self._newest_ts: float | None = None
        self._whole = True
        self._silent_by: float | None = None
        self._doubt: str | None = None
        self._removals = self._unknown_removals = 0

    @property
    def caught_up(self) -> bool:
        """Whether all that can be known of this rank was handed out: nothing is being replayed or waited for."""
        return self.phase not in _WAITING

    @property
    def doubt(self) -> str | None:
        """Why a feed that looks whole is not believed: `silent`, `reconnected`; None when it is."""
        return self._doubt

    @property
    def trust(self) -> TrustState:
        """How far what was handed out may be believed: `blind` while nothing was ever heard from the engine,
        `catching_up` while something is being replayed, `uncertain` when history is missing or the feed is doubted."""
        if not self.caught_up:
            return TrustState.CATCHING_UP
        if not self._heard:
            return TrustState.BLIND
        if self.phase is FeedPhase.LIVE and self._doubt is None:
            return TrustState.TRUSTED
        return TrustState.UNCERTAIN

    @property
    def expected(self) -> int:
        """The next sequence number to apply; 0 while nothing was applied."""
        return self._next

    @property
    def asking(self) -> bool:
        """Whether replies to the latest request are of use."""
        return self._reply_by is not None

    @property
    def deadline(self) -> float | None:
        """When `on_tick` has something to do; None: never."""
        times = [time for time in (self._ask_at, self._reply_by, self._silent_by) if time is not None]
        return min(times) if times else None

    # ------------------------------------------------------------------ inputs

    def on_opened(self, now: float) -> list[Action]:
        """The subscription is being set up; without a connection in time the feed is `lost` until there is one. Called
        again, after the feed broke off: what was handed out last may not have been executed, so the rank goes."""
        actions: list[Action] = []
        if self.phase is not FeedPhase.STARTING:
            actions = self._purge("reopened")
            self._forget()
            self._settle()
            self._heard = False
        self.phase = FeedPhase.STARTING
        self._ask_at = now + self._limits.connect_timeout_s
        return actions

    def on_connected(self, now: float) -> list[Action]:
        """The subscription is connected: fetch what was published before it. Called again: it was connected anew."""
        if self.phase is FeedPhase.STARTING or not self._heard:
            self._tries = 0
            return self._begin(now)
        self.counters.reconnects += 1
        if self._mark is None or self.phase is FeedPhase.REPLAYING:
            return self._start_over("reconnect", now)
        self._doubt = "reconnected"
        return self._ask(_For.CHECK, now) if self._may_ask(now) else []

    def resync(self, now: float) -> list[Action]:
        """Forget the rank and learn it anew, as far as the engine still knows its history."""
        if self.phase is FeedPhase.STARTING:
            return []
        return self._start_over("resync", now, whole=self._can_replay)

    def relearn(self, since: float, now: float) -> list[Action]:
        """What came before `since` is not believed any more, though nothing was missing: drop all, and fetch again what
        came live after it. Without a replay it is only dropped; what is being repaired is left alone."""
        if self.phase in _WAITING:
            return []
        actions = self._purge("contradicted")
        self._contradiction_after = now + self._limits.contradiction_rest_s  # unknown removals are to be expected now
        first = next((seq for at, seq in self._lives if at >= since), self._next)
        if first < self._next and self._may_ask(now):
            self._next = self._base = first
            self._mark = None
            self.phase = FeedPhase.REPAIRING
            actions += self._ask(_For.REPAIR, now)
        return actions

    def on_process_started(self, at_unix: float, now: float) -> list[Action]:
        """The worker's process started at `at_unix`, by its own clock. Nothing to do when all we hold is newer."""
        if self._oldest_ts is None or self._oldest_ts >= at_unix - _CLOCK_S:
            return []
        self.counters.resets += 1
        return self._start_over("restart", now, whole=self._can_replay)

    def on_live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch from the subscription."""
        self._heard = True
        self._live_at = now
        self._silent_by = None
        if self._doubt == "silent":
            self._doubt = None
        actions: list[Action] = []
        last, self._last_live = self._last_live, seq
        if (last is not None and seq <= last) or (seq < self._next and self._is_newer(payload)):
            self.counters.resets += 1
            actions = self._purge("restart")
            self._forget()
            self._settle()
            self._last_live = seq
        elif seq < self._next:
            self.counters.duplicates += 1  # a replay was faster
            return []
        self._lives.append((now, seq))
        if self.phase not in _WAITING and self._follows(seq, payload):
            actions.append(self._apply(seq, payload, now))
            return actions
        fits = self._keep(seq, payload)
        if self.phase not in _WAITING:
            actions += self._drain(now)
        if fits and self._buffer:
            self._previewing = True
            actions.append(Preview(seq, payload))
        return actions

    def on_replay(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch of the replay asked for last."""
        if self._reply_by is None:
            return []
        self._heard = True
        self._reply_by = now + self._limits.reply_timeout_s
        actions: list[Action] = []
        if self._purpose is _For.PROBE:
            if seq >= self._base and self._mark is not None:
                self._settle()  # the engine has no more than we have
                return []
            actions += self._purge("relearn")
            self._forget()
            self.phase, self._purpose = FeedPhase.REPLAYING, _For.START
        elif (proof := self._proof) is not None:
            self._proof = None
            if seq == proof.seq and xxh3_64_intdigest(payload) != proof.digest:
                self.counters.resets += 1
                return self._start_over("restart", now)
            if seq > proof.seq:
                actions += self._begins_at(seq)
            elif self._doubt == "reconnected":
                self._doubt = None
        if seq < self._next:
            self.counters.duplicates += 1
            return actions
        if not self._follows(seq, payload):
            if self._brought:
                # A hole inside the replay: replies were dropped on the way, or the engine lost a batch for good. The
                # next request tells which: it brings the number, or begins above it.
                return actions + self._ask(self._purpose or _For.REPAIR, now, continued=True)
            if self._buffer and self._buffer[0].seq < seq:
                # What came live reaches further back than the engine's own history.
                if not self._follows(*self._buffer[0]):
                    actions += self._begins_at(self._buffer[0].seq)
                self._brought = True
                return actions + self._complete(now)
            actions += self._begins_at(seq)
        self._brought = True
        self._tries = 0
        if self._doubt == "silent":
            self._doubt = None
        actions.append(self._apply(seq, payload, now))
        if self._buffer and self._buffer[0].seq <= self._next:  # what follows has come live
            self._rest_phase()
            actions += self._drain(now)
        return actions

    def on_replay_end(self, now: float) -> list[Action]:
        """The end marker of the replay asked for last."""
        if self._reply_by is None:
            return []
        self._heard = True
        if self._proof is not None:  # not even the last batch we know: a younger process
            self.counters.resets += 1
            return self._start_over("restart", now)
        if self._purpose is _For.PROBE:
            return self._rest(now)
        if self._buffer and not self._brought:
            return self._in_vain(now, pause_s=self._limits.reply_timeout_s)
        return self._complete(now)

    def on_tick(self, now: float) -> list[Action]:
        """Time passed; does something only once `deadline` is reached."""
        actions: list[Action] = []
        if self._silent_by is not None and now >= self._silent_by:
            self._silent_by = None
            self._doubt = "silent"
            self.counters.silences += 1
            if self._mark is not None and self._may_ask(now) and self._purpose in (None, _For.PROBE):
                actions += self._ask(_For.CHECK, now)
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            if self.phase is FeedPhase.STARTING:
                self.phase = FeedPhase.LOST
                return actions + self._drain(now)
            actions += self._ask(self._purpose or _For.START, now)
        elif self._reply_by is not None and now >= self._reply_by:
            if self._purpose is _For.PROBE:
                actions += self._rest(now)
            elif self._brought and self.caught_up and self._purpose is not _For.CHECK:
                actions += self._complete(now)  # only the end marker got lost
            elif self._brought:
                actions += self._ask(self._purpose or _For.START, now, continued=True)
            else:
                actions += self._in_vain(now)
        return actions

    def on_served(self, blocks: int, started_at: float, now: float) -> bool:
        """A request that began at `started_at` ended, and the worker computed so many blocks anew for it: it must have
        announced something since, or will at once. True when that made a new `deadline`."""
        heard_since = self._live_at is not None and self._live_at >= started_at
        if blocks < 1 or heard_since or self._silent_by is not None or self._doubt == "silent" or not self.caught_up:
            return False
        self._silent_by = now + self._limits.silent_s
        return True

    def on_cleared(self, seq: int, now: float) -> list[Action]:
        """The batch being applied or previewed contains a clear."""
        if seq < self._base:
            return []
        self._base = seq
        self._removals = self._unknown_removals = 0
        if seq < self._next:  # it is applied in its turn
            self._whole = True
            if self.phase is FeedPhase.LOST:
                self._settle()
            return []
        while self._buffer and self._buffer[0].seq < seq:
            self._buffer_bytes -= len(self._buffer.popleft().payload)
        if not self._buffer or self._buffer[0].seq != seq:
            return []
        self._next = seq
        self._whole = True
        self._doubt = None
        self._settle()
        return self._drain(now)

    def on_applied(self, removed: int, unknown: int, now: float) -> list[Action]:
        """What applying brought: blocks removed, and removals of blocks the index did not hold. In a whole feed the
        latter are rare; where they are the rule, what we hold belongs to another process."""
        if self.phase is not FeedPhase.LIVE:
            self._removals = self._unknown_removals = 0
            return []
        self._removals += removed + unknown
        self._unknown_removals += unknown
        if self._removals < self._limits.judged_removals:
            return []
        contradicts = 2 * self._unknown_removals > self._removals
        self._removals = self._unknown_removals = 0
        if not contradicts or now < self._contradiction_after:
            return []
        self._contradiction_after = now + self._limits.contradiction_rest_s
        return self._start_over("contradiction", now, whole=self._can_replay)

    def on_undecodable(self) -> list[Action]:
        """The payload of the latest `Apply` was no batch of events. What it said is lost, removals perhaps."""
        self.counters.errors += 1
        actions = self._lose("undecodable", self._next)
        if self.phase is FeedPhase.LIVE:
            self.phase = FeedPhase.LOST
        return actions

    # ------------------------------------------------------------------ asking

    def _may_ask(self, now: float) -> bool:
        return self._can_replay and now >= self._rest_until

    def _ask(self, purpose: _For, now: float, *, continued: bool = False) -> list[Action]:
        """Ask, or note when that will be allowed. What follows a try that brought something is no new try."""
        self._purpose = purpose
        self._reply_by = self._ask_at = self._proof = None
        if not continued:
            if len(self._asked) == self._asked.maxlen and now < self._asked[0] + 60.0:
                self._ask_at = self._asked[0] + 60.0
                return []
            self._asked.append(now)
        self._brought = False
        self._reply_by = now + self._limits.reply_timeout_s * 2**self._tries
        if purpose is _For.PROBE:
            return [AskReplay(0)]
        if purpose is _For.CHECK:
            self._proof = self._mark
        return [AskReplay(self._next if self._proof is None else self._proof.seq)]

    def _in_vain(self, now: float, *, pause_s: float = 0.0) -> list[Action]:
        """A try brought nothing: try again, slower, or give up."""
        self._tries += 1
        if self._tries < self._limits.replay_tries:
            if not pause_s:
                return self._ask(self._purpose or _For.START, now)
            self._reply_by, self._ask_at = None, now + pause_s * 2 ** (self._tries - 1)
            return []
        self._tries = 0
        self.counters.replays["timed_out"] += 1
        self._rest_until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, self._limits.longest_rest_s)
        if not self._next:
            self._whole = False
        self._settle()
        actions = self._drain(now)
        if self.phase is FeedPhase.LOST:
            self._purpose, self._ask_at = _For.PROBE, self._rest_until
        return actions

    def _rest(self, now: float) -> list[Action]:
        """A probe found nothing: the next one later."""
        self._rest_s = min(2 * self._rest_s, self._limits.longest_rest_s)
        self._reply_by, self._ask_at = None, now + self._rest_s
        return []

    def _complete(self, now: float) -> list[Action]:
        """The replay brought what there was."""
        if self._whole:
            self.counters.replays["complete"] += 1
        self._tries = 0
        self._rest_s = self._limits.replay_rest_s
        self._settle()
        return self._drain(now)

    # ------------------------------------------------------------------ steps

    def _settle(self) -> None:
        """No replay runs or is planned; the phase says what is held."""
        self._purpose = self._reply_by = self._ask_at = self._proof = None
        self._rest_phase()

    def _rest_phase(self) -> None:
        self.phase = FeedPhase.LIVE if self._whole else FeedPhase.LOST

    def _begin(self, now: float) -> list[Action]:
        if not self._can_replay:
            self._settle()
            return self._drain(now)
        self.phase = FeedPhase.REPLAYING
        return self._ask(_For.START, now)

    def _start_over(self, reason: str, now: float, *, whole: bool = True) -> list[Action]:
        actions = self._purge(reason)
        self._forget()
        self._whole = whole
        self._tries = 0
        return actions + self._begin(now)

    def _follows(self, seq: int, payload: bytes) -> bool:
        """Whether nothing is missing before this batch."""
        return seq == self._next or (not self._next and seq == first_number(payload))

    def _drain(self, now: float) -> list[Action]:
        """Apply what waits, as far as nothing is missing before it or nothing can be done about it."""
        actions: list[Action] = []
        while self._buffer:
            seq, payload = self._buffer[0]
            if seq > self._next and not self._follows(seq, payload):
                actions += self._missing(seq, now)
                if self.phase in _WAITING:
                    return actions
            self._buffer.popleft()
            self._buffer_bytes -= len(payload)
            if seq >= self._next:
                actions.append(self._apply(seq, payload, now))
        if self._previewing:
            self._previewing = False
            actions.append(EndPreview())
        return actions

    def _missing(self, seq: int, now: float) -> list[Action]:
        """Batches before this one, which has come live, are missing."""
        at_start = not self._next
        new = not at_start and seq != self._gap_before
        self._gap_before = seq
        self.counters.gaps += new
        if self._may_ask(now) and (self._whole or not at_start):
            self.phase = FeedPhase.REPLAYING if at_start else FeedPhase.REPAIRING
            if self._purpose in (None, _For.PROBE):
                return self._ask(_For.START if at_start else _For.REPAIR, now)
            return []  # the replay that runs may bring them
        if new:  # else it was asked for in vain
            self.counters.replays["unavailable"] += 1
        actions = self._lose("gap", seq)
        self.phase = FeedPhase.LOST
        return actions

    def _apply(self, seq: int, payload: bytes, now: float) -> Action:
        if self._doubt == "reconnected" and self._proof is None and seq == self._next:
            self._doubt = None
        if not self._next and not self._whole and self._follows(seq, payload):
            self._whole = True  # the first batch of a process, whatever was lost of another one
            if self.phase is FeedPhase.LOST:
                self.phase = FeedPhase.LIVE
        self._next = seq + 1
        if self._purpose is not _For.CHECK:  # a check that is tried again must not ask for what came after the doubt
            self._mark = _Mark(seq, xxh3_64_intdigest(payload))
        self.counters.batches += 1
        self.counters.last_applied_at = now
        ts = batch_time(payload)
        if ts is not None:
            self._newest_ts = self.counters.last_event_unix = ts
            if self._oldest_ts is None:
                self._oldest_ts = ts
        return Apply(seq, payload)

    def _begins_at(self, seq: int) -> list[Action]:
        """The replay begins too late: what it brings is all there is to be had."""
        self.counters.replays["history_gone"] += 1
        actions = self._lose("history_gone", seq)
        self.phase, self._purpose = FeedPhase.REPLAYING, _For.START
        return actions

    def _lose(self, reason: str, go_on_from: int) -> list[Action]:
        """History up to `go_on_from` is gone: what was applied may be wrong by now, so it goes, if there is any."""
        actions = self._purge(reason) if self._mark is not None else []
        self._whole = False
        self._next = self._base = go_on_from
        self._mark = self._proof = self._oldest_ts = None
        return actions

    def _purge(self, reason: str) -> list[Action]:
        self.counters.purges[reason] += 1
        return [Purge(reason)]

    def _keep(self, seq: int, payload: bytes) -> bool:
        limits = self._limits
        fits = not self._buffer or self._buffer_bytes + len(payload) <= limits.buffered_bytes
        if not fits or len(self._buffer) >= limits.buffered_batches:
            self.counters.buffer_overflows += 1
            return False
        self._buffer.append(Apply(seq, payload))
        self._buffer_bytes += len(payload)
        return True

    def _is_newer(self, payload: bytes) -> bool:
        ts = batch_time(payload)
        return self._newest_ts is not None and ts is not None and ts > self._newest_ts
