"""`kvgate register`: a worker's side-car that announces it in the registry of the store until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal

import httpx
import typer

from gateway.replicas import Announcer
from gateway.replicas.store import STORE_ERRORS
from gateway.settings import WorkerSettings
from gateway.store_address import StoreAddress
from gateway.upstream.control import GATEWAYS_HEADER

_HEALTH_TIMEOUT_S = 2.0


def run(worker: WorkerSettings, address: StoreAddress, *, prefix: str, heartbeat_s: float) -> int:
    """Announce until a signal; the exit code: 0, 1 when the worker could not be taken out of the registry, 2 when it is
    a gateway."""
    return asyncio.run(_announce(worker, address, prefix=prefix, heartbeat_s=heartbeat_s))


async def _announce(worker: WorkerSettings, address: StoreAddress, *, prefix: str, heartbeat_s: float) -> int:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    refused: list[str] = []
    async with httpx.AsyncClient(timeout=_HEALTH_TIMEOUT_S, trust_env=False, verify=False) as client:  # a health check

        async def alive() -> bool:
            try:
                answer = await client.get(f"{worker.url}/health")
            except httpx.HTTPError:
                return False
            if GATEWAYS_HEADER in answer.headers:
                refused.append(f"{worker.url} is a gateway, not an engine: it would get its own requests back")
                ended.set()
            return answer.status_code == 200 and not refused

        announcer = Announcer(
            address,
            prefix=prefix,
            url=worker.url,
            worker=worker.model_dump_json(exclude_unset=True, exclude={"api_key"}).encode(),
            heartbeat_s=heartbeat_s,
            alive=alive,
            on_change=lambda what: None if refused else typer.echo(f"{worker.url}: {what}", err=True),
        )
        async with asyncio.TaskGroup() as group:
            beats = group.create_task(announcer.run())
            await ended.wait()
            beats.cancel()
        if refused:
            typer.echo(f"kvgate: {refused[0]}; give the engine's address", err=True)
            return 2
        try:
            await announcer.leave()
        except STORE_ERRORS as error:
            typer.echo(f"kvgate: the worker is not taken out of the registry, it runs out by itself: {error}", err=True)
            return 1
    return 0
