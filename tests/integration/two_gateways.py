"""Several gateways over the same simulated engines, with or without a store between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random
from typing import Any

import httpx

from gateway.runtime import Gateway, Ports
from gateway.settings import Settings
from gateway.sim.server import EngineSettings, SimulatedWorker, Speech
from tests.integration.rig import PATIENCE_S, fast, until

PERIODS = {"load": {"poll_s": 0.2}}


@dataclass
class Replicas:
    """`gateways` in the order of their start, `engines` by number."""

    engines: list[SimulatedWorker]
    store: str | None
    more: dict[str, Any]
    stack: AsyncExitStack
    gateways: list[Gateway] = field(default_factory=list)
    ports: list[Ports] = field(default_factory=list)
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    def settings(self) -> Settings:
        tree: dict[str, Any] = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_timeout_s": 5},
            "workers": [{"url": e.url, "name": e.settings.name} for e in self.engines],
            **PERIODS,
            **self.more,
        }
        if self.store is not None:
            # Long: a store that is slow because the machine is has not failed.
            tree["redis"] = {"url": self.store, "timeout_s": 10} | tree.get("redis", {})
        return Settings(**tree)

    async def add(self, *, wait: bool = True) -> Gateway:
        """One more gateway."""
        gateway = Gateway(self.settings(), rng=Random(len(self.gateways) + 1))
        self.ports.append(await gateway.start())
        self.gateways.append(gateway)
        self.stack.push_async_callback(self._stop, gateway)
        self.clients.append(
            await self.stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=self.ports[-1].url, timeout=3 * PATIENCE_S, limits=httpx.Limits(max_connections=None)
                )
            )
        )
        if wait:
            await gateway.until_ready(PATIENCE_S)
        return gateway

    async def _stop(self, gateway: Gateway) -> None:
        if gateway in self.gateways:
            await gateway.stop()

    async def stop(self, at: int) -> None:
        """One gateway ends."""
        gateway = self.gateways.pop(at)
        self.ports.pop(at)
        self.clients.pop(at)
        await gateway.stop()

    async def together(self) -> None:
        """Until every gateway knows all others."""
        await until(lambda: all(self.shared(g) and peers(g) == len(self.gateways) - 1 for g in self.gateways))

    @staticmethod
    def shared(gateway: Gateway) -> bool:
        """Its store is up."""
        return gateway.sharing is not None and gateway.sharing.exchange.up

    def leased(self) -> int:
        return sum(gateway.router.open_leases for gateway in self.gateways)


def peers(gateway: Gateway) -> int:
    """Other replicas it knows."""
    return len(gateway.sharing.peers.peers) if gateway.sharing is not None else 0


@asynccontextmanager
async def replicas(
    gateways: int,
    *,
    store: str | None,
    engines: int = 2,
    engine: EngineSettings | None = None,
    more: dict[str, Any] | None = None,
) -> AsyncIterator[Replicas]:
    """Engines w1, w2, ... and gateways over them that are ready, and know each other where there is a store."""
    model = engine or fast()
    speech = Speech.load(model.tokenizer)
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(1, engines + 1):
            worker = SimulatedWorker(replace(model, name=f"w{number}"), wall_clock=time.time, speech=speech)
            await worker.start()
            stack.push_async_callback(worker.stop)
            workers.append(worker)
        rig = Replicas(workers, store, more or {}, stack)
        for _ in range(gateways):
            await rig.add()
        if store is not None and gateways > 1:
            await rig.together()
        yield rig


@dataclass
class Chats:
    """Four-turn chats, each turn through the next gateway. Figures are of the turns after the first."""

    prompt: int = 0
    cached: int = 0
    errors: list[str] = field(default_factory=list)
    done: int = 0

    @property
    def hit(self) -> float:
        """Share of the prompts found in a cache."""
        return self.cached / max(1, self.prompt)

    async def run(self, rig: Replicas, chats: int, *, at_once: int = 24, turns: int = 4, words: int = 60) -> None:
        gate = asyncio.Semaphore(at_once)
        turn_of = cycle(range(1 << 30))

        async def chat(number: int) -> None:
            async with gate:
                rng = Random(number)
                messages = [{"role": "system", "content": f"You are helper number {number % 8}. " + _text(rng, 40)}]
                for turn in range(turns):
                    messages.append({"role": "user", "content": _text(rng, words)})
                    client = rig.clients[next(turn_of) % len(rig.clients)]
                    body = {"model": "demo", "messages": messages, "max_tokens": 8}
                    try:
                        answer = await client.post(
                            "/v1/chat/completions", json=body, headers={"x-session-id": f"chat-{number}"}
                        )
                    except httpx.HTTPError as error:
                        self.errors.append(repr(error))
                        return
                    if answer.status_code != 200:
                        self.errors.append(answer.text)
                        return
                    content = answer.json()
                    messages.append(content["choices"][0]["message"])
                    usage = content["usage"]
                    if turn:
                        self.prompt += usage["prompt_tokens"]
                        self.cached += usage["prompt_tokens_details"]["cached_tokens"]
                self.done += 1

        async with asyncio.TaskGroup() as group:
            for number in range(chats):
                group.create_task(chat(number))


def _text(rng: Random, words: int) -> str:
    return " ".join(f"word{rng.randrange(5000)}" for _ in range(words))
