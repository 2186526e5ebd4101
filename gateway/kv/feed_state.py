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
8. How often a replay is tried is `gateway.kv.replay`'s. After so many in vain that it rests, a lost feed is tried now
   and then, without giving up what it has.
9. A feed that looks whole may be doubted (`gateway.kv.feed_doubts`).

The caller executes actions in the order given, hands every reply to the *latest* request back (a new request means a
new connection), and calls `on_tick` when `deadline` has passed.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from gateway.kv.feed_doubts import Doubts
from gateway.kv.feed_words import (
    Action,
    Apply,
    EndPreview,
    FeedCounters,
    FeedLimits,
    FeedPhase,
    FeedPoint,
    Preview,
    Purge,
)
from gateway.kv.position import Position
from gateway.kv.replay import Asking, Backlog, For
from gateway.records import TrustState

_WAITING = (FeedPhase.STARTING, FeedPhase.REPLAYING, FeedPhase.REPAIRING)

# Start times are told in ticks of the kernel, and rounded by some.
_CLOCK_S = 1.0


class FeedState:
    """The state machine of one (worker, rank). Every `on_...` method returns actions to execute in order."""

    __slots__ = (
        "_asks",
        "_at",
        "_buffer",
        "_doubts",
        "_heard",
        "_limits",
        "_previewing",
        "counters",
        "phase",
    )

    def __init__(self, *, can_replay: bool, limits: FeedLimits | None = None) -> None:
        self.phase = FeedPhase.STARTING
        self.counters = FeedCounters()
        self._limits = limits or FeedLimits()
        self._asks = Asking(possible=can_replay, limits=self._limits)
        self._heard = False  # the engine has said something: a batch, or the end of a replay
        self._doubts = Doubts(self._limits)
        self._buffer = Backlog(self._limits)
        self._at = Position(remembered=self._limits.remembered_batches)
        self._forget()

    def _forget(self) -> None:
        """As if nothing had ever been applied."""
        self._buffer.clear()
        self._previewing = False
        self._asks.brought = False
        self._asks.proof = None
        self._at.forget()
        self._doubts.forget()

    @property
    def caught_up(self) -> bool:
        """Whether all that can be known of this rank was handed out: nothing is being replayed or waited for."""
        return self.phase not in _WAITING

    @property
    def doubt(self) -> str | None:
        """Why a feed that looks whole is not believed: `silent`, `reconnected`; None when it is."""
        return self._doubts.why

    @property
    def trust(self) -> TrustState:
        """How far what was handed out may be believed: `blind` while nothing was ever heard from the engine,
        `catching_up` while something is being replayed, `uncertain` when history is missing or the feed is doubted."""
        if not self.caught_up:
            return TrustState.CATCHING_UP
        if not self._heard:
            return TrustState.BLIND
        if self.phase is FeedPhase.LIVE and self._doubts.why is None:
            return TrustState.TRUSTED
        return TrustState.UNCERTAIN

    @property
    def expected(self) -> int:
        """The next sequence number to apply; 0 while nothing was applied."""
        return self._at.next

    @property
    def asking(self) -> bool:
        """Whether replies to the latest request are of use."""
        return self._asks.reply_by is not None

    @property
    def deadline(self) -> float | None:
        """When `on_tick` has something to do; None: never."""
        times = [time for time in (self._asks.at, self._asks.reply_by, self._doubts.silent_by) if time is not None]
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
        self._asks.at = now + self._limits.connect_timeout_s
        return actions

    def on_connected(self, now: float) -> list[Action]:
        """The subscription is connected: fetch what was published before it. Called again: it was connected anew."""
        if self.phase is FeedPhase.STARTING or not self._heard:
            self._asks.afresh()
            if self._at.mark is not None and self._asks.possible:
                self.phase = FeedPhase.REPLAYING
                return self._ask(For.CHECK, now)
            return self._begin(now)
        self.counters.reconnects += 1
        if self._at.mark is None or self.phase is FeedPhase.REPLAYING:
            return self._start_over("reconnect", now)
        self._doubts.why = "reconnected"
        return self._ask(For.CHECK, now) if self._asks.may(now) else []

    def resume(self, point: FeedPoint) -> None:
        """Go on from a point that another process has reached: what it had applied by then is in the index. To be
        called before the feed is opened. As after a reconnection, the engine must show the same last batch."""
        self._at.resume(point)
        self._doubts.why = "reconnected"

    @property
    def point(self) -> FeedPoint | None:
        """How far the feed has come, for `resume`; None while history is missing or doubted."""
        return self._at.point if self.trust is TrustState.TRUSTED else None

    def resync(self, now: float) -> list[Action]:
        """Forget the rank and learn it anew, as far as the engine still knows its history."""
        if self.phase is FeedPhase.STARTING:
            actions = self._purge("resync") if self._at.mark is not None else []
            self._forget()
            return actions
        return self._start_over("resync", now, whole=self._asks.possible)

    def relearn(self, since: float, now: float) -> list[Action]:
        """What came before `since` is not believed any more, though nothing was missing: drop all, and fetch again what
        came live after it. Without a replay it is only dropped; what is being repaired is left alone."""
        if self.phase in _WAITING:
            return []
        actions = self._purge("contradicted")
        self._doubts.expect_unknown_removals(now)
        first = self._at.first_live(since)
        if first < self._at.next and self._asks.may(now):
            self._at.back_to(first)
            self.phase = FeedPhase.REPAIRING
            actions += self._ask(For.REPAIR, now)
        return actions

    def on_process_started(self, at_unix: float, now: float) -> list[Action]:
        """The worker's process started at `at_unix`, by its own clock. Nothing to do when all we hold is newer."""
        if self._at.oldest_ts is None or self._at.oldest_ts >= at_unix - _CLOCK_S:
            return []
        self.counters.resets += 1
        return self._start_over("restart", now, whole=self._asks.possible)

    def on_live(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch from the subscription."""
        self._heard = True
        self._doubts.heard_live(now)
        actions: list[Action] = []
        if self._at.is_of_another_process(seq, payload):
            self.counters.resets += 1
            actions = self._purge("restart")
            self._forget()
            self._settle()
        elif seq < self._at.next:
            self._at.last_live = seq
            self.counters.duplicates += 1  # a replay was faster
            return []
        self._at.came_live(seq, now)
        if self.phase not in _WAITING and self._at.follows(seq, payload):
            actions.append(self._apply(seq, payload, now))
            return actions
        fits = self._buffer.keep(seq, payload)
        self.counters.buffer_overflows += not fits
        if self.phase not in _WAITING:
            actions += self._drain(now)
        if fits and self._buffer:
            self._previewing = True
            actions.append(Preview(seq, payload))
        return actions

    def on_replay(self, seq: int, payload: bytes, now: float) -> list[Action]:
        """A batch of the replay asked for last."""
        if self._asks.reply_by is None:
            return []
        self._heard = True
        self._asks.heard(now)
        actions: list[Action] = []
        if self._asks.purpose is For.PROBE:
            if seq >= self._at.base and self._at.mark is not None:
                self._settle()  # the engine has no more than we have
                return []
            actions += self._purge("relearn")
            self._forget()
            self.phase, self._asks.purpose = FeedPhase.REPLAYING, For.START
        elif (proof := self._asks.proof) is not None:
            self._asks.proof = None
            if seq == proof.seq and xxh3_64_intdigest(payload) != proof.digest:
                self.counters.resets += 1
                return self._start_over("restart", now)
            if seq > proof.seq:
                actions += self._begins_at(seq)
            else:
                self._doubts.same_process()
        if seq < self._at.next:
            self.counters.duplicates += 1
            return actions
        if not self._at.follows(seq, payload):
            if self._asks.brought:
                # A hole inside the replay: replies were dropped on the way, or the engine lost a batch for good. The
                # next request tells which: it brings the number, or begins above it.
                return actions + self._ask(self._asks.purpose or For.REPAIR, now, continued=True)
            if self._buffer and self._buffer.first.seq < seq:
                # What came live reaches further back than the engine's own history.
                if not self._at.follows(*self._buffer.first):
                    actions += self._begins_at(self._buffer.first.seq)
                self._asks.brought = True
                return actions + self._complete(now)
            actions += self._begins_at(seq)
        self._asks.brought = True
        self._asks.afresh()
        self._doubts.heard()
        actions.append(self._apply(seq, payload, now))
        if self._buffer and self._buffer.first.seq <= self._at.next:  # what follows has come live
            self._rest_phase()
            actions += self._drain(now)
        return actions

    def on_replay_end(self, now: float) -> list[Action]:
        """The end marker of the replay asked for last."""
        if self._asks.reply_by is None:
            return []
        self._heard = True
        if self._asks.proof is not None:  # not even the last batch we know: a younger process
            self.counters.resets += 1
            return self._start_over("restart", now)
        if self._asks.purpose is For.PROBE:
            self._asks.probe_later(now)
            return []
        if self._buffer and not self._asks.brought:
            return self._in_vain(now, at_once=False)
        return self._complete(now)

    def on_tick(self, now: float) -> list[Action]:
        """Time passed; does something only once `deadline` is reached."""
        actions: list[Action] = []
        if self._doubts.falls_silent(now):
            self.counters.silences += 1
            if self._at.mark is not None and self._asks.may(now) and self._asks.purpose in (None, For.PROBE):
                actions += self._ask(For.CHECK, now)
        if self._asks.at is not None and now >= self._asks.at:
            self._asks.at = None
            if self.phase is FeedPhase.STARTING:
                self.phase = FeedPhase.LOST
                return actions + self._drain(now)
            actions += self._ask(self._asks.purpose or For.START, now)
        elif self._asks.reply_by is not None and now >= self._asks.reply_by:
            if self._asks.purpose is For.PROBE:
                self._asks.probe_later(now)
            elif self._asks.brought and self.caught_up and self._asks.purpose is not For.CHECK:
                actions += self._complete(now)  # only the end marker got lost
            elif self._asks.brought:
                actions += self._ask(self._asks.purpose or For.START, now, continued=True)
            else:
                actions += self._in_vain(now)
        return actions

    def on_served(self, blocks: int, started_at: float, now: float) -> bool:
        """A request that began at `started_at` ended, and the worker computed so many blocks anew for it: it must have
        announced something since, or will at once. True when that made a new `deadline`."""
        return blocks > 0 and self.caught_up and self._doubts.served(started_at, now)

    def on_cleared(self, seq: int, now: float) -> list[Action]:
        """The batch being applied or previewed contains a clear."""
        if seq < self._at.base:
            return []
        self._at.base = seq
        self._doubts.forget_removals()
        if seq < self._at.next:  # it is applied in its turn
            self._at.whole = True
            if self.phase is FeedPhase.LOST:
                self._settle()
            return []
        self._buffer.drop_before(seq)
        if not self._buffer or self._buffer.first.seq != seq:
            return []
        self._at.next = seq
        self._at.whole = True
        self._doubts.why = None
        self._settle()
        return self._drain(now)

    def on_applied(self, removed: int, unknown: int, now: float) -> list[Action]:
        """What applying brought: blocks removed, and removals of blocks the index did not hold. In a whole feed the
        latter are rare; where they are the rule, what we hold belongs to another process."""
        if self.phase is not FeedPhase.LIVE:
            self._doubts.forget_removals()
        elif self._doubts.removed(removed, unknown, now):
            return self._start_over("contradiction", now, whole=self._asks.possible)
        return []

    def on_undecodable(self) -> list[Action]:
        """The payload of the latest `Apply` was no batch of events. What it said is lost, removals perhaps."""
        self.counters.errors += 1
        actions = self._lose("undecodable", self._at.next)
        if self.phase is FeedPhase.LIVE:
            self.phase = FeedPhase.LOST
        return actions

    # ------------------------------------------------------------------ asking

    def _ask(self, purpose: For, now: float, *, continued: bool = False) -> list[Action]:
        return self._asks.ask(purpose, now, missing=self._at.next, last=self._at.mark, continued=continued)

    def _in_vain(self, now: float, *, at_once: bool = True) -> list[Action]:
        """A try brought nothing: try again, slower, or give up."""
        asks = self._asks
        if asks.in_vain():
            if at_once:
                return self._ask(asks.purpose or For.START, now)
            asks.pause(now)
            return []
        self.counters.replays["timed_out"] += 1
        asks.give_up(now)
        if not self._at.next:
            self._at.whole = False
        self._settle()
        actions = self._drain(now)
        if self.phase is FeedPhase.LOST:
            asks.probe_after_rest()
        return actions

    def _complete(self, now: float) -> list[Action]:
        """The replay brought what there was."""
        if self._at.whole:
            self.counters.replays["complete"] += 1
        self._asks.done()
        self._settle()
        return self._drain(now)

    # ------------------------------------------------------------------ steps

    def _settle(self) -> None:
        """No replay runs or is planned; the phase says what is held."""
        self._asks.stop()
        self._rest_phase()

    def _rest_phase(self) -> None:
        self.phase = FeedPhase.LIVE if self._at.whole else FeedPhase.LOST

    def _begin(self, now: float) -> list[Action]:
        if not self._asks.possible:
            self._settle()
            return self._drain(now)
        self.phase = FeedPhase.REPLAYING
        return self._ask(For.START, now)

    def _start_over(self, reason: str, now: float, *, whole: bool = True) -> list[Action]:
        actions = self._purge(reason)
        self._forget()
        self._at.whole = whole
        self._asks.afresh()
        return actions + self._begin(now)

    def _drain(self, now: float) -> list[Action]:
        """Apply what waits, as far as nothing is missing before it or nothing can be done about it."""
        actions: list[Action] = []
        while self._buffer:
            seq, payload = self._buffer.first
            if seq > self._at.next and not self._at.follows(seq, payload):
                actions += self._missing(seq, now)
                if self.phase in _WAITING:
                    return actions
            self._buffer.take()
            if seq >= self._at.next:
                actions.append(self._apply(seq, payload, now))
        if self._previewing:
            self._previewing = False
            actions.append(EndPreview())
        return actions

    def _missing(self, seq: int, now: float) -> list[Action]:
        """Batches before this one, which has come live, are missing."""
        at_start = not self._at.next
        new = not at_start and seq != self._at.gap_before
        self._at.gap_before = seq
        self.counters.gaps += new
        if self._asks.may(now) and (self._at.whole or not at_start):
            self.phase = FeedPhase.REPLAYING if at_start else FeedPhase.REPAIRING
            if self._asks.purpose in (None, For.PROBE):
                return self._ask(For.START if at_start else For.REPAIR, now)
            return []  # the replay that runs may bring them
        if new:  # else it was asked for in vain
            self.counters.replays["unavailable"] += 1
        actions = self._lose("gap", seq)
        self.phase = FeedPhase.LOST
        return actions

    def _apply(self, seq: int, payload: bytes, now: float) -> Action:
        if self._asks.proof is None and seq == self._at.next:
            self._doubts.same_process()
        if not self._at.next and not self._at.whole and self._at.follows(seq, payload):
            self._at.whole = True  # the first batch of a process, whatever was lost of another one
            if self.phase is FeedPhase.LOST:
                self.phase = FeedPhase.LIVE
        # A check that is tried again must not ask for what came after the doubt.
        ts = self._at.applied(seq, payload, marks=self._asks.purpose is not For.CHECK)
        self.counters.batches += 1
        self.counters.last_applied_at = now
        if ts is not None:
            self.counters.last_event_unix = ts
        return Apply(seq, payload)

    def _begins_at(self, seq: int) -> list[Action]:
        """The replay begins too late: what it brings is all there is to be had."""
        self.counters.replays["history_gone"] += 1
        actions = self._lose("history_gone", seq)
        self.phase, self._asks.purpose = FeedPhase.REPLAYING, For.START
        return actions

    def _lose(self, reason: str, go_on_from: int) -> list[Action]:
        """History up to `go_on_from` is gone: what was applied may be wrong by now, so it goes, if there is any."""
        actions = self._purge(reason) if self._at.mark is not None else []
        self._at.lose(go_on_from)
        self._asks.proof = None
        return actions

    def _purge(self, reason: str) -> list[Action]:
        self.counters.purges[reason] += 1
        return [Purge(reason)]
