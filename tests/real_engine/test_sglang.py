"""The identity of blocks against a real SGLang: predicted equals delivered. Run with `-m real_engine`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.rig import until
from tests.real_engine.engines import Engine, EngineSetup, running_sglang, sglang
from tests.real_engine.fleet import fleet, prompt
from tests.real_engine.tiny_model import write_model

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(3600)]

SIZE = 16


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sglang()
    return write_model(tmp_path_factory.mktemp("sglang") / "model").parent


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Engine]:
    with running_sglang(directory / "model", EngineSetup(block_size=SIZE), log=directory / "engine.log") as server:
        yield server


@pytest.mark.parametrize("tokens", [17, 33, 64, 65, 512, 513, 1000])
async def test_tokens(tokens: int, engine: Engine, directory: Path) -> None:
    ids = prompt(200_000 + tokens, tokens)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=ids)
        predicted, delivered = await f.ask(prompt=ids)
    assert predicted == delivered == (tokens - 1) // SIZE * SIZE


async def test_longer_prompts_and_nodes_that_split(engine: Engine, directory: Path) -> None:
    head, tail, other = prompt(211_000, 4 * SIZE), prompt(211_001, 53), prompt(211_002, 3 * SIZE)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=[*head, 7])
        assert await f.ask(prompt=[*head, *tail]) == (4 * SIZE, 4 * SIZE)
        await f.warm(prompt=[*head, *other])
        assert await f.ask(prompt=[*head, *tail, 9]) == (7 * SIZE, 7 * SIZE)
        assert await f.ask(prompt=[*head[: 2 * SIZE + 5], *other]) == (2 * SIZE, 2 * SIZE)


async def test_text_and_chats(engine: Engine, directory: Path) -> None:
    async with fleet(engine, directory) as f:
        await f.check_text_and_chats()


async def test_salts(engine: Engine, directory: Path) -> None:
    ids = prompt(202_000, 300)
    async with fleet(engine, directory) as f:
        for salt in ({}, {"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}):
            before = f.announced
            assert await f.ask(prompt=ids, **salt) == (0, 0)
            await until(lambda before=before: f.announced > before)  # type: ignore[misc]
            assert await f.ask(prompt=ids, **salt) == (288, 288)


async def test_an_emptied_cache_and_a_restart_of_the_gateway(engine: Engine, directory: Path) -> None:
    old, new = prompt(203_000, 300), prompt(203_001, 40)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=old)
        async with httpx.AsyncClient(timeout=60) as direct:
            assert (await direct.post(f"{engine.url}/flush_cache")).status_code == 200
        await asyncio.to_thread(engine.complete, prompt=new)
        await until(lambda: f.blocks == 2)
        assert await f.ask(prompt=old) == (0, 0)
    async with fleet(engine, directory) as f:
        assert await f.ask(prompt=new) == (2 * SIZE, 2 * SIZE)
