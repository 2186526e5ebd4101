"""Feeds and index together against engines with lossy connections: three workers (one with two ranks), two tiers.

Engines publish stores, removals and clears; batches arrive, wait on the way, or are lost; replays are whole, cut short,
trimmed or silent; engines restart, workers are taken out and come back. Whenever everything that is on its way has
arrived, the index must hold what the unbroken run of batches up to the newest received one says, counted from the
batches themselves by a naive model, and every batch that could be had must have been fetched.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.kv.feed_words import FeedPhase
from gateway.kv.index import KvIndex
from gateway.records import EngineKind, Slot, Tier, TrustState
from tests.following import Follower
from tests.property.naive import (
    DEPTH,
    ENGINES,
    PROMPTS,
    RANKS,
    SIZE,
    TIERS,
    ModelRank,
    Path,
    name_hash,
    request,
    tokens_of,
)

REPLAYS = {0: True, 1: True, 2: False}
LANES = [(worker, rank) for worker, ranks in RANKS.items() for rank in ranks]
MEDIA = {Tier.GPU: "GPU", Tier.CPU: "CPU"}
LONG_S = 120.0
"""Longer than any rest between replays."""


@dataclass(frozen=True)
class Store:
    path: Path
    start: int
    end: int
    tier: Tier

    def wire(self, worker: int, rank: int) -> dict[str, object]:
        count = self.end - self.start
        above = name_hash(worker, rank, (self.path[: self.start], 0)) if self.start else None
        return {
            "type": "BlockStored",
            "block_hashes": [name_hash(worker, rank, (self.path[: at + 1], 0)) for at in range(self.start, self.end)],
            "parent_block_hash": above,
            "token_ids": tokens_of(self.path)[self.start * SIZE : self.end * SIZE],
            "block_size": SIZE,
            "medium": MEDIA[self.tier],
            "extra_keys": [None] * count,
        }

    def tell(self, table: ModelRank) -> None:
        for at in range(self.start, self.end):
            parent = (self.path[:at], 0) if at else None
            table.add((self.path[: at + 1], 0), self.tier, parent, has_tokens=True)


@dataclass(frozen=True)
class Remove:
    path: Path
    tier: Tier

    def wire(self, worker: int, rank: int) -> dict[str, object]:
        name = name_hash(worker, rank, (self.path, 0))
        return {"type": "BlockRemoved", "block_hashes": [name], "medium": MEDIA[self.tier]}

    def tell(self, table: ModelRank) -> None:
        table.remove((self.path, 0), self.tier)


@dataclass(frozen=True)
class Clear:
    def wire(self, worker: int, rank: int) -> dict[str, object]:
        return {"type": "AllBlocksCleared"}

    def tell(self, table: ModelRank) -> None:
        table.copies = {tier: type(copies)() for tier, copies in table.copies.items()}
        table.parents.clear()
        table.placed.clear()


Event = Store | Remove | Clear


@dataclass
class Process:
    """One life of an engine's publisher: everything it ever published, and where its replay buffer begins."""

    events: list[list[Event]] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    kept_from: int = 0


class Lane:
    """One rank: the engine's process, the batches on their way, and the follower with what has reached it."""

    def __init__(self, worker: int, rank: int, index: KvIndex) -> None:
        self.worker, self.rank = worker, rank
        self.counted = ENGINES[worker] is not EngineKind.SGLANG
        self.process = Process()
        self.on_the_way: list[int] = []
        self.join(index, 0.0)

    def join(self, index: KvIndex, now: float) -> None:
        self.follower = Follower(index, Slot(self.worker), self.rank, can_replay=REPLAYS[self.worker])
        self.follower.connect(now)
        # A request that got no answer makes replays rest, for longer than one life of the engine.
        self.unanswered = False
        self.forget()

    def forget(self) -> None:
        """The follower begins anew."""
        self.received: set[int] = set()
        self.on_the_way.clear()

    def deliver(self, now: float) -> None:
        while self.on_the_way:
            seq = self.on_the_way.pop(0)
            self.received.add(seq)
            self.follower.live(seq, self.process.payloads[seq], now)

    def answer(self, now: float, *, at_most: int | None = None) -> None:
        """The engine answers the open request; with `at_most` the rest and the end marker get lost."""
        asked = self.follower.asked
        assert asked is not None
        process = self.process
        replies = [(seq, process.payloads[seq]) for seq in range(max(asked, process.kept_from), len(process.payloads))]
        whole = at_most is None or len(replies) < at_most
        kept = replies if whole else replies[:at_most]
        taken = self.follower.answer(kept, now, end=whole)
        # What lies behind the batches that came live may be left for when the next live one shows that it is missing.
        self.received.update(seq for seq in taken if seq < self.follower.state.expected)

    def settle(self, now: float) -> float:
        """Everything on its way arrives; returns the time then."""
        self.deliver(now)
        for _ in range(100):
            deadline = self.follower.state.deadline
            if self.follower.asked is not None:
                self.answer(now)
            elif deadline is not None:
                now = max(now, deadline)
                self.follower.tick(now)
            else:
                break
        assert self.follower.state.caught_up
        return now

    def known(self) -> tuple[int, int]:
        """First and last+1 number of the unbroken run of batches up to the newest received one."""
        if not self.received:
            return 0, 0
        end = first = max(self.received)
        while first - 1 in self.received:
            first -= 1
        return first, end + 1

    def expected(self) -> ModelRank:
        table = ModelRank(self.counted)
        first, end = self.known()
        for events in self.process.events[first:end]:
            for event in events:
                event.tell(table)
        return table


class FeedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.unix = 1_000.0
        self.index = KvIndex()
        for worker, engine in ENGINES.items():
            self.index.bind(Slot(worker), block_size=SIZE, engine=engine)
        self.lanes = {(worker, rank): Lane(worker, rank, self.index) for worker, rank in LANES}
        self.settled = False

    lane = st.sampled_from(LANES)
    stores = st.builds(
        lambda path, span, tier: Store(path, min(span), max(span), tier),
        st.sampled_from(PROMPTS),
        st.tuples(st.integers(0, DEPTH), st.integers(0, DEPTH)),
        st.sampled_from(TIERS),
    )
    removals = st.builds(
        lambda path, depth, tier: Remove(path[:depth], tier),
        st.sampled_from(PROMPTS),
        st.integers(1, DEPTH),
        st.sampled_from(TIERS),
    )
    batches = st.lists(st.one_of(stores, stores, removals, removals, st.just(Clear())), min_size=1, max_size=3)

    def _publish(self, lane: Lane, events: list[Event]) -> int:
        self.unix += 1.0
        process = lane.process
        wire = [event.wire(lane.worker, lane.rank) for event in events]
        process.payloads.append(msgspec.msgpack.encode([self.unix, wire, lane.rank]))
        process.events.append(events)
        return len(process.payloads) - 1

    @rule(place=lane, events=batches, way=st.sampled_from(["arrives", "arrives", "waits", "lost"]))
    def publish(self, place: tuple[int, int], events: list[Event], way: str) -> None:
        lane = self.lanes[place]
        seq = self._publish(lane, events)
        if way != "lost":
            lane.on_the_way.append(seq)
        if way == "arrives":
            lane.deliver(self.now)
        self.settled = False

    @rule(place=lane, events=batches)
    def restart_seen_by_the_numbers(self, place: tuple[int, int], events: list[Event]) -> None:
        """A new process: requests under way die with the old one; its first batch arrives."""
        lane = self.lanes[place]
        lane.deliver(self.now)
        lane.process = Process()
        lane.forget()
        lane.unanswered |= lane.follower.asked is not None
        lane.follower.asked = None
        lane.on_the_way.append(self._publish(lane, events))
        lane.deliver(self.now)
        self.settled = False

    @rule(place=lane, events=st.lists(batches, max_size=6))
    def restart_seen_by_others(self, place: tuple[int, int], events: list[list[Event]]) -> None:
        """A new process that published while nobody listened, perhaps more than the old one; its start time told."""
        lane = self.lanes[place]
        lane.process = Process()
        for batch in events:
            self._publish(lane, batch)
        lane.forget()
        lane.follower.resync(self.now)
        self.settled = False

    @rule(place=lane)
    def cut_off_and_back(self, place: tuple[int, int]) -> None:
        """The connection breaks and is made anew; the process is the same."""
        lane = self.lanes[place]
        if lane.process.kept_from == 0 and not lane.unanswered:
            lane.follower.connect(self.now)
            self.settled = False

    @rule(place=lane, events=st.lists(batches, max_size=6))
    def restart_while_cut_off(self, place: tuple[int, int], events: list[list[Event]]) -> None:
        """A new process that may have published more than the old one; nothing but the new connection tells."""
        lane = self.lanes[place]
        if not REPLAYS[lane.worker] or lane.unanswered:
            return  # then only the numbers tell
        lane.process = Process()
        for batch in events:
            self._publish(lane, batch)
        lane.forget()
        lane.follower.connect(self.now)
        self.settled = False

    @rule(place=lane, at_most=st.none() | st.integers(0, 3))
    def replay(self, place: tuple[int, int], at_most: int | None) -> None:
        """The open request is answered: in full, cut short, or not at all."""
        lane = self.lanes[place]
        if lane.follower.asked is None:
            return
        lane.unanswered |= at_most == 0
        lane.answer(self.now, at_most=at_most)
        if at_most is not None:
            lane.follower.asked = None  # nothing more comes of it

    @rule(place=lane)
    def trim(self, place: tuple[int, int]) -> None:
        """All but the newest batch goes. Not while a check is open: without the batch it asks for, the feed must take
        the process for another."""
        lane = self.lanes[place]
        if lane.follower.state.doubt is None:
            lane.process.kept_from = max(0, len(lane.process.payloads) - 1)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0, LONG_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for lane in self.lanes.values():
            lane.unanswered |= lane.follower.asked is not None
            lane.follower.tick(self.now)

    @rule(worker=st.sampled_from(sorted(ENGINES)))
    def worker_leaves_and_comes_back(self, worker: int) -> None:
        self.index.release(Slot(worker))
        self.index.bind(Slot(worker), block_size=SIZE, engine=ENGINES[worker])
        for lane in self.lanes.values():
            if lane.worker == worker:
                lane.join(self.index, self.now)
        self.settled = False

    @rule()
    def everything_arrives(self) -> None:
        for lane in self.lanes.values():
            self.now = lane.settle(self.now)
        self.settled = True

    def teardown(self) -> None:
        self.everything_arrives()
        self.index_is_the_models()

    @invariant()
    def index_is_the_models(self) -> None:
        if not self.settled:
            return
        tables = {place: lane.expected() for place, lane in self.lanes.items()}
        doubted = set()
        for lane in self.lanes.values():
            self._check_feed(lane)
            if lane.unanswered and lane.follower.state.doubt is not None:
                # Nobody told whether the process behind the new connection is the same: it is kept, and not believed.
                assert lane.follower.state.trust is TrustState.UNCERTAIN
                doubted.add(lane.worker)
        for worker, ranks in RANKS.items():
            held = [tables[worker, rank] for rank in ranks]
            if worker not in doubted:
                self._check_worker(worker, held)
        if doubted:
            return
        waiting = sum(len(table.announced() - table.placed) for table in tables.values())
        assert self.index.stats().orphans == waiting

    def _check_feed(self, lane: Lane) -> None:
        first, end = lane.known()
        # A clear makes what came before it needless.
        whole = first == 0 or any(
            isinstance(event, Clear) for batch in lane.process.events[first:end] for event in batch
        )
        state = lane.follower.state
        if state.phase is FeedPhase.LIVE:
            assert whole
        if REPLAYS[lane.worker] and lane.process.kept_from == 0 and not lane.unanswered:
            # Nothing stood in the way of fetching every batch.
            assert whole
            assert state.phase is FeedPhase.LIVE

    def _check_worker(self, worker: int, tables: list[ModelRank]) -> None:
        slot = Slot(worker)
        for path in PROMPTS:
            fast = 0
            while fast < DEPTH and any(table.holds(path[: fast + 1], Tier.GPU) for table in tables):
                fast += 1
            end = fast
            while end < DEPTH and any(table.holds(path[: end + 1], Tier.CPU) for table in tables):
                end += 1
            assert self.index.overlap(request(path), 1 << slot).blocks(slot) == end
        for tier in TIERS:
            keys = {
                name[0]
                for table in tables
                for name, count in table.copies[tier].items()
                if count and name in table.placed
            }
            assert self.index.resident(slot, tier) == len(keys)


TestFeedsAndIndex = FeedMachine.TestCase
TestFeedsAndIndex.settings = settings(max_examples=150, stateful_step_count=50)
