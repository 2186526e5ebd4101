"""The ZMQ sockets of one rank's event feed: its subscription, and the replay asked for last.

Rules:
1. Each replay request has a connection of its own: replies to an earlier request cannot be mistaken for replies to it.
2. Everything is closed without lingering.

Sockets are read directly, woken by their file descriptor: zmq.asyncio makes a future and a poll per message, which
costs several times what decoding it does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import zmq

from gateway.kv.events import replay_request
from gateway.records import EventSource

# Messages zmq holds for us while the loop is busy; beyond it TCP pushes back, and the engine keeps, then drops, them.
_RECEIVE_LIMIT: Final = 20_000

_MAX_MESSAGE_BYTES: Final = 256 * 1024 * 1024
_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2_000

# A half-open connection is noticed, and made anew, after this long.
_HEARTBEAT_MS: Final = 10_000
_HEARTBEAT_TIMEOUT_MS: Final = 30_000


class FeedSockets:
    """Open while inside `subscribed`. Raises zmq.ZMQError where an endpoint is malformed or the context closed."""

    __slots__ = ("_context", "_replay", "_source")

    def __init__(self, source: EventSource, context: zmq.Context[Any]) -> None:
        self._source = source
        self._context = context
        self._replay: zmq.Socket[bytes] | None = None

    @contextmanager
    def subscribed(self) -> Iterator[Subscription]:
        """The subscription, being connected; the end of it closes the replay too."""
        socket = zmq.Socket(self._context, zmq.SUB)
        try:
            configure(socket, messages=_RECEIVE_LIMIT, message_bytes=_MAX_MESSAGE_BYTES)
            monitor = socket.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED)
            try:
                socket.setsockopt(zmq.SUBSCRIBE, self._source.topic.encode())
                socket.connect(self._source.endpoint)
                yield Subscription(socket, monitor)
            finally:
                socket.disable_monitor()
                monitor.close(linger=0)
        finally:
            socket.close(linger=0)
            self.close_replay()

    @property
    def replays(self) -> bool:
        """Whether a replay was asked for and not closed."""
        return self._replay is not None

    def reply(self) -> list[bytes] | None:
        """Frames of the next reply to the replay asked for last, if there is one."""
        return None if self._replay is None else _receive(self._replay)

    def ask(self, from_seq: int) -> None:
        """Ask for a replay, over a new connection; nothing where there is no endpoint."""
        self.close_replay()
        endpoint = self._source.replay_endpoint
        if endpoint is None:
            return
        self._replay = zmq.Socket(self._context, zmq.DEALER)
        configure(self._replay, messages=_RECEIVE_LIMIT, message_bytes=_MAX_MESSAGE_BYTES)
        self._replay.connect(endpoint)
        self._replay.send_multipart(replay_request(from_seq), zmq.NOBLOCK)

    def close_replay(self) -> None:
        """Further replies are of no use. Idempotent."""
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None

    async def wait(
        self, subscription: Subscription, wake: asyncio.Event, wanted: Callable[[], object], wait_s: float | None
    ) -> None:
        """Until a socket has something, `wake` is set, or so many seconds have passed. `wanted` says whether there was
        something to do before."""
        loop = asyncio.get_running_loop()
        sockets = [*subscription, self._replay] if self._replay is not None else [*subscription]
        descriptors = [int(socket.getsockopt(zmq.FD)) for socket in sockets]
        wake.clear()
        for descriptor in descriptors:
            loop.add_reader(descriptor, wake.set)
        try:
            # The descriptor tells of changes only: what came before it was watched must be asked for.
            if wanted() or any(readable(socket) for socket in sockets):
                return
            async with asyncio.timeout(wait_s):
                await wake.wait()
        except TimeoutError:
            return
        finally:
            for descriptor in descriptors:
                loop.remove_reader(descriptor)


class Subscription(NamedTuple):
    """A subscription, and the socket that brings a message for each of its connections that is ready."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def live(self) -> list[bytes] | None:
        """Frames of the next live message, if there is one."""
        return _receive(self.socket)

    def connected(self) -> bool:
        """Whether a connection has become ready since this was asked last."""
        return readable(self.monitor) and _receive(self.monitor) is not None


def configure(socket: zmq.Socket[bytes], *, messages: int, message_bytes: int) -> None:
    """Limits of a socket that follows an engine: messages that zmq holds for us, the size of one; connections are made
    again and again, and noticed when they are half open."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, messages)
    socket.setsockopt(zmq.MAXMSGSIZE, message_bytes)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, 1)


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is there; a third of the cost of finding none by receiving."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def _receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
