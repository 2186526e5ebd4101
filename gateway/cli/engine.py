"""`kvgate engine`: one simulated worker until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import time

import typer
import uvloop
import zmq

from gateway.sim.server import SimulatedWorker
from gateway.sim.settings import EngineSettings


def run(settings: EngineSettings) -> int:
    """Serve until a signal; the exit code: 0, or 2 when it cannot start."""
    try:
        uvloop.run(_serve(settings))
    except OSError as error:
        typer.echo(f"kvgate: {error}; choose another --port or --host", err=True)
        return 2
    except (ValueError, zmq.ZMQError) as error:
        typer.echo(f"kvgate: {error}", err=True)
        return 2
    return 0


async def _serve(settings: EngineSettings) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    worker = SimulatedWorker(settings, wall_clock=time.time)  # noqa: TID251  the clock of this process
    await worker.start()
    events = f"KV events at {worker.events_endpoint}" if worker.events_endpoint else "no KV events"
    load = f", load at {worker.load_endpoint}" if worker.load_endpoint else ""
    typer.echo(f"simulated {settings.dialect} worker at {worker.url}, {events}{load}", err=True)
    typer.echo(f"next: kvgate serve --worker {worker.url}", err=True)
    try:
        await ended.wait()
    finally:
        await worker.stop()
