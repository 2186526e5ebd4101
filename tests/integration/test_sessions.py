"""Sessions through a whole gateway: moved with a reason, told to engines that keep them, closed there when over."""

from __future__ import annotations

import json
from typing import Any

from gateway.records import WorkerId, WorkerSpec
from gateway.sim.releases import Dialect
from gateway.upstream.control import open_control_client
from gateway.upstream.engine_sessions import EngineSessions, engine_session
from tests.integration.rig import Rig, fast, rig, until
from tests.integration.test_gateway import chat

KEEPING = fast(dialect=Dialect.SGLANG, session_cache=True, keep_bodies=8)


async def ask(r: Rig, session: str, **more: Any) -> str:
    answer = await r.http.post("/v1/chat/completions", json=chat("hi") | more, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-kvgate-worker"])


def told(r: Rig) -> list[object]:
    """Sessions named in the bodies that engines got."""
    return [json.loads(body).get("session_id") for engine in r.engines for body in engine.bodies]


async def test_an_engine_that_keeps_sessions_is_told_and_hears_of_a_move() -> None:
    async with rig(2, engine=KEEPING) as r:
        home = await ask(r, "one")
        assert told(r) == [engine_session(None, "one")]
        await ask(r, "one", session_id="mine")  # the client's own word stays
        assert sorted(map(str, told(r))) == sorted(["mine", engine_session(None, "one")])
        r.gateway.fleet.drain(WorkerId(home), r.gateway.clock(), on=True)
        assert await ask(r, "one") != home
        left = r.engine(home)
        await until(lambda: list(left.closed_sessions) == [engine_session(None, "one")])
        page = (await r.http.get(f"{r.ports.admin_url}/metrics")).text
        assert 'kvgate_affinity_total{result="moved_drained"} 1' in page


async def test_a_session_without_requests_is_closed_after_its_life_time() -> None:
    settings = {"routing": {"affinity": {"ttl_s": 0.5}}}
    async with rig(1, engine=KEEPING, settings=settings) as r:
        await ask(r, "one")
        sessions = r.gateway.edge.engine_sessions
        assert sessions is not None
        await until(lambda: sessions.results["closed"] == 1)
        assert list(r.engines[0].closed_sessions) == [engine_session(None, "one")]
        assert len(sessions) == 0


async def test_other_engines_get_the_body_as_it_was() -> None:
    async with rig(1, engine=fast(dialect=Dialect.SGLANG)) as r:
        await ask(r, "one")
        assert told(r) == [None]


async def test_sessions_of_engines_are_bounded() -> None:
    worker = WorkerSpec(WorkerId("w"), "http://127.0.0.1:9")  # nobody listens
    async with open_control_client() as control:
        sessions = EngineSessions(control, lambda: 0.0, ttl_s=lambda: 60.0, max_sessions=3)
        for number in range(10):
            sessions.used(f"s{number}", worker, float(number))
        assert len(sessions) == 3
        assert sessions.results["dropped"] == 4  # seven had to go, three may wait
        sessions.expire(100.0)
        assert len(sessions) == 0
