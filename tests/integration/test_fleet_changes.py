"""Workers that come and go while requests run: loads stay known, gauges exact, nothing of who left stays behind."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from gateway.discovery import Found
from gateway.pool import WorkerState
from gateway.records import WorkerId, WorkerSpec
from gateway.sim.faults import Fault, FaultKind
from tests.integration.rig import Rig, fast, rig, until

COMPLETIONS = "/v1/completions"
W1, W2 = WorkerId("w1"), WorkerId("w2")
SOURCE = "config"


def ask(seed: int, **more: Any) -> dict[str, Any]:
    chance = Random(seed)
    return {"model": "demo", "prompt": [chance.randrange(300, 4000) for _ in range(40)], "max_tokens": 2, **more}


def specs(r: Rig) -> list[WorkerSpec]:
    return [WorkerSpec(WorkerId(engine.settings.name), engine.url) for engine in r.engines]


def name(r: Rig, *listed: WorkerSpec) -> None:
    """What the source says now."""
    r.gateway.enrolment.listed(SOURCE, map(Found, listed))


async def gauges(r: Rig) -> dict[tuple[str, str], float]:
    """In-flight gauges of the scrape, by name and worker."""
    text = (await r.http.get(r.ports.admin_url + "/metrics")).text
    return {
        (sample.name, sample.labels["worker"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(("kvgate_worker_inflight", "kvgate_accounting_drift"))
    }


async def stream(r: Rig, seed: int, tokens: int) -> str:
    """One stream to its end; the worker that served it."""
    async with r.http.stream("POST", COMPLETIONS, json=ask(seed, stream=True, max_tokens=tokens)) as answer:
        assert answer.status_code == 200
        pieces = [piece async for piece in answer.aiter_bytes()]
    assert b"".join(pieces).rstrip().endswith(b"[DONE]")
    return str(answer.headers["x-kvgate-worker"])


async def watched(r: Rig, end: asyncio.Event) -> list[tuple[tuple[str, str], float]]:
    """Gauges that were ever negative, and drift that was ever there."""
    wrong = []
    while not end.is_set():
        read = await gauges(r)
        wrong += [(key, value) for key, value in read.items() if value < 0 or (value and "drift" in key[0])]
        await asyncio.sleep(0.05)
    return wrong


async def test_a_worker_that_leaves_with_open_streams_and_returns_has_its_load_still() -> None:
    """Fifty streams are on it; new cold requests go elsewhere as long as they run."""
    async with rig(2, engine=fast(speed=1.0, tokens_per_event=8), settings={"workers": []}, wait=False) as r:
        one, two = specs(r)
        name(r, one)
        await until(lambda: r.gateway.readiness().ready)
        running = [asyncio.create_task(stream(r, seed, 320)) for seed in range(50)]
        await until(lambda: r.gateway.upstream.open_streams(one) == 50)
        end = asyncio.Event()
        watch = asyncio.create_task(watched(r, end))
        name(r, one, two)
        await until(lambda: W2 in r.gateway.fleet.workers)
        name(r, two)
        await until(lambda: W1 not in r.gateway.fleet.workers)
        await asyncio.sleep(0.2)
        name(r, one, two)
        await until(lambda: W1 in r.gateway.fleet.workers)
        back = r.gateway.fleet.workers[W1]
        assert back.state is WorkerState.READY
        assert back.inflight_requests == r.gateway.upstream.open_streams(one) == 50
        served = [await stream(r, seed, 1) for seed in range(1000, 1010)]
        assert served == ["w2"] * 10
        assert set(await asyncio.gather(*running)) == {"w1"}
        await until(r.quiet)
        end.set()
        assert await watch == []


async def test_probes_polls_and_trials_are_no_load() -> None:
    """In flight is what clients sent, whatever the gateway asks for itself meanwhile."""
    settings = {"health": {"failures": 1, "open_s": 0.2, "probe_s": 0.1}, "load": {"poll_s": 0.05}}
    async with rig(2, engine=fast(speed=0.5), settings=settings) as r:
        fleet, members = r.gateway.fleet, r.gateway.membership.members
        running = [asyncio.create_task(stream(r, seed, 60)) for seed in range(12)]
        await until(lambda: r.gateway.router.open_leases == 12)
        before = {key: worker.inflight_requests for key, worker in fleet.workers.items()}
        picked = {key: worker.picked for key, worker in fleet.workers.items()}
        polls = [member.poller.counts for member in members.values() if member.poller is not None]
        done = [count.ok for count in polls]

        async def looked_at() -> None:
            for key in fleet.workers:
                r.gateway.membership.look(key)
            await asyncio.sleep(0.02)

        async with asyncio.timeout(20):
            while any(count.ok < since + 5 for count, since in zip(polls, done, strict=True)):
                await looked_at()
                if not all(task.done() for task in running):
                    assert sum(worker.inflight_requests for worker in fleet.workers.values()) <= 12
        assert {key: worker.picked for key, worker in fleet.workers.items()} == picked
        assert all(fleet.workers[key].inflight_requests <= count for key, count in before.items())
        await asyncio.gather(*running)
        await until(r.quiet)

        r.engines[0].fault(Fault(FaultKind.STATUS, code=500))
        w1 = fleet.workers[W1]
        for seed in range(100, 160):
            await r.http.post(COMPLETIONS, json=ask(seed))
            if w1.state is WorkerState.EJECTED:
                break
        assert w1.state is WorkerState.EJECTED
        received, sent = r.engines[0].received, w1.picked
        await until(lambda: r.engines[0].received >= received + 2)  # trials, and they fail
        assert (w1.inflight_requests, w1.inflight_tokens, w1.picked) == (0, 0, sent)
        r.engines[0].fault(Fault(FaultKind.HEAL))
        await until(lambda: w1.state is not WorkerState.EJECTED)
        assert w1.picked == sent
        assert all(value == 0 for value in (await gauges(r)).values())


async def test_a_worker_removed_and_added_a_hundred_times_under_load() -> None:
    async with rig(2, engine=fast(speed=20.0)) as r:
        gateway = r.gateway
        one, two = specs(r)
        tasks = set(gateway.supervisor.names)
        end = asyncio.Event()
        statuses: list[int] = []

        async def client(seed: int) -> None:
            while not end.is_set():
                await asyncio.sleep(0.01)
                seed += 4
                if seed % 3:
                    answer = await r.http.post(COMPLETIONS, json=ask(seed % 200, max_tokens=4))
                    statuses.append(answer.status_code)
                else:
                    await stream(r, seed % 200, 8)
                    statuses.append(200)

        clients = [asyncio.create_task(client(seed)) for seed in range(4)]
        for _ in range(100):
            slot = gateway.fleet.workers[W1].slot
            await gateway.enrolment.configured([two])
            assert W1 not in gateway.fleet.workers
            assert not any(gateway.index.stats().blocks.get(slot, {}).values())
            assert all(worker.id != W1 for pool in gateway.fleet.pools.values() for worker in pool.workers)
            served = r.engines[0].received
            answer = await r.http.post(COMPLETIONS, json=ask(7, max_tokens=1))
            assert answer.headers["x-kvgate-worker"] == "w2"
            assert r.engines[0].received == served
            await gateway.enrolment.configured([one, two])
            await until(lambda: W1 in gateway.fleet.workers)
        end.set()
        await asyncio.gather(*clients)
        await until(r.quiet)
        assert set(statuses) == {200}
        assert len(statuses) > 100
        await until(lambda: all(member.caught_up for member in gateway.membership.members.values()))
        assert all(value == 0 for value in (await gauges(r)).values())
        assert set(await _workers_of(r.http, r.ports.admin_url)) <= {"w1", "w2", "gone"}
        await until(lambda: set(gateway.supervisor.names) == tasks)
        slots = {worker.slot for worker in gateway.fleet.workers.values()}
        assert max(slots) < 8  # a slot is used again
        assert set(gateway.index.stats().blocks) <= slots


async def _workers_of(http: httpx.AsyncClient, admin: str) -> set[str]:
    """Every worker that any series of the scrape names."""
    text = (await http.get(admin + "/metrics")).text
    families = text_string_to_metric_families(text)
    return {sample.labels["worker"] for family in families for sample in family.samples if "worker" in sample.labels}


async def test_the_tokenizer_of_a_model_goes_with_its_last_worker() -> None:
    async with rig(2) as r:
        tokenizers, workers = r.gateway.tokenizers, f"{r.ports.admin_url}/admin/workers"
        assert tokenizers.find("demo") is not None
        assert (await r.http.delete(f"{workers}/w1")).status_code == 204
        assert tokenizers.find("demo") is not None
        assert (await r.http.delete(f"{workers}/w2")).status_code == 204
        assert tokenizers.find("demo") is None
        answer = await r.http.post(workers, json={"url": r.engine("w1").url, "name": "again"})
        assert answer.status_code == 201, answer.text
        assert tokenizers.find("demo") is not None
