"""`kvgate doctor` against real engines, set up well and badly. Run with `-m real_engine`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import zmq.asyncio

from gateway.doctor import Checked, Plan, Tools, check_fleet, new_prompt
from gateway.prefix import PromptHasher
from gateway.records import WorkerFacts, WorkerId, WorkerSpec
from gateway.upstream.control import open_control_client
from tests.real_engine.engines import Engine, EngineSetup, program, running
from tests.real_engine.tiny_model import write_model

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program()
    return write_model(tmp_path_factory.mktemp("real") / "model")


@pytest.fixture(scope="module")
def good(model: Path) -> Iterator[Engine]:
    with running(model, EngineSetup(), log=model.parent / "good.log") as engine:
        yield engine


async def checked(model: Path, *engines: Engine) -> list[Checked]:
    hasher = PromptHasher.load(model)

    async def hasher_of(spec: WorkerSpec, facts: WorkerFacts) -> PromptHasher:
        return hasher

    context = zmq.asyncio.Context()
    plan = Plan(prompt=new_prompt(Random()), salt="salt-of-the-doctor", models_known=True, deadline_s=120)
    specs = [WorkerSpec(name=WorkerId(f"w{at}"), url=engine.url) for at, engine in enumerate(engines, 1)]
    try:
        async with open_control_client(timeout_s=60) as client:
            tools = Tools(client, context, hasher_of, wall=time.time)
            return await check_fleet(specs, tools, plan, on_step=lambda *_: None)
    finally:
        context.destroy(linger=0)


async def test_an_engine_that_is_set_up_well(good: Engine, model: Path) -> None:
    (result,) = await checked(model, good)
    assert [found.code for found in result.findings] == []


async def test_an_engine_that_is_set_up_badly(good: Engine, model: Path) -> None:
    """Its event socket connects, hits are not reported, its hashes are seeded otherwise."""
    setup = EngineSetup(
        prompt_tokens_details=False, events={"endpoint": "tcp://127.0.0.1:{events}", "replay_endpoint": None}
    )
    with running(model, setup, log=model.parent / "bad.log") as bad:
        _, result = await checked(model, good, bad)
    assert [found.code for found in result.findings] == ["events_connect", "hits_not_reported"]


async def test_an_engine_with_another_seed(good: Engine, model: Path) -> None:
    with running(model, EngineSetup(seed="12345"), log=model.parent / "seeded.log") as other:
        results = await checked(model, good, other)
    assert [found.code for found in results[0].findings] == []
    assert [found.code for found in results[1].findings] == ["hashes_unseeded"]
