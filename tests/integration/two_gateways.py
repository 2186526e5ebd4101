"""Several gateways over the same simulated engines, with or without a store between them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from random import Random
from typing import Any, Protocol

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


class Front(Protocol):
    """Where chats go: one client for each gateway that takes traffic now, as a load balancer knows them."""

    @property
    def clients(self) -> list[httpx.AsyncClient]: ...


@dataclass(frozen=True)
class FollowUp:
    """A turn after the first: tokens of its prompt, those found in a cache, and those that were sent or answered in
    the turn before. `through` is the gateway's address."""

    through: str
    prompt: int
    cached: int
    before: int


@dataclass
class Chats:
    """Four-turn chats of streams, each turn through the next gateway. With `again` a turn whose gateway dies under it
    goes to the next one, as a load balancer or a client does it; those are counted as `moved`. No turn begins while
    `go` is not set."""

    again: bool = False
    go: asyncio.Event = field(default_factory=asyncio.Event)
    follow_ups: list[FollowUp] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    moved: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        self.go.set()

    @property
    def hit(self) -> float:
        """Share of the follow-ups' prompts that was found in a cache."""
        return hit(self.follow_ups)

    async def run(
        self, front: Front, chats: int, *, at_once: int = 8, turns: int = 4, words: int = 60, first: int = 0
    ) -> None:
        """Chats number `first` and after; other numbers have other texts."""
        gate = asyncio.Semaphore(at_once)
        turn_of = cycle(range(1 << 30))

        async def ask(number: int, messages: list[dict[str, str]]) -> tuple[str, str, dict[str, Any]]:
            body = {
                "model": "demo", "messages": messages, "max_tokens": 8,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            while True:
                client = front.clients[next(turn_of) % len(front.clients)]
                try:
                    answer = await client.post(
                        "/v1/chat/completions", json=body, headers={"x-session-id": f"chat-{number}"}
                    )
                except httpx.TransportError:
                    if not self.again or client in front.clients:
                        raise
                    self.moved += 1
                    continue
                assert answer.status_code == 200, answer.text
                return str(client.base_url), *_read(answer.text)

        async def chat(number: int) -> None:
            async with gate:
                rng = Random(number)
                messages = [{"role": "system", "content": f"You are helper number {number % 8}. " + _text(rng, 40)}]
                before = 0
                for turn in range(turns):
                    messages.append({"role": "user", "content": _text(rng, words)})
                    await self.go.wait()
                    try:
                        through, text, usage = await ask(number, messages)
                    except (httpx.HTTPError, AssertionError) as error:
                        self.errors.append(repr(error))
                        return
                    messages.append({"role": "assistant", "content": text})
                    if turn:
                        cached = usage["prompt_tokens_details"]["cached_tokens"]
                        self.follow_ups.append(FollowUp(through, usage["prompt_tokens"], cached, before))
                    before = usage["prompt_tokens"] + usage["completion_tokens"]
                self.done += 1

        async with asyncio.TaskGroup() as group:
            for number in range(first, first + chats):
                group.create_task(chat(number))


def hit(follow_ups: Sequence[FollowUp]) -> float:
    """Share of their prompts that was found in a cache."""
    return sum(turn.cached for turn in follow_ups) / max(1, sum(turn.prompt for turn in follow_ups))


def _read(stream: str) -> tuple[str, dict[str, Any]]:
    """Text and usage of a whole stream."""
    lines = stream.splitlines()
    assert "data: [DONE]" in lines, stream[-500:]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    (usage,) = [event["usage"] for event in events if event.get("usage")]
    return "".join(texts), usage


def _text(rng: Random, words: int) -> str:
    return " ".join(f"word{rng.randrange(5000)}" for _ in range(words))
