"""A worker's event, replay and load endpoints, tried as the gateway would use them.

Rules:
1. Connecting proves nothing with ZeroMQ: only a completed handshake, told by the socket's monitor, or an answer, does.
2. A replay is asked for from beyond the newest batch: the answer is the end marker alone, so trying costs the engine
   nothing.
3. Sockets end without lingering, whatever happened.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from gateway.doctor.checks import Reach
from gateway.kv.events import MalformedMessage, parse_live, parse_reply, replay_request
from gateway.records import LoadEndpoint
from gateway.upstream.load_socket import parse_load

_BEYOND = (1 << 63) - 1
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_RECEIVE_LIMIT = 10_000
"""Messages kept while the test prompts run; a busy worker sends some hundreds a second."""


class Subscription:
    """A SUB socket at one rank's event endpoint; made by `subscribed`."""

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, topic: str) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._topic = topic

    async def reach(self, within_s: float) -> Reach:
        """Connect and wait for the handshake."""
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._socket.setsockopt(zmq.SUBSCRIBE, self._topic.encode())
        monitor = self._socket.get_monitor_socket(events)
        reach = Reach.NOBODY
        try:
            async with asyncio.timeout(within_s):
                self._socket.connect(self._endpoint)
                while reach is not Reach.OPEN:
                    message = await recv_monitor_message(monitor)
                    reach = Reach.OPEN if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else Reach.FOREIGN
        except TimeoutError:
            pass
        except zmq.ZMQError:
            return Reach.NO_ADDRESS
        finally:
            self._socket.disable_monitor()
            monitor.close(linger=0)
        return reach

    async def frames(self) -> list[bytes]:
        """Those of the next message; waits for it."""
        return await self._socket.recv_multipart()

    async def next(self, within_s: float) -> bytes | None:
        """The payload of the next message; None when none came in time, empty for one that is no event message."""
        try:
            async with asyncio.timeout(within_s):
                frames = await self.frames()
        except TimeoutError:
            return None
        try:
            return parse_live(frames).payload
        except MalformedMessage:
            return b""


async def load_reach(context: zmq.asyncio.Context, source: LoadEndpoint, *, reach_s: float, listen_s: float) -> Reach:
    """Whether a rank's load comes from this endpoint: there is somebody within `reach_s`, and then within `listen_s` a
    message that can be read (an engine says something every second)."""
    async with subscribed(context, source.endpoint, source.topic) as feed:
        found = await feed.reach(reach_s)
        if found is not Reach.OPEN:
            return found
        found = Reach.SILENT
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(listen_s):
                while found is not Reach.OPEN:
                    try:
                        parse_load(await feed.frames(), source.rank)
                    except ValueError:
                        found = Reach.FOREIGN
                    else:
                        found = Reach.OPEN
    return found


@asynccontextmanager
async def subscribed(context: zmq.asyncio.Context, endpoint: str, topic: str) -> AsyncIterator[Subscription]:
    """A subscription, not connected yet."""
    with context.socket(zmq.SUB) as socket:
        _configure(socket)
        yield Subscription(socket, endpoint, topic)


async def replay_reach(context: zmq.asyncio.Context, endpoint: str, within_s: float) -> Reach:
    """Whether replays are answered at this endpoint."""
    with context.socket(zmq.DEALER) as socket:
        _configure(socket)
        try:
            async with asyncio.timeout(within_s):
                socket.connect(endpoint)
                await socket.send_multipart(replay_request(_BEYOND))
                parse_reply(await socket.recv_multipart())
        except TimeoutError:
            return Reach.NOBODY
        except MalformedMessage:
            return Reach.FOREIGN
        except zmq.ZMQError:
            return Reach.NO_ADDRESS
    return Reach.OPEN


def _configure(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, _RECEIVE_LIMIT)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
