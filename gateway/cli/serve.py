"""`kvgate serve`: one gateway until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import sys
import time
from pathlib import Path

import typer
import uvloop

from gateway.cli.options import loaded_or_exit
from gateway.config import ConfigError, Sources
from gateway.pool import ANY_MODEL
from gateway.runtime import Gateway
from gateway.runtime.interpreter import tune_interpreter
from gateway.settings import DiscoverySettings
from gateway.telemetry import set_up_logging

_END = (signal.SIGTERM, signal.SIGINT)


def run(sources: Sources) -> int:
    """Serve until a signal ends it; the exit code: 0 after a clean end, 2 when it cannot start."""
    loaded = loaded_or_exit(sources)
    settings = loaded.settings
    if not settings.workers and settings.discovery == DiscoverySettings():
        typer.echo(
            "kvgate: no workers yet: give --worker URL, `workers` or `discovery` in the file, or POST them to "
            "/admin/workers",
            err=True,
        )
    allow_open_files()
    telemetry = settings.telemetry
    logs = set_up_logging(form=telemetry.log, level=telemetry.log_level, stream=sys.stderr.buffer, wall=time.time)  # noqa: TID251
    try:
        gateway = Gateway(settings, sources=sources, origins=loaded.origins, requests_log=logs.requests)
        uvloop.run(_serve(gateway))
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"kvgate: {problem}", err=True)
        return 2
    except OSError as error:
        typer.echo(f"kvgate: {error}", err=True)
        return 2
    return 0


def allow_open_files() -> None:
    """As many open files as the system lets this process have: a worker takes about eight, a client one, and the usual
    limit of 1,024 was made for programs that wait for `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a system whose own limit is lower than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(gateway: Gateway) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def end() -> None:
        ended.set()
        # A second signal ends the process the hard way, also while it still starts.
        for number in _END:
            loop.remove_signal_handler(number)

    for number in _END:
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGHUP, gateway.files.now)
    await gateway.start()
    tune_interpreter()
    try:
        await ended.wait()
    finally:
        await gateway.stop()


def tokenizer_directories(given: list[str]) -> dict[str, Path]:
    """`[MODEL=]DIR` of the command line by served name. Exits with 2 for a path that holds no tokenizer."""
    directories = {}
    for text in given:
        name, _, path = text.rpartition("=")
        directory = Path(path).expanduser()
        if not (directory / "tokenizer.json").is_file():
            typer.echo(f"kvgate: --tokenizer {text}: no tokenizer.json in {directory}", err=True)
            raise typer.Exit(2)
        directories[name or ANY_MODEL] = directory
    return directories
