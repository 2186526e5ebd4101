"""One simulated engine, a client and a subscriber that is known to be connected, over real sockets."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import zmq
import zmq.asyncio

from gateway.kv import events as kv
from gateway.sim.server import EngineSettings, SimulatedWorker, Speech
from gateway.sim.speech import DEMO_MODEL

SPEECH = Speech.load(DEMO_MODEL)
WAIT_S = 20.0


class EngineRig:
    """One worker, a client and a subscriber that is known to be connected."""

    def __init__(self, settings: EngineSettings) -> None:
        self.worker = SimulatedWorker(settings, wall_clock=time.time, speech=SPEECH)
        self.context = zmq.asyncio.Context()

    async def __aenter__(self) -> EngineRig:
        await self.worker.start()
        self.http = httpx.AsyncClient(base_url=self.worker.url, timeout=30, trust_env=False)
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(b"")
        self.sub.connect(self.worker.events_endpoint or "")
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()
        self.context.destroy(linger=0)
        await self.worker.stop()

    async def settle(self) -> None:
        """Send until something arrives: a subscription takes effect some time after `connect`."""
        number = 10_000
        while not await self.sub.poll(50):
            await self.usage([number] * 17)
            number += 1
        await self.drain()

    async def drain(self) -> None:
        """Read until the newest batch is here."""
        newest = int(str(self.worker.state()["event_sequence"])) - 1
        while (await self.receive())[0] < newest:
            pass

    async def usage(self, prompt: list[int], **extra: object) -> dict[str, Any]:
        """The usage of one answer of one token."""
        answer = await self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **extra})
        assert answer.status_code == 200, answer.text
        usage: dict[str, Any] = answer.json()["usage"]
        return usage

    async def ask(self, prompt: list[int], **extra: object) -> int:
        """Returns the cached tokens the worker reports."""
        return int((await self.usage(prompt, **extra))["prompt_tokens_details"]["cached_tokens"])

    async def receive(self) -> tuple[int, list[kv.KvEvent]]:
        """The next live batch: sequence and events."""
        frames = await asyncio.wait_for(self.sub.recv_multipart(), WAIT_S)
        assert frames[0] == self.worker.settings.topic.encode()
        message = kv.parse_live(frames)
        return message.seq, self.decode(message.payload)

    @staticmethod
    def decode(payload: bytes, *, rank: int = 0) -> list[kv.KvEvent]:
        batch = kv.decode_batch(payload)
        assert isinstance(batch, kv.KvBatch)
        assert batch.skipped == ()
        assert batch.rank == rank
        return batch.events

    async def replay(self, start: int) -> tuple[list[kv.Message], set[int]]:
        """Everything from `start` on, and the number of frames the replies had."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.worker.replay_endpoint or "")
        await dealer.send_multipart(kv.replay_request(start))
        messages: list[kv.Message] = []
        widths: set[int] = set()
        while True:
            frames = await asyncio.wait_for(dealer.recv_multipart(), WAIT_S)
            widths.add(len(frames))
            message = kv.parse_reply(frames)
            if message is None:
                dealer.close(linger=0)
                return messages, widths
            messages.append(message)
