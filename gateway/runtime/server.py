"""The server of one port: uvicorn's, with limits of ours and an end at which nothing is left.

Rules:
1. Signals are the command's: uvicorn's handlers are not installed, and `end` ends it.
2. Without its clock: it would tick ten times a second to look for the end, and waking an idle process costs more than
   passing a chunk.
3. After the end no connection and no request is left: requests are cancelled, and what was written may be taken for a
   second more. Who was accepted in the same moment is cut as soon as the connection is made, which may be later: a TLS
   handshake takes its time.
4. A request's head must come within the header time, the first one's from the beginning of the connection, and its body
   within the body's: else the connection is closed. Our own protocol (`edge`) sees to that itself, uvicorn's does not:
   whoever reached the port could hold all of the process's open files.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from typing import Any

import uvicorn

from gateway.settings import ServerSettings

_BACKLOG = 2048
_TLS_SHUTDOWN_S = 2.0
"""A client that does not say goodbye is cut."""
_LAST_BYTES_S = 1.0
"""At the end: for clients that have not taken the last bytes of their answer."""
_LOOK_S = 0.02


class PortServer(uvicorn.Server):
    """Serves `app` with the protocol class `http` (as `uvicorn.Config` takes it), over TLS where `tls` is given.
    `serving` is set once it accepts connections."""

    def __init__(self, app: Any, *, http: Any, tls: ssl.SSLContext | None, limits: ServerSettings) -> None:
        config = uvicorn.Config(
            app,
            http=http,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            # uvicorn itself takes whole seconds only; our own protocol does not use it for timers.
            timeout_keep_alive=limits.idle_timeout_s,  # type: ignore[arg-type]
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self.serving = asyncio.Event()
        self._tls = tls
        self._limits = limits
        self._own_protocol = http != "httptools"
        self._ended = asyncio.Event()

    def end(self) -> None:
        """Stop accepting, and cut what is open; `serve` returns when that is done."""
        self.force_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        await self._ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # As uvicorn does it, with limits on how long the beginning and the end of TLS may take.
        await self.lifespan.startup()
        config = self.config
        protocol: Any = config.http_protocol_class
        if not self._own_protocol:
            protocol = _timed(protocol, head_s=self._limits.header_timeout_s, body_s=self._limits.body_timeout_s)
        protocol = _cut_late(protocol, self._ended)
        make = functools.partial(protocol, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        options: dict[str, Any] = {}
        if self._tls is not None:
            options = {"ssl_handshake_timeout": self._limits.header_timeout_s, "ssl_shutdown_timeout": _TLS_SHUTDOWN_S}
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(make, sock=listener, ssl=self._tls, backlog=config.backlog, **options)
            for listener in sockets or ()
        ]
        self.started = True
        self.serving.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # First only accept no more: asyncio loses a connection, and leaves it open, that was accepted before its server
        # was closed and has its first turn behind that.
        for listener in sockets or ():
            asyncio.get_running_loop().remove_reader(listener)
        await asyncio.sleep(0)
        await super().shutdown(sockets)
        # uvicorn leaves open what is in the middle of an answer, and goes on with the request.
        requests = set(self.server_state.tasks)
        for request in requests:
            request.cancel()
        if requests:
            await asyncio.wait(requests, timeout=_LAST_BYTES_S)
        left: set[Any] = self.server_state.connections
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_BYTES_S):
                while any(connection.transport.is_closing() for connection in left):  # noqa: ASYNC110  once, at the end
                    await asyncio.sleep(_LOOK_S)
        for connection in list(left):
            connection.transport.abort()


def _cut_late(protocol: Any, ended: asyncio.Event) -> Any:
    """The same protocol class; what is made of it is cut at once when the server has ended by then (rule 3)."""

    class Cut(protocol):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if ended.is_set():
                transport.abort()

    return Cut


def _timed(protocol: Any, *, head_s: float, body_s: float) -> Any:
    """The same protocol class, uvicorn's own; for its heads and bodies there is a time (rule 4)."""

    class Timed(protocol):  # type: ignore[misc]
        _timer: asyncio.TimerHandle | None = None
        _awaited: Any = None
        """What was waited for when the timer was set."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._timer is None:
                self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._timer is not None:
                self._timer.cancel()

        def _waits_for(self) -> Any:
            """The body of this request, or the head behind it; None: nothing, or uvicorn's own time runs, as it does
            behind an answer until bytes come."""
            cycle = self.cycle
            if self.timeout_keep_alive_task is not None or self.transport.is_closing():
                return None
            between = cycle is None or cycle.response_complete
            return (cycle, between) if between or cycle.more_body else None

        def _watch(self) -> None:
            self._awaited = self._waits_for()
            if self._awaited is not None:
                _, head = self._awaited
                self._timer = self.loop.call_later(head_s if head else body_s, self._look)

        def _look(self) -> None:
            self._timer = None
            if self._awaited == self._waits_for():
                self.transport.close()
            else:
                self._watch()

    return Timed


def listen(host: str, port: int, *, keys: str) -> socket.socket:
    """A listening socket. Raises OSError whose text names the address and the `keys` that give it another one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with {keys}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket, host: str, *, tls: bool = False) -> str:
    """Base URL of what listens there, as somebody on this machine reaches it; `host` as it was configured."""
    port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"
