"""The index equals a naive model under any order of events, over three workers (one with two ranks) and two tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gateway.kv.events import Cleared, Removed, Stored
from gateway.kv.index import KvIndex
from gateway.kv.speculation import Speculation
from gateway.records import EngineKind, Slot, Tier
from tests.property.naive import (
    DEPTH,
    ENGINES,
    PROMPTS,
    RANKS,
    SIZE,
    TIERS,
    ModelRank,
    Name,
    Path,
    name_hash,
    request,
    tokens_of,
)

PATHS = {path[:depth] for path in PROMPTS for depth in range(1, DEPTH + 1)}


@dataclass(eq=False)
class Promise:
    """One live speculation: what of it is still promised. `paths` are those that the worker had not announced then.

    Blocks behind a hole may be announced all the same; whether the promise is kept beside that is the index's choice,
    and decides for how long siblings keep what lies before them: `most` is promised when it is kept."""

    worker: int
    handle: Speculation
    paths: set[Path]
    most: set[Path]


class IndexMachine(RuleBasedStateMachine):
    speculations: Bundle[Promise] = Bundle("speculations")

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.model: dict[int, dict[int, ModelRank]] = {}
        self.promised: list[Promise] = []
        for worker in ENGINES:
            self._bind(worker)

    def _bind(self, worker: int) -> None:
        engine = ENGINES[worker]
        self.index.bind(Slot(worker), block_size=SIZE, engine=engine)
        self.model[worker] = {rank: ModelRank(engine is not EngineKind.SGLANG) for rank in RANKS[worker]}

    def _has(self, worker: int, path: Path, tier: Tier) -> bool:
        return any(rank.holds(path, tier) for rank in self.model[worker].values())

    def _confirmed_run(self, worker: int, path: Path) -> int:
        length = 0
        while length < DEPTH and self._has(worker, path[: length + 1], Tier.GPU):
            length += 1
        return length

    places = st.sampled_from([(worker, rank) for worker, ranks in RANKS.items() for rank in ranks])

    @rule(
        place=places,
        path=st.sampled_from(PROMPTS),
        span=st.tuples(st.integers(0, DEPTH), st.integers(0, DEPTH)).map(sorted),
        tier=st.sampled_from(TIERS),
        alias=st.integers(0, 1),
        parent_alias=st.integers(0, 1),
        copies=st.integers(1, 2),
    )
    def store(
        self,
        place: tuple[int, int],
        path: Path,
        span: list[int],
        tier: Tier,
        alias: int,
        parent_alias: int,
        copies: int,
    ) -> None:
        worker, rank = place
        start, end = span
        names: list[Name] = [(path[: depth + 1], alias) for depth in range(start, end)]
        above: Name | None = (path[:start], parent_alias) if start else None
        event = Stored(
            [name_hash(worker, rank, name) for name in names],
            name_hash(worker, rank, above) if above else None,
            tokens_of(path)[start * SIZE : end * SIZE],
            SIZE,
            tier,
            keyed=True,
        )
        for _ in range(copies):
            self.index.apply(Slot(worker), rank, [event])
            parent = above
            for name in names:
                self.model[worker][rank].add(name, tier, parent, has_tokens=True)
                parent = name
        self._confirm()

    @rule(place=places, path=st.sampled_from(PROMPTS), depth=st.integers(1, DEPTH), alias=st.integers(0, 1))
    def placeholder(self, place: tuple[int, int], path: Path, depth: int, alias: int) -> None:
        worker, rank = place
        name: Name = (path[:depth], alias)
        # It says its size, a block: else the index would work out the size of chunks (tests/unit/kv/test_offload).
        event = Stored([name_hash(worker, rank, name)], None, [], SIZE, Tier.CPU)
        self.index.apply(Slot(worker), rank, [event])
        self.model[worker][rank].add(name, Tier.CPU, None, has_tokens=False)

    @rule(place=places, tier=st.sampled_from(TIERS), data=st.data())
    def remove(self, place: tuple[int, int], tier: Tier, data: st.DataObject) -> None:
        worker, rank = place
        table = self.model[worker][rank]
        likely = sorted(name for name, count in table.copies[tier].items() if count)
        names = data.draw(st.lists(st.sampled_from([*likely, (PROMPTS[0], 0)]), min_size=1, max_size=3), label="names")
        with self._ending(worker):
            self.index.apply(Slot(worker), rank, [Removed([name_hash(worker, rank, name) for name in names], tier)])
            for name in names:
                table.remove(name, tier)

    @rule(place=places, purge=st.booleans())
    def empty_a_rank(self, place: tuple[int, int], purge: bool) -> None:
        worker, rank = place
        with self._ending(worker):
            if purge:
                self.index.purge(Slot(worker), rank)
            else:
                self.index.apply(Slot(worker), rank, [Cleared()])
            self.model[worker][rank] = ModelRank(self.model[worker][rank].counted)

    @rule(worker=st.sampled_from(sorted(ENGINES)))
    def purge_a_worker(self, worker: int) -> None:
        with self._ending(worker):
            self.index.purge(Slot(worker))
            self.model[worker] = {rank: ModelRank(table.counted) for rank, table in self.model[worker].items()}

    @rule(worker=st.sampled_from(sorted(ENGINES)))
    def replace_a_worker(self, worker: int) -> None:
        self.index.release(Slot(worker))
        self._bind(worker)
        self.promised = [promise for promise in self.promised if promise.worker != worker]

    @rule(
        target=speculations, worker=st.sampled_from(sorted(ENGINES)), path=st.sampled_from(PROMPTS), told=st.booleans()
    )
    def speculate(self, worker: int, path: Path, told: bool) -> Promise:
        covered = {path[:depth] for depth in range(self._before_at_most(worker, path) + 1, DEPTH + 1)}
        most = {path[:depth] for depth in range(self._before(worker, path, self._sent_at_most(worker)) + 1, DEPTH + 1)}
        covered -= {path for path in covered if self._has(worker, path, Tier.GPU)}
        overlaps = self.index.overlap(request(path), 0b111) if told else None
        promise = Promise(worker, self.index.speculate(Slot(worker), request(path), overlaps), covered, most)
        assert len(covered) <= promise.handle.blocks <= len(most | covered)
        self.promised.append(promise)
        return promise

    @rule(promise=consumes(speculations), again=st.booleans())
    def retract(self, promise: Promise, again: bool) -> None:
        for _ in range(1 + again):
            self.index.retract(promise.handle)
        assert promise.handle.blocks == 0
        self.promised = [other for other in self.promised if other is not promise]

    def _before(self, worker: int, path: Path, sent: set[Path]) -> int:
        """Where the promised end of its run begins."""
        run = self._fast_run(worker, path, sent)
        while run and path[:run] in sent:
            run -= 1
        return run

    def _before_at_most(self, worker: int, path: Path) -> int:
        """The same at most, where it is the index's choice which promises are kept."""
        run, sent = self._fast_run(worker, path, self._sent_at_most(worker)), self._sent(worker)
        while run and (path[:run] in sent or not self._has(worker, path[:run], Tier.GPU)):
            run -= 1
        return run

    def _sent_at_most(self, worker: int) -> set[Path]:
        return {path for promise in self.promised if promise.worker == worker for path in promise.most | promise.paths}

    def _sent(self, worker: int) -> set[Path]:
        return {path for promise in self.promised if promise.worker == worker for path in promise.paths}

    def _fast_run(self, worker: int, path: Path, sent: set[Path]) -> int:
        run = 0
        while run < DEPTH and (self._has(worker, path[: run + 1], Tier.GPU) or path[: run + 1] in sent):
            run += 1
        return run

    def _confirm(self) -> None:
        """What a worker announced needs no promise any more."""
        for promise in self.promised:
            promise.paths -= {path for path in promise.paths if self._has(promise.worker, path, Tier.GPU)}

    @contextmanager
    def _ending(self, worker: int) -> Iterator[None]:
        """The end of an announced block ends what is promised of it."""
        had = {path for path in PATHS if self._has(worker, path, Tier.GPU)}
        yield
        gone = {path for path in had if not self._has(worker, path, Tier.GPU)}
        for promise in self.promised:
            if promise.worker == worker:
                promise.most -= gone

    def _slow_end(self, worker: int, path: Path, end: int) -> int:
        while end < DEPTH and self._has(worker, path[: end + 1], Tier.CPU):
            end += 1
        return end

    @invariant()
    def overlaps_are_the_models(self) -> None:
        for path in PROMPTS:
            overlaps = self.index.overlap(request(path), 0b111)
            for worker in ENGINES:
                slot = Slot(worker)
                fast = self._fast_run(worker, path, self._sent(worker))
                if fast < self._fast_run(worker, path, self._sent_at_most(worker)):
                    most = self._slow_end(worker, path, self._fast_run(worker, path, self._sent_at_most(worker)))
                    assert fast <= overlaps.blocks(slot) <= most
                    continue
                end = self._slow_end(worker, path, fast)
                usable = min(end, DEPTH - 1)
                assert overlaps.blocks(slot) == end
                assert overlaps.tokens(slot) == usable * SIZE
                slow = max(0, usable - fast) * SIZE
                assert overlaps.slow(slot) == ({Tier.CPU: slow} if slow else {})
                confirmed = self._confirmed_run(worker, path)
                while confirmed < DEPTH and self._has(worker, path[: confirmed + 1], Tier.CPU):
                    confirmed += 1
                assert overlaps.confirmed(slot) == min(confirmed, DEPTH - 1) * SIZE

    @invariant()
    def numbers_are_the_models(self) -> None:
        stats = self.index.stats()
        waiting = 0
        for worker, ranks in self.model.items():
            waiting += sum(len(table.announced() - table.placed) for table in ranks.values())
            for tier in TIERS:
                held = {
                    path
                    for table in ranks.values()
                    for (path, alias), count in table.copies[tier].items()
                    if count and (path, alias) in table.placed
                }
                assert self.index.resident(Slot(worker), tier) == len(held)
                for rank, table in ranks.items():
                    named = {
                        name_hash(worker, rank, name)
                        for name, count in table.copies[tier].items()
                        if count and name in table.placed
                    }
                    assert self.index.engine_hashes(Slot(worker), rank, tier) == named
        assert stats.orphans + stats.placeholders == waiting
        least, most = (sum(len(sent(worker)) for worker in ENGINES) for sent in (self._sent, self._sent_at_most))
        assert least <= stats.speculative <= most


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=120, stateful_step_count=40)
