"""The connections of each worker: how they are made, kept while idle, and how long each phase may take.

Rules:
1. Idle ones are used newest first, so that a burst's surplus ages and closes.
2. Idle ones are bounded in number and in age; the age stays below the workers' own keep-alive timeout.
3. Making a connection has one deadline over name, TCP and TLS.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

from gateway.errors import DeadlineExceeded, WorkerUnreachable
from gateway.records import WorkerSpec
from gateway.upstream.connection import Connection
from gateway.upstream.deadlines import NEVER, Deadlines
from gateway.upstream.ranks import RANK_HEADER


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Limits of a request's phases on the worker's side, in seconds. `send_s` is for what the worker does not take at
    once; `first_byte_s` ends with the head of an answer, and for a stream of events with the first byte behind it:
    engines send the head of a stream before they compute anything. `pool_idle_s` must be below the workers' own
    keep-alive timeout (5 s in uvicorn, which both engines use), or every second request after a pause meets a closing
    connection."""

    connect_s: float = 2.0
    send_s: float = 30.0
    first_byte_s: float = 120.0
    idle_s: float = 60.0
    total_s: float = 1800.0
    pool_idle_s: float = 4.0


class WorkerConnections:
    """The connections of one worker."""

    __slots__ = (
        "_host",
        "_idle",
        "_max_idle",
        "_open",
        "_own",
        "_port",
        "_tls",
        "clock",
        "credentials",
        "deadlines",
        "host_header",
        "rank_header",
        "spec",
        "timeouts",
    )

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        timeouts: Timeouts,
        clock: Callable[[], float],
        deadlines: Deadlines,
        tls: ssl.SSLContext | None,
        max_idle: int,
        open_connections: set[Connection],
    ) -> None:
        """`open_connections`: those of all workers, these among them while they are open."""
        parts = urlsplit(spec.url)
        # Never in the clear to a worker whose URL says https.
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._max_idle = max_idle
        self._idle: list[Connection] = []
        self._open = open_connections
        self._own: set[Connection] = set()
        self.spec = spec
        self.timeouts = timeouts
        self.clock = clock
        self.deadlines = deadlines
        self.host_header = parts.netloc.rpartition("@")[2].encode()
        self.credentials = b"authorization: Bearer %b\r\n" % spec.api_key.encode() if spec.api_key else b""
        # vLLM from 0.11.1 on, SGLang from 0.5.10 on; empty for a worker that is not one rank of several.
        self.rank_header = f"{RANK_HEADER}: {spec.rank.asked}\r\n".encode() if spec.rank is not None else b""

    @property
    def encrypted(self) -> bool:
        """Connections are made over TLS."""
        return self._tls is not None

    @property
    def idle(self) -> int:
        """Connections waiting for a request."""
        return len(self._idle)

    def take(self) -> Connection | None:
        """The newest idle connection that is not about to be closed."""
        now = self.clock()
        while self._idle:
            connection = self._idle.pop()
            if connection.closing:
                continue
            if connection.deadline > now:
                return connection
            connection.overdue(now)
        return None

    async def connect(self, *, within_s: float | None = None, total_at: float = NEVER) -> Connection:
        """A new connection, within `timeouts.connect_s` unless told otherwise. Raises WorkerUnreachable, and
        DeadlineExceeded when it is `total_at`."""
        loop = asyncio.get_running_loop()
        if within_s is None:
            within_s = self.timeouts.connect_s
        try:
            async with asyncio.timeout(min(within_s, total_at - self.clock())):
                _, made = await loop.create_connection(
                    lambda: cast(asyncio.Protocol, Connection(self)),
                    self._host,
                    self._port,
                    ssl=self._tls,
                    server_hostname=self._host if self._tls is not None else None,
                )
        except TimeoutError as error:
            if self.clock() >= total_at:
                raise DeadlineExceeded.passed() from error
            raise WorkerUnreachable("the worker did not accept a connection in time", code="connect_timeout") from error
        except OSError as error:
            raise WorkerUnreachable("no connection to the worker") from error
        connection = cast(Connection, made)
        self._open.add(connection)
        self._own.add(connection)
        return connection

    def keep(self, connection: Connection) -> None:
        """A connection is free again; above the limit the oldest idle one is closed."""
        self._idle.append(connection)
        if len(self._idle) > self._max_idle:
            self._idle.pop(0).overdue(self.clock())

    def lost(self, connection: Connection) -> None:
        """A connection is gone."""
        self.deadlines.forget(connection)
        self._open.discard(connection)
        self._own.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def wrote(self, since: float) -> bool:
        """Whether bytes of some answer have come after `since`, when this was asked before. Costs a look at each."""
        now, found = self.clock(), False
        for connection in self._own:
            found = connection.wrote(since, now) or found
        return found

    def close_idle(self) -> None:
        """Close what waits; what works goes on and is closed by its age later."""
        now = self.clock()
        while self._idle:
            self._idle.pop().overdue(now)
