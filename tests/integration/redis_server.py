"""Real Redis servers of the tests, each on a port of its own, gone with their context."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.integration.rig import PATIENCE_S


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class RedisServer:
    """One process. `options` are its configuration as on the command line."""

    port: int
    directory: Path
    options: Sequence[str] = ()
    password: str | None = None
    plain: bool = True
    process: asyncio.subprocess.Process | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        login = f":{self.password}@" if self.password else ""
        return f"redis://{login}127.0.0.1:{self.port}"

    async def start(self, *, anywhere: bool = False) -> None:
        """Returns when it answers. A port that somebody else has taken meanwhile is tried again; with `anywhere`
        another one is."""
        async with asyncio.timeout(PATIENCE_S):
            await self._begin()
            while not await self._answers():
                await asyncio.sleep(0.02)
                if self.process is not None and self.process.returncode is not None:
                    self.port = free_port() if anywhere else self.port
                    await self._begin()

    async def _begin(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            "redis-server", *self._arguments(), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )

    def _arguments(self) -> list[str]:
        usual = ["--save", "", "--appendonly", "no", "--dir", str(self.directory), "--bind", "127.0.0.1"]
        port = ["--port", str(self.port)] if self.plain else []
        login = ["--requirepass", self.password] if self.password else []
        return [*usual, *port, *login, *self.options]

    async def _answers(self) -> bool:
        if not self.plain:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            except OSError:
                return False
            writer.close()
            return True
        try:
            async with self.client() as client:
                return bool(await client.ping())
        except (RedisError, OSError):
            return False

    def client(self) -> Redis:
        """A client of the tests' own."""
        client: Redis = Redis(host="127.0.0.1", port=self.port, password=self.password)
        return client

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        """kill -9, and wait."""
        if self.process is not None and self.process.returncode is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def redis_server(
    directory: Path, *options: str, password: str | None = None, plain: bool = True, port: int | None = None
) -> AsyncIterator[RedisServer]:
    """One that answers. Not `plain`: `options` say the port."""
    server = RedisServer(port or free_port(), directory, options, password, plain)
    try:
        await server.start(anywhere=plain and port is None)
        yield server
    finally:
        await server.kill()
