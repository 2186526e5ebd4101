"""What tells blocks apart, against a real engine: predicted equals delivered, and nothing hits across identities.

Each case warms the engine behind the gateway's back, so that only its events can tell, waits until they have, and sends
the same prompt through the gateway. Run with `-m real_engine` (docs/testing-with-real-engines.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.rig import until
from tests.real_engine.engines import Engine, EngineSetup, program, running
from tests.real_engine.fleet import fleet, near, prompt
from tests.real_engine.tiny_model import write_adapter, write_model

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program()  # before anything is made
    base = tmp_path_factory.mktemp("real")
    write_model(base / "model")
    for seed, name in enumerate(("poet", "lawyer"), 1):
        write_adapter(base / name, seed=seed)
    return base


SETUPS = {
    "blocks of 32, int hashes": EngineSetup(block_size=32),
    "blocks of 64, whole digests": EngineSetup(block_size=64, int_hashes=False, hash_algorithm="sha256_cbor"),
}


@pytest.fixture(scope="module", params=list(SETUPS))
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Engine]:
    setup = replace(SETUPS[request.param], adapters={name: directory / name for name in ("poet", "lawyer")})
    with running(directory / "model", setup, log=directory / f"engine-{setup.block_size}.log") as server:
        yield server


# --------------------------------------------------------------------------- the same identity: hits


@pytest.mark.parametrize("tokens", [64, 65, 130, 512, 513, 1000])
async def test_tokens(tokens: int, engine: Engine, directory: Path) -> None:
    """All full blocks but what the last token needs are predicted, and delivered."""
    ids = prompt(2000 + 2 * tokens, tokens)
    async with fleet(engine, directory) as f:
        assert await f.ask(prompt=prompt(2001 + 2 * tokens, tokens)) == (0, 0)
        await f.warm(prompt=ids)
        predicted, delivered = await f.ask(prompt=ids)
    assert delivered == (tokens - 1) // engine.setup.block_size * engine.setup.block_size
    assert predicted == delivered


async def test_a_longer_prompt_and_one_that_parts(engine: Engine, directory: Path) -> None:
    """Children of blocks that are known: the events name a parent that is no root."""
    size = engine.setup.block_size
    head, tail, other = prompt(11, 4 * size), prompt(12, 3 * size + 5), prompt(13, 3 * size)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=[*head, 7])
        assert await f.ask(prompt=[*head, *tail]) == (4 * size, 4 * size)
        await f.warm(prompt=[*head, *other])
        assert await f.ask(prompt=[*head, *tail, 9]) == (7 * size, 7 * size)
        assert await f.ask(prompt=[*other, *head]) == (0, 0)


async def test_text_and_chats(engine: Engine, directory: Path) -> None:
    async with fleet(engine, directory) as f:
        await f.check_text_and_chats()


async def test_a_restart_of_the_gateway_learns_by_replay(engine: Engine, directory: Path) -> None:
    ids = prompt(21, 500)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=ids)
        held = f.blocks
    async with fleet(engine, directory) as f:
        assert f.blocks == held
        predicted, delivered = await f.ask(prompt=ids)
        assert predicted == delivered > 0


async def test_an_emptied_cache(engine: Engine, directory: Path) -> None:
    """An idle engine tells of it with its next step."""
    ids = prompt(22, 300)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=ids)
        async with httpx.AsyncClient(timeout=60) as direct:
            assert (await direct.post(f"{engine.url}/reset_prefix_cache")).status_code == 200
        await asyncio.to_thread(engine.complete, prompt=prompt(23, 40))
        await until(lambda: f.blocks <= 40 // engine.setup.block_size)
        assert await f.ask(prompt=ids) == (0, 0)


# --------------------------------------------------------------------------- other identities: never a hit

IDENTITIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "salt a": {"cache_salt": "tenant-a"},
    "salt b": {"cache_salt": "tenant-b"},
    "poet": {"model": "poet"},
    "lawyer": {"model": "lawyer"},
    "poet, salt a": {"model": "poet", "cache_salt": "tenant-a"},
}


@pytest.mark.parametrize("warmed", IDENTITIES)
async def test_salts_and_adapters(warmed: str, engine: Engine, directory: Path) -> None:
    """The same tokens under one identity are held; under every other neither predicted nor delivered."""
    ids = prompt(100 + list(IDENTITIES).index(warmed), 400)
    async with fleet(engine, directory) as f:
        await f.warm(prompt=ids, **IDENTITIES[warmed])
        for other, identity in IDENTITIES.items():
            predicted, delivered = await f.ask(prompt=ids, **identity)
            if other == warmed:
                assert predicted == delivered > 300, other
            else:
                assert (predicted, delivered) == (0, 0), other


# --------------------------------------------------------------------------- block sizes that differ


async def test_a_wrong_block_size_is_told_or_corrected(engine: Engine, directory: Path) -> None:
    """16 configured: either hits are predicted all the same, or a finding says why they are not."""
    ids = prompt(31, 500)
    async with fleet(engine, directory, block_size=16) as f:
        await asyncio.to_thread(engine.complete, prompt=ids)
        await asyncio.sleep(1)
        predicted, delivered = await f.ask(prompt=ids)
        (worker,) = f.gateway.fleet.workers.values()
        assert delivered > 0
        assert near(predicted, delivered, engine) or predicted == 0
        assert "block_size_wrong" in {found.code for found in worker.facts.findings}
