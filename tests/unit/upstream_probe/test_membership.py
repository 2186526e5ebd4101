"""Joining and leaving when several things happen at once: slots, names and bindings stay with their worker."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
import zmq
from structlog.testing import capture_logs

from gateway.errors import FleetFull
from gateway.kv import KvIndex
from gateway.kv.events import Cleared, Stored
from gateway.pool import Fleet, Reservation, WorkerState
from gateway.records import (
    EngineHash,
    LoadEndpoint,
    RankChoice,
    Role,
    Tier,
    TrustState,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.upstream.control import ControlClient, ProbeFailed
from gateway.upstream.kv_feed import KvFeed
from gateway.upstream.load_listening import LoadListening
from gateway.upstream.membership import Membership, MembershipSettings

W1, W2, W3, W4 = (WorkerId(f"w{number}") for number in (1, 2, 3, 4))


class Tasks:
    """Runs nothing; `on_stop` is what happens elsewhere while a task is waited for."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.runs: dict[str, Callable[[], Awaitable[None]]] = {}
        self.on_stop: Callable[[], Awaitable[None]] | None = None

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        assert name not in self.names
        self.names.add(name)
        self.runs[name] = run

    async def stop(self, name: str) -> None:
        meanwhile, self.on_stop = self.on_stop, None
        if meanwhile is not None:
            await meanwhile()
        self.names.discard(name)


class Stand:
    """A membership over workers that answer at once, unless their host is `down`."""

    def __init__(self, http: httpx.AsyncClient, context: zmq.Context[Any]) -> None:
        self.fleet, self.index, self.tasks = Fleet(), KvIndex(), Tasks()
        self.left: list[WorkerId] = []
        self.models = [{"id": "m"}]
        self.answers: dict[str, str] = {}
        """Further paths that are answered."""
        self.away: set[str] = set()
        self.probes = 0
        self.asked: Counter[str] = Counter()
        self.on_probe: Callable[[], None] | None = None
        self.on_joining: Callable[[], Awaitable[None]] | None = None
        self.membership = Membership(
            fleet=self.fleet,
            index=self.index,
            control=ControlClient(http),
            tasks=self.tasks,
            context=context,
            clock=lambda: 1.0,
            rng=Random(1),
            on_joining=self._joining,
            on_left=self.left.append,
            settings=MembershipSettings(refresh_s=0.001),
        )

    async def _joining(self, spec: WorkerSpec, facts: WorkerFacts) -> None:
        meanwhile, self.on_joining = self.on_joining, None
        if meanwhile is not None:
            await meanwhile()

    def bound(self, name: WorkerId) -> bool:
        """Whether events of the worker reach the index."""
        return not self.index.apply(self.fleet.workers[name].slot, 0, [Cleared()]).ignored


@pytest_asyncio.fixture
async def stand() -> AsyncIterator[Stand]:
    made: list[Stand] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host in ("down", *made[0].away):
            raise httpx.ConnectError("refused")
        made[0].asked[request.url.path] += 1
        if request.url.path == "/v1/models":
            made[0].probes += 1
            meanwhile, made[0].on_probe = made[0].on_probe, None
            if meanwhile is not None:
                meanwhile()
            return httpx.Response(200, text=json.dumps({"data": made[0].models}))
        text = made[0].answers.get(request.url.path)
        return httpx.Response(404) if text is None else httpx.Response(200, text=text)

    with zmq.Context() as context:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
            made.append(Stand(http, context))
            yield made[0]


def spec(name: WorkerId, host: str | None = None, *, kv_events: str = "") -> WorkerSpec:
    return WorkerSpec(name, f"http://{host or name}:8000", kv_events=kv_events)


async def test_who_joins_while_another_leaves_keeps_its_slot_and_binding(stand: Stand) -> None:
    membership = stand.membership
    await membership.add(spec(W1))

    async def meanwhile() -> None:
        assert stand.fleet.workers[W1].state is WorkerState.GONE
        await membership.add(spec(W2))

    stand.tasks.on_stop = meanwhile
    await membership.leave(W1)
    assert set(stand.fleet.workers) == {W2}
    assert stand.bound(W2)
    assert stand.left == [W1]


async def test_blocks_in_another_size_go_in_steps_when_a_newcomer_changes_the_size(stand: Stand) -> None:
    large = replace(spec(W1), block_size=32)
    await stand.membership.add(large)
    slot = stand.fleet.workers[W1].slot
    for start in range(0, 5000, 100):
        blocks = [EngineHash(number + 1) for number in range(start, start + 100)]
        tokens = [number for number in range(start, start + 100) for _ in range(32)]
        stand.index.apply(slot, 0, [Stored(blocks, None, tokens, 32)])
    assert stand.index.resident(slot, Tier.GPU) == 5000
    seen: set[int] = set()

    async def look() -> None:
        while stand.index.resident(slot, Tier.GPU):
            seen.add(stand.index.resident(slot, Tier.GPU))
            await asyncio.sleep(0)

    await asyncio.gather(look(), stand.membership.add(replace(spec(W2), block_size=16)))
    assert len(seen) >= 5
    assert stand.bound(W2)
    told = [EngineHash(1)]
    assert stand.index.apply(slot, 0, [Stored(told, None, list(range(32)), 32)]).stored == {Tier.GPU: 1}
    assert stand.index.resident(slot, Tier.GPU) == 2, "in keys of 16 tokens"


async def until(reached: Callable[[], bool]) -> None:
    """One turn of the loop after the other, so that what follows happens in the middle of something."""
    async with asyncio.timeout(20):
        while not reached():  # noqa: ASYNC110  no event tells of it
            await asyncio.sleep(0)


async def filled(stand: Stand, name: WorkerId) -> None:
    """A worker of large blocks that holds so many that taking them out has several steps."""
    await stand.membership.add(replace(spec(name), block_size=32))
    blocks = [EngineHash(number + 1) for number in range(3000)]
    stand.index.apply(stand.fleet.workers[name].slot, 0, [Stored(blocks, None, list(range(3000 * 32)), 32)])


async def test_a_worker_taken_out_while_others_are_fitted_to_it_leaves_no_tasks(stand: Stand) -> None:
    await filled(stand, W1)
    joining = asyncio.create_task(stand.membership.add(replace(spec(W2), block_size=16)))
    await until(lambda: W2 in stand.fleet.workers)
    await stand.membership.leave(W2)
    with pytest.raises(ProbeFailed, match="removed while it joined"):
        await joining
    assert set(stand.membership.members) == set(stand.fleet.workers) == {W1}
    assert stand.tasks.names == {f"worker {W1}", f"load {W1}"}


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves meanwhile"])
async def test_feeds_learn_anew_what_was_taken_out_for_another_size(
    stand: Stand, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first step on, and also when the size is the old one again behind the last."""
    wished: list[int] = []
    await stand.membership.add(replace(spec(W1, kv_events="tcp://127.0.0.1:1"), block_size=32))
    slot = stand.fleet.workers[W1].slot
    blocks = [EngineHash(number + 1) for number in range(3000)]
    stand.index.apply(slot, 0, [Stored(blocks, None, list(range(3000 * 32)), 32)])
    monkeypatch.setattr(KvFeed, "resync", lambda _: wished.append(stand.index.resident(slot, Tier.GPU)))
    joining = asyncio.create_task(stand.membership.add(replace(spec(W2), block_size=16)))
    await until(lambda: stand.index.resident(slot, Tier.GPU) < 3000)
    if leaves:
        await stand.membership.leave(W2)
    await asyncio.gather(joining, return_exceptions=True)
    assert stand.membership.members[W1].seats[W1].block_size == (32 if leaves else 16)
    assert wished == [3000]


async def test_an_interrupted_joining_leaves_nothing_behind(stand: Stand) -> None:
    await filled(stand, W1)
    joining = asyncio.create_task(stand.membership.add(replace(spec(W2), block_size=16)))
    await until(lambda: W2 in stand.fleet.workers)
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    assert set(stand.membership.members) == set(stand.fleet.workers) == {W1}


async def test_what_was_learned_in_the_new_size_stays_when_two_change_it_at_once(stand: Stand) -> None:
    await filled(stand, W1)
    slot = stand.fleet.workers[W1].slot
    fitted = asyncio.gather(
        stand.membership.add(replace(spec(W2), block_size=16)), stand.membership.add(replace(spec(W3), block_size=16))
    )
    await until(lambda: stand.membership.members[W1].seats[W1].block_size == 16)
    stand.index.apply(slot, 0, [Stored([EngineHash(1)], None, list(range(32)), 32)])
    await fitted
    assert stand.index.resident(slot, Tier.GPU) == 2


async def test_a_newcomer_in_the_slot_of_one_who_was_to_be_fitted_keeps_what_it_holds(stand: Stand) -> None:
    await filled(stand, W1)
    await filled(stand, W3)
    slot = stand.fleet.workers[W3].slot
    fitted = asyncio.create_task(stand.membership.add(replace(spec(W2), block_size=16)))
    await until(lambda: W2 in stand.fleet.workers)
    leaving = asyncio.create_task(stand.membership.leave(W3))
    joining = asyncio.create_task(stand.membership.add(replace(spec(W4), block_size=16)))
    await until(lambda: W4 in stand.fleet.workers)
    assert stand.fleet.workers[W4].slot == slot
    stand.index.apply(slot, 0, [Stored([EngineHash(1)], None, list(range(16)), 16)])
    await asyncio.gather(fitted, leaving, joining)
    assert stand.index.resident(slot, Tier.GPU) == 1


async def test_leaving_twice_at_once_is_leaving_once(stand: Stand) -> None:
    await stand.membership.add(spec(W1))
    stand.tasks.on_stop = lambda: stand.membership.leave(W1)
    await stand.membership.leave(W1)
    assert (stand.left, dict(stand.membership.members), dict(stand.fleet.workers)) == ([W1], {}, {})
    assert not stand.tasks.names


async def test_a_name_is_taken_from_the_first_moment(stand: Stand) -> None:
    one, other = await asyncio.gather(
        stand.membership.add(spec(W1, "a")), stand.membership.add(spec(W1, "b")), return_exceptions=True
    )
    assert one is None
    assert isinstance(other, ValueError)
    assert stand.fleet.workers[W1].spec.url == "http://a:8000"
    assert stand.bound(W1)


async def test_removed_while_it_joins(stand: Stand) -> None:
    stand.on_joining = lambda: stand.membership.leave(W1)
    with pytest.raises(ProbeFailed, match="removed while it joined"):
        await stand.membership.add(spec(W1))
    assert (dict(stand.membership.members), dict(stand.fleet.workers), stand.tasks.names) == ({}, {}, set())


async def test_a_worker_that_does_not_answer_leaves_its_name_free(stand: Stand) -> None:
    with pytest.raises(ProbeFailed):
        await stand.membership.add(spec(W1, "down"))
    assert not stand.membership.members
    await stand.membership.add(spec(W1))
    assert stand.bound(W1)


async def test_nothing_is_left_of_who_left(stand: Stand) -> None:
    await stand.membership.add(spec(W1, kv_events="tcp://127.0.0.1:5557"))
    slot = stand.fleet.workers[W1].slot
    assert any(name.startswith("feed w1") for name in stand.tasks.names)
    await stand.membership.leave(W1)
    assert not stand.tasks.names
    assert stand.index.apply(slot, 0, [Cleared()]).ignored == {"unbound": 1}


async def test_a_change_of_weight_pool_or_key_keeps_index_and_load(stand: Stand) -> None:
    membership, fleet = stand.membership, stand.fleet
    await membership.add(spec(W1))
    worker = fleet.workers[W1]
    fleet.reserve(worker, Reservation(100, 0, 10, 1.0, streamed=True, sent_at=1.0), 1.0)
    membership.change(replace(spec(W1), weight=3.0, pool="canary", api_key="other"))
    assert fleet.workers[W1] is worker
    assert (worker.weight, worker.spec.pool, worker.spec.api_key) == (3.0, "canary", "other")
    assert (worker.inflight_requests, stand.left) == (1, [])
    assert stand.bound(W1)
    assert membership.members[W1].look.is_set()


async def test_a_change_reaches_the_ranks_of_a_server(stand: Stand) -> None:
    vllm(stand, 2)
    await stand.membership.add(spec(W1))
    assert len(stand.fleet.workers) > 1
    stand.membership.change(replace(spec(W1), weight=3.0))
    assert {worker.weight for worker in stand.fleet.workers.values()} == {3.0}
    assert {worker.spec.rank.number for worker in stand.fleet.workers.values() if worker.spec.rank} == {0, 1}


async def test_a_change_while_it_joins_is_not_lost(stand: Stand) -> None:
    async def meanwhile() -> None:
        stand.membership.change(replace(spec(W1), role=Role.PREFILL))

    stand.on_joining = meanwhile
    await stand.membership.add(spec(W1))
    assert stand.fleet.workers[W1].spec.role is Role.PREFILL


async def test_a_withheld_worker_gets_nothing_new(stand: Stand) -> None:
    vllm(stand, 1)
    await stand.membership.add(spec(W1))
    stand.membership.withhold(W1, "not_ready")
    worker = stand.fleet.workers[W1]
    assert (worker.state, worker.reason) == (WorkerState.DRAINING, "not_ready")
    stand.fleet.drain(W1, 1.0, on=True)
    stand.membership.withhold(W1, None)
    assert worker.health.state is WorkerState.DRAINING  # the operator's word stays
    stand.fleet.drain(W1, 1.0, on=False)
    assert [change.state for change in worker.health.changes] == [WorkerState.DRAINING, WorkerState.READY]
    stand.membership.withhold(W2, "not_ready")


async def test_a_rank_that_appears_on_a_withheld_server_is_withheld(stand: Stand) -> None:
    vllm(stand, 1)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    stand.membership.withhold(W1, "not_ready")
    vllm(stand, 2)
    follow = asyncio.ensure_future(stand.tasks.runs["worker w1"]())
    async with asyncio.timeout(20):
        while R1 not in stand.fleet.workers:  # noqa: ASYNC110  a probe away
            await asyncio.sleep(0.001)
    follow.cancel()
    assert {worker.state for worker in stand.fleet.workers.values()} == {WorkerState.DRAINING}


async def test_what_a_worker_serves_later_is_found(stand: Stand) -> None:
    await stand.membership.add(spec(W1))
    stand.models.append({"id": "poet", "parent": "m"})
    async with asyncio.TaskGroup() as group:
        following = group.create_task(_run(stand.tasks.runs["worker w1"]))
        async with asyncio.timeout(10):
            while "poet" not in stand.fleet.pools:  # noqa: ASYNC110
                await asyncio.sleep(0)
        following.cancel()
    assert stand.fleet.pools["poet"].adapter == "poet"


async def probes(stand: Stand, count: int, *, before_each: Callable[[], Awaitable[None]]) -> Counter[str]:
    """What that many regular probes of w1 ask for."""
    stand.asked.clear()
    ended = asyncio.Event()
    wanted = stand.probes + count

    def again() -> None:
        stand.on_probe = again
        if stand.probes >= wanted:
            ended.set()

    stand.on_probe = again
    stand.membership.settings = MembershipSettings(refresh_s=0.05)
    follow = asyncio.ensure_future(stand.tasks.runs["worker w1"]())
    async with asyncio.timeout(20):
        while not ended.is_set():
            await before_each()
            await asyncio.sleep(0.005)
    follow.cancel()
    stand.on_probe = None
    return stand.asked


async def test_a_process_that_is_known_to_be_the_same_is_asked_for_its_models_only(stand: Stand) -> None:
    """The load polls tell when the process began; every sixth probe asks for all again, and so do those asked for."""
    vllm(stand, 1)
    stand.answers["/metrics"] += "\nprocess_start_time_seconds 1000"
    await stand.membership.add(WorkerSpec(W1, "https://w1:8000"))
    poller = stand.membership.members[W1].poller
    assert poller is not None
    asked = await probes(stand, 13, before_each=poller.poll)
    assert asked["/v1/models"] >= 13
    assert 2 <= asked["/version"] <= 3

    stand.models.append({"id": "lora", "parent": "m"})
    await probes(stand, 6, before_each=poller.poll)
    assert "lora" in stand.membership.members[W1].facts.adapters  # type: ignore[union-attr]


async def test_a_process_nobody_vouches_for_is_asked_for_all(stand: Stand) -> None:
    vllm(stand, 1)
    await stand.membership.add(WorkerSpec(W1, "https://w1:8000"))
    poller = stand.membership.members[W1].poller
    assert poller is not None
    asked = await probes(stand, 6, before_each=poller.poll)
    assert asked["/version"] >= 5


async def test_a_look_asked_for_while_a_probe_runs_is_not_lost(stand: Stand) -> None:
    stand.membership.settings = MembershipSettings(refresh_s=10_000)
    await stand.membership.add(spec(W1))
    stand.on_probe = lambda: stand.membership.look(W1)
    following = asyncio.ensure_future(_run(stand.tasks.runs["worker w1"]))
    async with asyncio.timeout(20):
        while stand.probes < 3:  # noqa: ASYNC110  joining, following, and the look; no event tells of a probe
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_tightened_worker_is_polled_four_times_as_often_until_it_relaxes(stand: Stand) -> None:
    await stand.membership.add(spec(W1))
    poller = stand.membership.members[W1].poller
    assert poller is not None
    assert poller.period_s == 1.0
    stand.membership.tighten(W1, True)
    assert poller.period_s == 0.25
    stand.membership.tighten(W1, False)
    assert poller.period_s == 1.0
    stand.membership.tighten(WorkerId("nobody"), True)


async def test_a_worker_is_believed_as_far_as_its_worst_feed(stand: Stand) -> None:
    await stand.membership.add(spec(W1))
    assert stand.membership.feed_trust(W1) is TrustState.BLIND
    await stand.membership.add(spec(W2, kv_events="tcp://127.0.0.1:5557"))
    assert stand.membership.feed_trust(W2) is TrustState.CATCHING_UP
    assert stand.membership.feed_trust(WorkerId("nobody")) is None


async def test_an_index_that_is_learned_anew_is_emptied_at_once(stand: Stand) -> None:
    await stand.membership.add(spec(W1, kv_events="tcp://127.0.0.1:5557"))
    slot = stand.fleet.workers[W1].slot
    before = stand.index.mark(slot)
    stand.membership.relearn(W1, None)
    assert stand.index.mark(slot) == before, "there is no replay: what is known is kept"
    stand.membership.relearn(W1, 0.5)
    assert stand.index.mark(slot).epoch > before.epoch
    stand.membership.relearn(WorkerId("nobody"), 0.5)


async def _run(run: Callable[[], Awaitable[None]]) -> None:
    await run()


# --------------------------------------------------------------------------- data-parallel ranks


def vllm(stand: Stand, ranks: int, *, version: str = "0.32.0", first: int = 0) -> None:
    """Workers are vLLM with that many ranks from now on, each of 10 blocks and 1000 + rank requests running."""
    numbers = range(first, first + ranks)
    sources = {
        str(n): {"endpoint": f"tcp://*:{15557 + n}", "replay_endpoint": f"tcp://*:{15657 + n}", "topic": ""}
        for n in numbers
    }
    lines = [
        line
        for n in numbers
        for line in (
            f'vllm:cache_config_info{{block_size="16",engine="{n}",num_gpu_blocks="{10 * ranks}"}} 1',
            f'vllm:num_requests_running{{engine="{n}"}} {1000 + n}',
            f'vllm:num_requests_waiting{{engine="{n}"}} {n}',
            f'vllm:kv_cache_usage_perc{{engine="{n}"}} 0.{n}',
        )
    ]
    stand.answers |= {
        "/version": json.dumps({"version": version}),
        "/kv_event_sources": json.dumps(sources),
        "/metrics": "\n".join(lines),
    }


R0, R1 = WorkerId("w1@0"), WorkerId("w1@1")


async def test_each_rank_is_a_worker_of_its_own(stand: Stand) -> None:
    vllm(stand, 2)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    workers = stand.fleet.workers
    assert set(workers) == {R0, R1}
    assert workers[R0].slot != workers[R1].slot
    assert {worker.spec.url for worker in workers.values()} == {"http://w1:8000"}
    assert [workers[name].spec.rank for name in (R0, R1)] == [(W1, 0, 0), (W1, 1, 1)]
    assert [workers[name].kv_capacity for name in (R0, R1)] == [160, 160]
    assert all(stand.bound(name) for name in (R0, R1))
    assert set(stand.membership.members) == {W1}
    assert stand.membership.member_of(R1) is stand.membership.members[W1]
    assert {name for name in stand.tasks.names if name.startswith("feed")} == {
        "feed w1@0 0 tcp://w1:15557",
        "feed w1@1 1 tcp://w1:15558",
    }
    assert {name for name in stand.tasks.names if not name.startswith("feed")} == {"worker w1", "load w1"}


async def test_one_poll_brings_each_rank_its_own_load(stand: Stand) -> None:
    vllm(stand, 2)
    await stand.membership.add(WorkerSpec(W1, "https://w1:8000"))
    poller = stand.membership.members[W1].poller
    assert poller is not None
    await poller.poll()
    loads = [stand.fleet.workers[name].load for name in (R0, R1)]
    assert [(load.running, load.waiting, load.kv_usage, load.kv_blocks) for load in loads if load is not None] == [
        (1000, 0, 0.0, 10),
        (1001, 1, 0.1, 10),
    ]


async def test_ranks_leave_together(stand: Stand) -> None:
    vllm(stand, 2)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    slots = [worker.slot for worker in stand.fleet.workers.values()]
    await stand.membership.leave(R0)  # a rank is no member
    assert set(stand.fleet.workers) == {R0, R1}
    await stand.membership.leave(W1)
    assert (dict(stand.fleet.workers), stand.tasks.names, sorted(stand.left)) == ({}, set(), [R0, R1])
    assert all(stand.index.apply(slot, 0, [Cleared()]).ignored == {"unbound": 1} for slot in slots)


async def test_ranks_go_down_and_come_back_together(stand: Stand) -> None:
    vllm(stand, 2)
    stand.membership.settings = MembershipSettings(refresh_s=10_000)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    workers = stand.fleet.workers
    following = asyncio.ensure_future(_run(stand.tasks.runs["worker w1"]))

    async def all_are(state: WorkerState) -> None:
        async with asyncio.timeout(20):
            while {worker.state for worker in workers.values()} != {state}:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    stand.away.add("w1")
    stand.membership.look(R1)
    await all_are(WorkerState.GONE)
    stand.away.clear()
    await all_are(WorkerState.READY)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_the_number_of_ranks_follows_the_engine(stand: Stand) -> None:
    vllm(stand, 2)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    following = asyncio.ensure_future(_run(stand.tasks.runs["worker w1"]))
    for ranks, names in ((3, {R0, R1, "w1@2"}), (1, {W1}), (2, {R0, R1})):
        vllm(stand, ranks)
        async with asyncio.timeout(20):
            while set(stand.fleet.workers) != names:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        poller = stand.membership.members[W1].poller
        assert poller is not None
        assert set(poller.workers.values()) == names
        feeds = {name for name in stand.tasks.names if name.startswith("feed")}
        assert feeds == {f"feed {f'w1@{n}' if ranks > 1 else 'w1'} {n} tcp://w1:{15557 + n}" for n in range(ranks)}
    assert {R0, R1, "w1@2", W1} <= set(stand.left)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize(
    ("version", "ranks", "names"),
    [
        ("0.11.1", RankChoice.AUTO, {R0, R1}),
        ("0.11.0", RankChoice.AUTO, {W1}),
        ("0.1.dev7+gabcdef", RankChoice.AUTO, {R0, R1}),
        ("unknown", RankChoice.AUTO, {W1}),
        ("unknown", RankChoice.EACH, {R0, R1}),
        ("0.32.0", RankChoice.ONE, {W1}),
    ],
)
async def test_a_release_that_cannot_be_told_the_rank_is_one_worker(
    stand: Stand, version: str, ranks: RankChoice, names: set[WorkerId]
) -> None:
    vllm(stand, 2, version=version)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000", ranks=ranks))
    assert set(stand.fleet.workers) == names
    told = {finding.code for worker in stand.fleet.workers.values() for finding in worker.facts.findings}
    assert ("ranks_as_one" in told) == (ranks is RankChoice.AUTO and names == {W1})
    if names == {W1}:
        worker = stand.fleet.workers[W1]
        assert [source.rank for source in worker.facts.events] == [0, 1]
        assert worker.kv_capacity == 2 * 160


async def test_a_rank_number_is_the_engines_and_the_header_the_position(stand: Stand) -> None:
    """Hybrid load balancing: the second server of two has ranks 2 and 3, and counts them 0 and 1 in requests."""
    vllm(stand, 2, first=2)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    ranks = [worker.spec.rank for worker in stand.fleet.workers.values()]
    assert ranks == [(W1, 2, 0), (W1, 3, 1)]


async def test_one_rank_of_an_externally_balanced_engine_is_a_plain_worker(stand: Stand) -> None:
    vllm(stand, 1, first=3)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    worker = stand.fleet.workers[W1]
    assert worker.spec.rank is None
    assert [source.endpoint for source in worker.facts.events] == ["tcp://w1:15560"]


async def test_a_full_fleet_takes_no_part_of_a_worker(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pool.fleet.MAX_WORKERS", 1)
    vllm(stand, 2)
    with pytest.raises(FleetFull):
        await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    assert (dict(stand.fleet.workers), dict(stand.membership.members), stand.tasks.names) == ({}, {}, set())
    vllm(stand, 1)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    stand.membership.expect(WorkerSpec(W2, "http://w2:8000"))
    following = asyncio.ensure_future(_run(stand.tasks.runs["worker w2"]))
    async with asyncio.timeout(20):
        while stand.membership.members[W2].error is None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert "at most" in (stand.membership.members[W2].error or "")
    await stand.membership.leave(W1)
    async with asyncio.timeout(20):
        while W2 not in stand.fleet.workers:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_server_that_lost_its_seats_to_a_full_fleet_keeps_one_poller(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pool.fleet.MAX_WORKERS", 2)
    vllm(stand, 1)
    await stand.membership.add(WorkerSpec(W1, "http://w1:8000"))
    await stand.membership.add(WorkerSpec(W2, "http://w2:8000"))
    poller = stand.membership.members[W1].poller
    vllm(stand, 2)
    following = asyncio.ensure_future(_run(stand.tasks.runs["worker w1"]))

    async def workers_are(names: set[str]) -> None:
        async with asyncio.timeout(20):
            while set(stand.fleet.workers) != names:
                if following.done():
                    following.result()
                stand.membership.members[W1].look.set()
                await asyncio.sleep(0.001)

    await workers_are({W2})
    await stand.membership.leave(W2)
    await workers_are({R0, R1})
    assert stand.membership.members[W1].poller is poller
    assert poller is not None
    assert set(poller.workers.values()) == {R0, R1}
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


LOADS = (
    '{"model_path": "m", "version": "0.5.23", "kv_events": {"endpoint_port_base": 5557, "load_endpoint_port_base": %d}}'
)


async def test_one_load_socket_that_two_servers_name_is_nobodys(stand: Stand) -> None:
    """SGLang goes on without its load socket when its port is taken: what is heard there is another's load."""
    membership = stand.membership

    def listened_to() -> set[WorkerId]:
        return {name for name, member in membership.members.items() if member.load_socket is not None}

    async def probed(name: WorkerId, reached: Callable[[], bool]) -> None:
        following = asyncio.ensure_future(stand.tasks.runs[f"worker {name}"]())
        await until(reached)
        following.cancel()
        await asyncio.wait([following])

    stand.answers["/server_info"] = LOADS % 6000
    await membership.add(spec(W1, "h"))
    await membership.add(spec(W3, "elsewhere"))
    assert listened_to() == {W1, W3}
    await membership.add(spec(W2, "h"))
    assert listened_to() == {W1, W3}
    await probed(W1, lambda: listened_to() == {W3})

    def found(name: WorkerId) -> bool:
        return any(finding.code == "load_unheard" for finding in stand.fleet.workers[name].findings)

    with capture_logs() as lines:
        for name in (W1, W2, W1, W2):
            await probed(name, lambda name=name: found(name))  # type: ignore[misc]
    told = [line for line in lines if line["event"] == "worker could serve better"]
    assert [(line["worker"], line["code"]) for line in told if line["code"] == "load_unheard"] == [
        (W1, "load_unheard"),
        (W2, "load_unheard"),
    ]
    await membership.leave(W1)
    await probed(W2, lambda: listened_to() == {W2, W3} and not found(W2))
    heard = membership.members[W2].load_socket
    assert heard is not None
    assert [load.endpoint for load in heard.endpoints] == ["tcp://h:6000"]
    await membership.leave(W2)
    assert listened_to() == {W3}


async def test_a_load_socket_that_cannot_be_opened_leaves_the_others(stand: Stand) -> None:
    stand.answers["/server_info"] = LOADS % 6000
    for name in (W1, W2):
        await stand.membership.add(spec(name))
    first, second = (stand.membership.members[name] for name in (W1, W2))
    assert first.facts is not None
    first.facts = replace(first.facts, loads=(LoadEndpoint(0, "tcp://h:none", "load"),))
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        address = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
        second.facts = replace(first.facts, loads=(LoadEndpoint(0, address, "load"),))
        listening = LoadListening(tasks=stand.tasks, context=context, clock=time.monotonic)
        stand.tasks.names.clear()
        for member in (first, second):
            member.load_socket = None
            listening.follow(member, on=True)
        running = asyncio.ensure_future(stand.tasks.runs["load sockets"]())

        def heard() -> bool:
            engine.send_multipart([b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", 4, 0, 1, 2, 0])])
            load = stand.fleet.workers[W2].load
            return load is not None and load.running == 4

        await until(heard)
        assert not running.done()
        before = first.load_socket, second.load_socket
        for member in (first, second):
            listening.follow(member, on=True)  # as after a probe
        after = first.load_socket, second.load_socket
        await until(heard)
        running.cancel()
        await asyncio.wait([running])
    assert stand.fleet.workers[W1].load is None
    assert before[0] is not after[0], "what could not be opened is tried again"
    assert before[1] is after[1]


async def test_a_server_that_is_back_has_time_to_be_heard(stand: Stand) -> None:
    """Its load socket was silent while it was away, and is connected to anew."""
    stand.answers["/server_info"] = LOADS % 6000
    await stand.membership.add(spec(W1, "h"))
    member = stand.membership.members[W1]
    assert member.load_socket is not None
    (rank,) = member.load_socket.ranks.values()
    member.load_socket._since = rank.heard_at = -60.0

    async def probed(wanted: bool) -> None:
        def found() -> bool:
            return any(finding.code == "load_unheard" for finding in stand.fleet.workers[W1].findings)

        probes = stand.probes
        following = asyncio.ensure_future(stand.tasks.runs["worker w1"]())
        await until(lambda: stand.probes > probes + 1 and found() is wanted)
        following.cancel()
        await asyncio.wait([following])

    await probed(True)
    member.away = True
    await probed(False)
