"""Models that are more than text through full attention: sliding windows, and images. Run with `-m real_engine`."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.rig import until
from tests.real_engine.engines import MODEL, Engine, EngineSetup, program, running
from tests.real_engine.fleet import Fleet, fleet, prompt
from tests.real_engine.tiny_model import IMAGE_SIZE, IMAGE_TOKENS, WINDOW, write_hybrid_model, write_seeing_model

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(3600)]

SIZE = 32
CHAT = "/v1/chat/completions"


def believed(f: Fleet) -> bool:
    """Nothing has spoken against the index."""
    (worker,) = f.gateway.fleet.workers.values()
    return worker.trust == 1.0 and not worker.belief.misses and not worker.findings


# --------------------------------------------------------------------------- sliding windows


@pytest.fixture(scope="module")
def hybrid_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program()
    return write_hybrid_model(tmp_path_factory.mktemp("hybrid") / "model").parent


@pytest.fixture(scope="module")
def hybrid(hybrid_directory: Path) -> Iterator[Engine]:
    with running(hybrid_directory / "model", EngineSetup(), log=hybrid_directory / "engine.log") as server:
        yield server


@pytest.mark.parametrize("tokens", [40, 64, 65, 130, 320, 513, 1000])
async def test_a_prompt_again_and_longer(tokens: int, hybrid: Engine, hybrid_directory: Path) -> None:
    ids = prompt(100_000 + tokens, tokens)
    async with fleet(hybrid, hybrid_directory) as f:
        await f.warm(prompt=ids)
        predicted, delivered = await f.ask(prompt=ids)
        assert predicted == delivered > 0
        await until(lambda: believed(f))
        predicted, delivered = await f.ask(prompt=[*ids, *prompt(111_000 + tokens, 50)])
        assert predicted == delivered >= tokens - 2 * SIZE
        assert believed(f)


async def test_a_prefix_that_others_share_counts_once_the_window_before_its_end_is_kept(
    hybrid: Engine, hybrid_directory: Path
) -> None:
    """All of it is there after the first request, but the engine can go on from its end after the second only."""
    assert WINDOW == 2 * SIZE
    for blocks in (1, 3, 5, 8):
        shared = prompt(102_000 + blocks, blocks * SIZE)
        async with fleet(hybrid, hybrid_directory) as f:
            await f.warm(prompt=[*shared, *prompt(103_000 + blocks, 4 * SIZE)])
            found = []
            for number in range(3):
                before = f.announced
                found.append(await f.ask(prompt=[*shared, *prompt(104_000 + 10 * blocks + number, 3 * SIZE + 9)]))
                await until(lambda before=before: f.announced > before)  # type: ignore[misc]
            assert found == [(0, 0), (blocks * SIZE, blocks * SIZE), (blocks * SIZE, blocks * SIZE)]
            assert believed(f)


async def test_a_full_hybrid_cache_predicts_what_it_delivers(hybrid: Engine, hybrid_directory: Path) -> None:
    """More prompts than fit: both groups evict, each in its own way."""
    heads = [prompt(105_000 + number, 6 * SIZE) for number in range(4)]
    wrong = 0
    async with fleet(hybrid, hybrid_directory) as f:
        for number in range(160):
            tail = prompt(106_000 + number, (10 + number % 20) * SIZE)
            await asyncio.to_thread(hybrid.complete, prompt=[*heads[number % 4], *tail])
        await until(lambda: all(member.caught_up for member in f.gateway.membership.members.values()))
        for number in range(0, 160, 5):
            ids = [*heads[number % 4], *prompt(106_000 + number, (10 + number % 20) * SIZE), 7]
            predicted, delivered = await f.ask(prompt=ids)
            wrong += predicted != delivered
            await f.warm(prompt=prompt(107_000 + number, SIZE + 8))  # what the one before announced has come then
        (worker,) = f.gateway.fleet.workers.values()
        assert wrong == 0
        assert not worker.belief.contradicted


# --------------------------------------------------------------------------- images


@pytest.fixture(scope="module")
def seeing_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program()
    return write_seeing_model(tmp_path_factory.mktemp("seeing") / "model").parent


@pytest.fixture(scope="module")
def seeing(seeing_directory: Path) -> Iterator[Engine]:
    with running(seeing_directory / "model", EngineSetup(), log=seeing_directory / "engine.log") as server:
        yield server


def image(*colour: int) -> str:
    """A PNG of one colour, as a data URL."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(colour) * IMAGE_SIZE) * IMAGE_SIZE
    header = struct.pack(">IIBBBBB", IMAGE_SIZE, IMAGE_SIZE, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(png).decode()


def chat(url: str, text: str, *, system: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "system", "content": system}, {"role": "user", "content": parts}]


async def test_the_same_image_hits_and_another_one_only_what_is_before_it(
    seeing: Engine, seeing_directory: Path
) -> None:
    """Nobody but the engine knows an image's tokens, so such prompts go by their text and what was sent of them."""
    system, text = "You describe pictures of one colour. " * 20, "What colour is this thing? " * 10
    async with fleet(seeing, seeing_directory) as f:
        red, blue = (chat(image(*colour), text, system=system) for colour in ((255, 1, 0), (0, 1, 255)))
        assert await f.ask(CHAT, messages=red) == (0, 0)
        predicted, whole = await f.ask(CHAT, messages=red)
        assert predicted > 0
        assert whole > IMAGE_TOKENS
        _, head = await f.ask(CHAT, messages=blue)
        assert 0 < head < whole - IMAGE_TOKENS // SIZE * SIZE
        assert (await f.ask(CHAT, messages=blue))[1] == whole
        other = chat(image(255, 1, 0), text[: len(text) // 2] + "Or rather: why?", system=system)
        _, delivered = await f.ask(CHAT, messages=other)
        assert head < delivered < whole
        assert believed(f)


async def test_blocks_of_an_image_are_no_blocks_of_its_placeholders(seeing: Engine, seeing_directory: Path) -> None:
    """The same token ids without the image: the engine tells them apart, and so does the index."""
    messages = chat(image(9, 200, 9), "Once more: which colour? " * 12, system="You see green things. " * 20)
    async with fleet(seeing, seeing_directory) as f:
        before = f.blocks
        await f.ask(CHAT, messages=messages)
        await until(lambda: f.blocks > before)
        async with httpx.AsyncClient(timeout=60) as direct:
            answer = await direct.post(f"{seeing.url}/tokenize", json={"model": MODEL, "messages": messages})
        ids = answer.json()["tokens"]
        placeholder = ids.index(3)
        if ids.count(3) == 1:
            ids[placeholder : placeholder + 1] = [3] * IMAGE_TOKENS
        predicted, delivered = await f.ask(prompt=ids)
        assert predicted == delivered == placeholder // SIZE * SIZE
        predicted, delivered = await f.ask(prompt=ids)
        assert predicted == delivered == (len(ids) - 1) // SIZE * SIZE
        assert believed(f)
