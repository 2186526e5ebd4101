"""A worker that says something else than it is: a server before a simulated engine that changes what it answers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any

import httpx
import msgspec
import uvicorn
import zmq
import zmq.asyncio

from gateway.doctor.checks import Reach
from gateway.doctor.sockets import Subscription, subscribed
from gateway.sim.server import EngineSettings, SimulatedWorker

Change = Callable[[Any], Any]
"""From the engine's decoded answer to what is answered instead; a tuple is a status and a body."""


@dataclass
class Worker:
    """The engine, the URL in front of it, and what is changed, by path. Paths the engine does not have may be named."""

    engine: SimulatedWorker
    url: str
    changes: dict[str, Change] = field(default_factory=dict)
    clock_ahead_s: float = 0.0
    asked: list[tuple[str, Any]] = field(default_factory=list)


@asynccontextmanager
async def lying(
    changes: Mapping[str, Change] | None = None, *, clock_ahead_s: float = 0.0, **settings: Any
) -> AsyncIterator[Worker]:
    """An engine with these settings behind these lies; `clock_ahead_s` moves its time stamps and its dates."""
    engine = SimulatedWorker(
        replace(EngineSettings(speed=100.0), **settings), wall_clock=lambda: time.time() + clock_ahead_s
    )
    await engine.start()
    try:
        async with httpx.AsyncClient(base_url=engine.url, timeout=30) as http:
            worker = Worker(engine, "", dict(changes or {}), clock_ahead_s)
            async with _serving(worker, http) as worker.url:
                yield worker
    finally:
        await engine.stop()


_OURS = (b"host", b"content-length", b"connection")


@asynccontextmanager
async def _serving(worker: Worker, http: httpx.AsyncClient) -> AsyncIterator[str]:
    async def app(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in scope["headers"] if name not in _OURS}
        request = http.build_request(scope["method"], scope["path"], content=body, headers=headers)
        status, answer = await _answer(worker, http, request)
        date = formatdate(time.time() + worker.clock_ahead_s, usegmt=True).encode()
        await send({"type": "http.response.start", "status": status, "headers": [(b"date", date)]})
        await send({"type": "http.response.body", "body": answer})

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, log_level="error", lifespan="off", date_header=False)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(20):
                while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


async def _answer(worker: Worker, http: httpx.AsyncClient, request: httpx.Request) -> tuple[int, bytes]:
    path = request.url.path
    worker.asked.append((path, json.loads(request.content) if request.content else None))
    truth = await http.send(request)
    change = worker.changes.get(path)
    if change is None:
        return truth.status_code, truth.content
    is_json = truth.content[:1] in (b"{", b"[")
    said = change(json.loads(truth.content) if is_json else truth.text)
    status, said = said if isinstance(said, tuple) else (200, said)
    return status, said.encode() if isinstance(said, str) else json.dumps(said).encode()


@asynccontextmanager
async def renaming(worker: Worker) -> AsyncIterator[None]:
    """Blocks of its events have other names: as of a process with another hash seed."""
    assert worker.engine.events_endpoint is not None
    context = zmq.asyncio.Context()
    try:
        async with subscribed(context, worker.engine.events_endpoint, "") as events:
            assert await events.reach(20) is Reach.OPEN
            with context.socket(zmq.PUB) as out:
                port = out.bind_to_random_port("tcp://127.0.0.1")
                worker.changes["/kv_event_sources"] = lambda said: {"0": said["0"] | {"endpoint": f"tcp://*:{port}"}}
                forwarding = asyncio.create_task(_renamed(events, out))
                try:
                    yield
                finally:
                    forwarding.cancel()
    finally:
        context.destroy(linger=0)


async def _renamed(events: Subscription, out: zmq.asyncio.Socket) -> None:
    number = 0
    while True:
        payload = await events.next(3600)
        assert payload is not None
        batch = msgspec.msgpack.decode(payload)
        for event in batch[1]:
            event["block_hashes"] = [name ^ 1 for name in event["block_hashes"]]
        await out.send_multipart([b"", number.to_bytes(8, "big"), msgspec.msgpack.encode(batch)])
        number += 1
