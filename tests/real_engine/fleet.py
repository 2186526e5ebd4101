"""A gateway in front of one real engine, and what the tests ask of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx

from gateway.records import Tier
from gateway.runtime import Gateway
from gateway.settings import Settings
from tests.integration.rig import until
from tests.real_engine.engines import MODEL, Engine

TEXT = "You answer questions about the Python standard library. Name the module, then the function. " * 12


@dataclass
class Fleet:
    """A gateway in front of the engine."""

    gateway: Gateway
    http: httpx.AsyncClient
    engine: Engine

    @property
    def blocks(self) -> int:
        worker = next(iter(self.gateway.fleet.workers.values()))
        return self.gateway.index.resident(worker.slot, Tier.GPU)

    @property
    def announced(self) -> int:
        """Blocks stored by its events so far."""
        members = self.gateway.membership.members.values()
        return sum(feed.totals.stored.total() for member in members for feed in member.feeds)

    async def warm(self, **body: Any) -> None:
        """A new prompt, straight to the engine; returns when its events have been applied."""
        before = self.announced
        await asyncio.to_thread(self.engine.complete, **body)
        await until(lambda: self.announced > before)

    async def ask(self, path: str = "/v1/completions", **body: Any) -> tuple[int, int]:
        """Through the gateway: predicted and delivered tokens."""
        answer = await self.http.post(path, json={"model": MODEL, "max_tokens": 1, **body})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        return int(answer.headers["x-kvgate-predicted-tokens"]), int(usage["prompt_tokens_details"]["cached_tokens"])

    async def check_text_and_chats(self) -> None:
        """What is predicted of a text and of a chat is delivered, and a chat is not the text it holds."""
        messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": "In 2026, what's in os.path?"}]
        await self.warm(prompt=TEXT)
        predicted, delivered = await self.ask(prompt=TEXT + "And pathlib?")
        assert predicted == delivered > 0
        before = self.blocks
        assert (await self.ask("/v1/chat/completions", messages=messages))[1] == 0
        await until(lambda: self.blocks > before)
        predicted, delivered = await self.ask("/v1/chat/completions", messages=messages)
        assert predicted == delivered > 0


@asynccontextmanager
async def fleet(engine: Engine, directory: Path, **worker: Any) -> AsyncIterator[Fleet]:
    """`worker` are further keys of the worker's entry in the configuration."""
    tree: dict[str, Any] = {
        "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_timeout_s": 5},
        "models": [{"name": MODEL, "aliases": list(engine.setup.adapters), "tokenizer": directory / "model"}],
        "workers": [{"url": engine.url, "name": "real", **worker}],
        # A prompt that went through the gateway counts as held at once; here only events are to tell.
        "routing": {"speculative_ttl_s": 0.001},
    }
    gateway = Gateway(Settings(**tree), rng=Random(1))
    ports = await gateway.start()
    try:
        async with httpx.AsyncClient(base_url=ports.url, timeout=120) as http:
            await gateway.until_ready(60)
            yield Fleet(gateway, http, engine)
    finally:
        await gateway.stop()


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids no other test uses."""
    random = Random(seed)
    return [random.randrange(300, 4000) for _ in range(tokens)]


def near(predicted: int, delivered: int, engine: Engine) -> bool:
    return abs(predicted - delivered) <= engine.setup.block_size
