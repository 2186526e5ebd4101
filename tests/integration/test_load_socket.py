"""Load that SGLang's workers publish, behind a whole gateway: how it comes, and what happens when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio

from gateway.pool import Worker
from gateway.records import LoadEndpoint, LoadSample, LoadSource, WorkerId
from gateway.sim.faults import Fault, FaultKind
from gateway.sim.load_publisher import HEARTBEAT_S, LoadPublisher, LoadStat
from gateway.sim.releases import Dialect
from gateway.sim.server import EngineSettings
from gateway.upstream.load_socket import RESTART_S, LoadSocket, parse_load
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until, write_yaml

W1, R0, R1 = WorkerId("w1"), WorkerId("w1@0"), WorkerId("w1@1")
NO_POLLS = {"load": {"poll_s": 600}}
"""The first poll comes up to a minute after the start."""
SLOW = 0.01


def publishing(**more: Any) -> EngineSettings:
    return fast(**{"dialect": Dialect.SGLANG, "data_parallel_size": 2, "load_publish_endpoint": "auto"} | more)


def worker(r: Rig, name: WorkerId) -> Worker:
    return r.gateway.fleet.workers[name]


def said(r: Rig, name: WorkerId) -> tuple[LoadSource | None, float | None]:
    """Where the load of a worker came from, and how many requests it runs."""
    load = worker(r, name).load
    return (load.source, load.running) if load is not None else (None, None)


@contextlib.asynccontextmanager
async def asked(r: Rig, url: str, rank: int | None, *, seed: int) -> AsyncIterator[None]:
    """A request that does not end by itself, at a rank of the engine or through the gateway."""
    chance = Random(seed)
    body = {"model": "demo", "prompt": [chance.randrange(300, 4000) for _ in range(33)], "max_tokens": 4000}
    headers = {} if rank is None else {"x-data-parallel-rank": str(rank)}
    async with httpx.AsyncClient(timeout=60) as http:
        asking = asyncio.create_task(http.post(url + "/v1/completions", json=body, headers=headers))
        try:
            yield
        finally:
            asking.cancel()
            await asyncio.wait([asking])


async def done(bind: Callable[[], object]) -> None:
    """Bind ports that were free for a while: any connection of this machine may have taken one as its own."""

    def bound() -> bool:
        try:
            bind()
        except zmq.ZMQError:
            return False
        return True

    await until(bound, within_s=3 * PATIENCE_S)


async def test_each_ranks_load_comes_over_its_socket_long_before_a_poll() -> None:
    async with rig(1, engine=publishing(speed=SLOW), settings=NO_POLLS) as r:
        await until(lambda: [said(r, name) for name in (R0, R1)] == [(LoadSource.SOCKET, 0)] * 2)
        async with asked(r, r.engines[0].url, 1, seed=1):
            await until(lambda: said(r, R1) == (LoadSource.SOCKET, 1))
            assert said(r, R0) == (LoadSource.SOCKET, 0)
            await until(lambda: worker(r, R1).foreign_requests == 1)
            load = worker(r, R1).load
            assert load is not None
            assert load.kv_usage
        await until(lambda: said(r, R1) == (LoadSource.SOCKET, 0) and worker(r, R1).foreign_requests == 0)
        assert (worker(r, R0).foreign_requests, r.engines[0].state()["running"]) == (0, 0)


async def test_our_own_requests_are_not_taken_for_anothers() -> None:
    async with rig(1, engine=publishing(data_parallel_size=1, speed=SLOW), settings=NO_POLLS) as r:
        await until(lambda: said(r, W1) == (LoadSource.SOCKET, 0))
        async with asked(r, r.ports.url, None, seed=2), asked(r, r.ports.url, None, seed=3):
            await until(lambda: r.engines[0].state()["running"] == 2 or r.engines[0].state()["waiting"] == 1)
            socket = r.gateway.membership.members[W1].load_socket
            assert socket is not None
            before = socket.ranks[0].messages
            await until(lambda: socket.ranks[0].messages >= before + 3)
            load = worker(r, W1).load
            assert load is not None
            assert (load.source, load.running + load.waiting) == (LoadSource.SOCKET, 2)
            assert (worker(r, W1).inflight_requests, worker(r, W1).foreign_requests) == (2, 0)
        await until(r.quiet)


async def test_where_it_comes_from_is_shown() -> None:
    async with rig(1, engine=publishing(), settings=NO_POLLS) as r:
        await until(lambda: said(r, R0)[0] is said(r, R1)[0] is LoadSource.SOCKET)
        for shown in (await r.admin("/admin/workers"))["workers"]:
            assert shown["load"]["source"] == "socket"
            socket = shown["load_socket"]
            assert (socket["fresh"], socket["errors"], socket["restarts"]) == (True, 0, 0)
            assert socket["messages"] >= 1
            assert socket["age_s"] >= 0
        first = (await r.admin("/admin/workers/w1@0"))["load_socket"]["endpoints"]
        assert first == [r.engines[0].load_endpoint]


async def test_ranks_that_are_one_worker_are_told_together() -> None:
    engine = publishing(speed=SLOW)
    async with rig(1, engine=engine, labels=[{"ranks": "one"}], settings=NO_POLLS) as r:
        await until(lambda: said(r, W1) == (LoadSource.SOCKET, 0))
        url = r.engines[0].url
        async with asked(r, url, 0, seed=4), asked(r, url, 1, seed=5):
            await until(lambda: said(r, W1) == (LoadSource.SOCKET, 2))
        shown = await r.admin("/admin/workers/w1")
        assert (shown["load_socket"]["fresh"], len(shown["load_socket"]["endpoints"])) == (True, 2)


async def test_polls_take_over_when_the_socket_is_gone_and_leave_again() -> None:
    async with rig(1, engine=publishing()) as r:
        await until(lambda: said(r, R0)[0] is said(r, R1)[0] is LoadSource.SOCKET)
        engine = r.engines[0]
        engine.fault(Fault(FaultKind.OFFLINE))
        await until(lambda: said(r, R0)[0] is said(r, R1)[0] is LoadSource.POLL)
        shown = await r.admin("/admin/workers/w1@1")
        assert (shown["load_socket"]["fresh"], shown["load"]["source"]) == (False, "poll")
        poller = r.gateway.membership.members[W1].poller
        assert poller is not None
        polls = poller.counts.ok
        await until(lambda: poller.counts.ok >= polls + 3)
        answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": 2})
        assert answer.status_code == 200
        await done(lambda: engine.fault(Fault(FaultKind.ONLINE)))
        await until(lambda: said(r, R0)[0] is said(r, R1)[0] is LoadSource.SOCKET)


async def test_a_silent_socket_is_a_finding_until_it_is_heard() -> None:
    settings = {"health": {"probe_s": 0.5}}
    async with rig(1, engine=publishing(data_parallel_size=1), settings=settings) as r:
        await until(lambda: said(r, W1)[0] is LoadSource.SOCKET)

        def found() -> list[str]:
            return [finding.message for finding in worker(r, W1).findings if finding.code == "load_unheard"]

        engine = r.engines[0]
        assert not found()
        engine.fault(Fault(FaultKind.OFFLINE))
        await until(lambda: bool(found()))
        assert str(engine.load_endpoint) in found()[0]
        assert found()[0] in [finding["message"] for finding in (await r.admin("/admin/workers/w1"))["findings"]]
        await done(lambda: engine.fault(Fault(FaultKind.ONLINE)))
        await until(lambda: not found())


async def test_a_socket_that_says_something_else_costs_nothing() -> None:
    async with rig(1, engine=publishing(data_parallel_size=1)) as r:
        await until(lambda: said(r, W1)[0] is LoadSource.SOCKET)
        engine, socket = r.engines[0], r.gateway.membership.members[W1].load_socket
        assert socket is not None
        engine.fault(Fault(FaultKind.OFFLINE))
        with zmq.Context() as context, context.socket(zmq.PUB) as other:
            other.setsockopt(zmq.LINGER, 0)
            await done(lambda: other.bind(engine.load_endpoint or ""))
            wrong: list[list[bytes]] = [
                [b"load"],
                [b"load", bytes(8), b"\xff\x00\xc1"],
                [b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", -1, 0, 0, 0, 0])],
                [b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", 99, 99, 0, 0, 1])],
                [b"load", bytes(8), msgspec.msgpack.encode({"type": "LoadStat"}), b"more"],
            ]

            def unreadable() -> bool:
                for frames in wrong:
                    other.send_multipart(frames)
                return socket.ranks[0].errors > 20 and said(r, W1)[0] is LoadSource.POLL

            await until(unreadable)
            assert said(r, W1) == (LoadSource.POLL, 0)
            answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": 2})
            assert answer.status_code == 200
        assert r.gateway.supervisor.restarts == 0
        await done(lambda: engine.fault(Fault(FaultKind.ONLINE)))
        await until(lambda: said(r, W1)[0] is LoadSource.SOCKET)


async def test_a_connection_that_zmq_gave_up_is_made_anew() -> None:
    """As it does over a message that is larger than any load."""
    loads: list[Mapping[int | None, LoadSample]] = []
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        heard = LoadSocket(
            [LoadEndpoint(3, f"tcp://127.0.0.1:{port}", "load")],
            whole=False,
            context=context,
            clock=time.monotonic,
            on_load=loads.append,
            on_restart=lambda: None,
            reopen_s=0.5,
        )

        def told(running: int) -> bool:
            engine.send_multipart([b"load", bytes(8), msgspec.msgpack.encode(["LoadStat", running, 0, 1, 2, 3])])
            heard.drain()
            return bool(loads) and loads[-1][3].running == running

        try:
            await until(lambda: told(1))
            engine.send_multipart([b"load", bytes(8), b"x" * 100_000])
            await until(lambda: told(2))
        finally:
            heard.close()


async def test_the_load_of_some_ranks_is_not_that_of_their_server() -> None:
    loads: list[Mapping[int | None, LoadSample]] = []
    with zmq.Context() as context, context.socket(zmq.PUB) as first, context.socket(zmq.PUB) as second:
        ports = [engine.bind_to_random_port("tcp://127.0.0.1") for engine in (first, second)]
        heard = LoadSocket(
            [LoadEndpoint(rank, f"tcp://127.0.0.1:{port}", "load") for rank, port in enumerate(ports)],
            whole=True,
            context=context,
            clock=time.monotonic,
            on_load=loads.append,
            on_restart=lambda: None,
        )

        def told(*engines: zmq.Socket[bytes]) -> None:
            for rank, engine in enumerate(engines):
                payload = msgspec.msgpack.encode(["LoadStat", 2 + rank, 1, 4 + rank, 10, rank])
                engine.send_multipart([b"load", bytes(8), payload])
            heard.drain()

        def one() -> bool:
            told(first)
            return heard.ranks[0].messages >= 3

        def both() -> bool:
            told(first, second)
            return bool(loads)

        try:
            await until(one)
            assert (loads, heard.fresh(0), heard.fresh(None)) == ([], True, False)
            await until(both)
            assert loads[0] == {None: LoadSample(5, 2, 0.5, source=LoadSource.SOCKET)}
            assert heard.fresh(None)
        finally:
            heard.close()
            for engine in (first, second):
                engine.close(linger=0)


async def test_a_sequence_that_goes_back_again_and_again_is_told_seldom() -> None:
    """Each time it is told the worker is probed."""
    now, restarts = [0.0], list[float]()
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        port = engine.bind_to_random_port("tcp://127.0.0.1")
        heard = LoadSocket(
            [LoadEndpoint(0, f"tcp://127.0.0.1:{port}", "load")],
            whole=False,
            context=context,
            clock=lambda: now[0],
            on_load=lambda loads: None,
            on_restart=lambda: restarts.append(now[0]),
        )
        sequence = 1000

        def seen(number: int) -> bool:
            nonlocal sequence
            sequence -= 1
            payload = msgspec.msgpack.encode(["LoadStat", 1, 0, 1, 2, 0])
            engine.send_multipart([b"load", sequence.to_bytes(8, "big"), payload])
            heard.drain()
            return heard.ranks[0].restarts >= number

        try:
            await until(lambda: seen(5))
            assert restarts == [0.0]
            now[0] = RESTART_S
            await until(lambda: seen(10))
            assert restarts == [0.0, RESTART_S]
        finally:
            heard.close()


async def test_a_simulated_engine_publishes_changes_at_once_and_rest_once_a_second() -> None:
    running = 0
    with zmq.Context() as context, zmq.asyncio.Socket(context, zmq.SUB) as sub:
        publisher = LoadPublisher(lambda: LoadStat(running, 0, 0, 1, 0), (0, 5, 23), host="127.0.0.1", port=0)
        sub.subscribe(b"load")
        sub.connect(f"tcp://127.0.0.1:{publisher.port}")

        async def heard(running: int) -> int:
            while True:
                sequence, load = parse_load(await sub.recv_multipart(), 0)
                if load.running == running:
                    return sequence

        try:
            async with asyncio.timeout(60):
                first = await heard(0)
                assert await heard(0) == first + 1, "though nothing has changed"
            async with asyncio.timeout(35 * HEARTBEAT_S):
                for running in range(1, 41):
                    publisher.changed()
                    await heard(running)
        finally:
            publisher.close()


async def test_a_restarted_engine_is_noticed_by_its_sequence() -> None:
    async with rig(1, engine=publishing(data_parallel_size=1), settings=NO_POLLS) as r:
        socket = r.gateway.membership.members[W1].load_socket
        assert socket is not None
        rank, busy = socket.ranks[0], {"model": "demo", "prompt": "hello", "max_tokens": 2}

        async def messages(number: int) -> None:
            wanted = rank.messages + number
            while rank.messages < wanted:
                await r.http.post(r.engines[0].url + "/v1/completions", json=busy)

        async with asyncio.timeout(60):
            await messages(20)
            r.engines[0].fault(Fault(FaultKind.RESTART))
            await until(lambda: rank.restarts == 1)
            await messages(3)
        assert rank.restarts == 1
        assert said(r, W1)[0] is LoadSource.SOCKET


@pytest.mark.parametrize(
    "more", [{"version": "0.5.18", "load_publish_endpoint": None}, {"load_publish_endpoint": "off"}]
)
async def test_a_worker_without_a_load_socket_is_polled(more: dict[str, Any]) -> None:
    async with rig(1, engine=publishing(data_parallel_size=1, **more)) as r:
        await until(lambda: said(r, W1)[0] is LoadSource.POLL)
        assert (await r.admin("/admin/workers/w1"))["load_socket"] is None


async def test_it_is_turned_off_and_on_while_the_gateway_runs(tmp_path: Path) -> None:
    file = tmp_path / "kvgate.yaml"
    async with rig(1, engine=publishing(), settings={"load": {"poll_s": 0.2}}, file=file) as r:
        await until(lambda: said(r, R0)[0] is said(r, R1)[0] is LoadSource.SOCKET)
        tree = msgspec.yaml.decode(file.read_bytes())
        for on, source in ((False, LoadSource.POLL), (True, LoadSource.SOCKET)):
            write_yaml(file, tree | {"load": {"poll_s": 0.2, "sockets": on}})
            await r.gateway.reload()
            await until(lambda wanted=source: said(r, R0)[0] is said(r, R1)[0] is wanted)  # type: ignore[misc]
            assert (r.gateway.membership.members[W1].load_socket is not None) is on


async def test_who_leaves_is_listened_to_no_more() -> None:
    async with rig(2, engine=publishing(data_parallel_size=1), settings=NO_POLLS) as r:
        await until(lambda: all(said(r, WorkerId(name))[0] is LoadSource.SOCKET for name in ("w1", "w2")))
        first, second = (r.gateway.membership.members[WorkerId(name)].load_socket for name in ("w1", "w2"))
        assert first is not None
        assert second is not None
        assert (await r.http.delete(r.ports.admin_url + "/admin/workers/w1")).status_code == 204
        heard, later = first.ranks[0].messages, second.ranks[0].messages + 3
        await until(lambda: second.ranks[0].messages >= later)
        assert first.ranks[0].messages == heard
        assert [name for name in r.gateway.supervisor.names if name.startswith("load")] == ["load sockets", "load w2"]
        answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": 2})
        assert answer.headers["x-kvgate-worker"] == "w2"
