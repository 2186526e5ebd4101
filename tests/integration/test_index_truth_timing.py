"""Events that come late or never. The flood at the start is a file of its own."""

from __future__ import annotations

import asyncio

from gateway.sim.faults import Fault, FaultKind
from gateway.sim.releases import Dialect
from tests.integration.rig import Rig, fast, rig, until
from tests.integration.truth import (
    BLOCK,
    COMPLETIONS,
    DIALECTS,
    ask,
    body,
    in_step,
    predicted,
    prompt,
    resident,
)

P = prompt(1, 40)
WHOLE = 40 * BLOCK

LONG_TTL = {"routing": {"speculative_ttl_s": 600}}
"""Promises end when the test says so: no machine is too slow for that."""


def end_promises(r: Rig) -> None:
    """As if their life time had passed."""
    r.gateway.router.expire(r.gateway.clock() + 601)


# ---------------------------------------------------------------- late and never


@DIALECTS
async def test_events_later_than_the_answer_confirm_the_promise(dialect: Dialect) -> None:
    async with rig(3, engine=fast(dialect=dialect), settings=LONG_TTL) as r:
        for engine in r.engines:
            engine.fault(Fault(FaultKind.HOLD))
        home = (await ask(r, P)).worker
        others = {f"w{n}": 0 for n in (1, 2, 3)}
        for _ in range(3):
            assert await predicted(r, P) == others | {home: WHOLE}
            assert await ask(r, P) == (home, WHOLE, WHOLE)
        r.engine(home).fault(Fault(FaultKind.RELEASE))
        await in_step(r, home)
        assert await predicted(r, P) == others | {home: WHOLE}
        end_promises(r)
        assert r.gateway.index.stats().speculative == 0
        assert await ask(r, P) == (home, WHOLE, WHOLE)


@DIALECTS
async def test_a_promise_that_is_never_confirmed_ends_once(dialect: Dialect) -> None:
    async with rig(2, engine=fast(dialect=dialect), settings=LONG_TTL) as r:
        for engine in r.engines:
            engine.fault(Fault(FaultKind.HOLD))
        home = (await ask(r, P)).worker
        assert (await predicted(r, P))[home] == WHOLE
        end_promises(r)
        for _ in range(5):
            assert set((await predicted(r, P)).values()) == {0}
        assert r.gateway.index.stats().speculative == 0
        assert resident(r, home) == 0


@DIALECTS
async def test_an_answer_aborted_before_its_first_byte_leaves_no_promise(dialect: Dialect) -> None:
    async with rig(2, engine=fast(dialect=dialect, speed=0.01), settings=LONG_TTL) as r:
        sending = asyncio.create_task(r.http.post(COMPLETIONS, json=body(P, stream=True)))
        await until(lambda: r.gateway.index.stats().speculative == 40)
        sending.cancel()
        await asyncio.wait([sending])
        await until(r.quiet)
        assert r.gateway.index.stats().speculative == 0
        assert set((await predicted(r, P)).values()) == {0}


@DIALECTS
async def test_an_answer_aborted_after_its_first_byte_is_confirmed_by_events(dialect: Dialect) -> None:
    async with rig(2, engine=fast(dialect=dialect, speed=10), settings=LONG_TTL) as r:
        async with r.http.stream("POST", COMPLETIONS, json=body(P, stream=True, max_tokens=1000)) as answer:
            home = answer.headers["x-kvgate-worker"]
            async for _ in answer.aiter_bytes():
                break
        await until(r.quiet)
        await until(lambda: resident(r, home) >= 40)
        end_promises(r)
        assert await ask(r, P) == (home, WHOLE, WHOLE)


# ---------------------------------------------------------------- a start that does not catch up


async def test_ready_after_the_configured_limit_though_not_caught_up() -> None:
    """A replay endpoint that takes requests and never answers."""

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        await writer.wait_closed()

    silent = await asyncio.start_server(swallow, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with rig(1) as other:
        worker = {
            "url": other.engines[0].url,
            "name": "w1",
            "kv_events": other.engines[0].events_endpoint,
            "kv_replay": f"tcp://127.0.0.1:{port}",
        }
        settings = {"workers": [worker], "server": {"ready_timeout_s": 0.5}}
        async with rig(0, settings=settings, wait=False) as r:
            await until(lambda: "w1" in r.gateway.fleet.workers)
            began = r.gateway.clock()
            await until(lambda: r.gateway.readiness().ready)
            assert not r.gateway.membership.members["w1"].caught_up  # type: ignore[index]
            assert r.gateway.clock() - began < 5
    silent.close()
    await silent.wait_closed()
