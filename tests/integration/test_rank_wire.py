"""Ranks of one server on the wire: the header that names the rank, and what a failure of the server means for them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from gateway.records import EngineKind, Rank, WorkerFacts, WorkerId, WorkerSpec
from tests.integration.relay_rig import CHAT, PATIENCE_S, Call, RelayRig, answers, ask, post, relay, until

OK = b'{"usage":{"prompt_tokens":3,"completion_tokens":1}}'
FACTS = WorkerFacts(EngineKind.VLLM, "0.32.0", ("m",), block_size=16)


def as_ranks(r: RelayRig, number: int, *asked: int) -> None:
    """The n-th worker becomes a server whose ranks are workers."""
    spec = r.fleet.workers[WorkerId(f"w{number}")].spec
    r.fleet.remove(spec.name, 0.0)
    for position in asked:
        rank = Rank(spec.name, position, position)
        r.fleet.add(replace(spec, name=WorkerId(f"{spec.name}@{position}"), rank=rank), FACTS, 0.0)


def rank_of(call: Call) -> str | None:
    return call.headers.get("x-data-parallel-rank")


async def test_each_rank_is_named_in_its_requests() -> None:
    async with relay(answers(OK)) as r:
        as_ranks(r, 1, 0, 1, 2)
        chosen = [(await r.ask(post(ask()))).headers["x-kvgate-worker"] for _ in range(6)]
        assert chosen == ["w1@0", "w1@1", "w1@2"] * 2
        calls = r.workers[0].calls
        assert [rank_of(call) for call in calls] == ["0", "1", "2"] * 2
        assert all(call.head.lower().count(b"parallel") == 1 for call in calls)
        await until(r.quiet)


@pytest.mark.parametrize("ranks", [True, False])
async def test_a_client_cannot_choose_the_rank(ranks: bool) -> None:
    async with relay(answers(OK)) as r:
        if ranks:
            as_ranks(r, 1, 0, 1)
        await r.ask(post(ask(), headers=("X-Data-Parallel-Rank: 7", "x-override-routed-dp-rank: 7")))
        call = r.workers[0].calls[0]
        assert rank_of(call) == ("0" if ranks else None)
        assert "x-override-routed-dp-rank" not in call.headers


async def test_the_native_path_of_sglang_has_the_rank_in_its_body() -> None:
    """Whatever the client asked for: of two equal keys the engine takes the last."""
    async with relay(answers(b'{"meta_info":{"prompt_tokens":3,"completion_tokens":1,"cached_tokens":0}}')) as r:
        as_ranks(r, 1, 0, 1)
        sent = b'{"model":"m", "input_ids":[1,2,3],"routed_dp_rank":5, "big":123456789012345678901234567890} '
        for _ in range(2):
            assert (await r.ask(post(sent, path="/generate"))).status == 200
        bodies = [call.body for call in r.workers[0].calls]
        assert [json.loads(body)["routed_dp_rank"] for body in bodies] == [0, 1]
        assert bodies[0] == sent[:-2] + b',"routed_dp_rank":0} '
        assert (await r.ask(post(ask(), path=CHAT))).status == 200
        assert r.workers[0].calls[2].body == ask()


@pytest.mark.parametrize("failure", ["gone", "503"])
async def test_what_fails_one_rank_is_not_tried_on_another_of_its_server(failure: str) -> None:
    bad = None if failure == "gone" else answers(b"{}", status="503 Service Unavailable")
    async with relay(bad, answers(OK)) as r:
        as_ranks(r, 1, 0, 1, 2)
        workers = sorted(r.fleet.workers)
        assert workers == ["w1@0", "w1@1", "w1@2", "w2"]
        r.fleet.workers[WorkerId("w2")].picked = 1  # the ranks come first
        answer = await r.ask(post(ask()))
        assert (answer.status, answer.headers["x-kvgate-worker"], answer.headers["x-kvgate-retries"]) == (
            200,
            "w2",
            "1",
        )
        assert [outcome.worker for outcome in r.retried] == ["w1@0"]
        await until(r.quiet)


async def test_a_worker_of_the_same_name_elsewhere_has_its_own_streams() -> None:
    """The old one's streams run on; counted with the newcomer's they would make its leases look lost."""

    def begun(call: Call) -> None:
        call.begin_stream(b"data: {}\n\n")

    async with relay(begun, begun) as r:
        old = r.fleet.workers[WorkerId("w1")]
        client = await r.client()
        client.send(post(ask(stream=True)))
        await client.head()
        await r.workers[0].call()
        r.fleet.remove(WorkerId("w2"), 0.0)
        moved = WorkerSpec(WorkerId("w1"), f"http://127.0.0.1:{r.workers[1].port}")
        r.fleet.remove(old.id, 0.0)
        r.upstream.forget(old.id)
        new = r.fleet.add(moved, FACTS, 0.0)
        assert (new.inflight_requests, r.upstream.open_streams(new.spec)) == (0, 0)
        assert (old.inflight_requests, r.upstream.open_streams(old.spec)) == (1, 1)
        second = await r.client()
        second.send(post(ask(stream=True)))
        await second.head()
        assert (new.inflight_requests, r.upstream.open_streams(new.spec)) == (1, 1)
        r.workers[0].calls[0].end_stream()
        r.workers[1].calls[0].end_stream()
        await until(r.quiet)
        assert (old.inflight_requests, r.upstream.open_streams(old.spec)) == (0, 0)


@pytest.mark.parametrize("moved", [False, True], ids=["gone", "elsewhere"])
async def test_the_end_of_all_connections_reaches_those_of_workers_that_left(moved: bool) -> None:
    def begun(call: Call) -> None:
        call.begin_stream(b"data: {}\n\n")

    async with relay(begun, begun) as r:
        client = await r.client()
        client.send(post(ask(stream=True)))
        await client.head()
        call = await r.workers[0].call()
        r.upstream.forget(WorkerId("w1"))
        if moved:
            r.upstream.open(WorkerSpec(WorkerId("w1"), f"http://127.0.0.1:{r.workers[1].port}")).abort()
        assert r.upstream.open_streams() == 1
        r.upstream.close()
        async with asyncio.timeout(PATIENCE_S):
            await call.gone.wait()
        await until(r.quiet)
