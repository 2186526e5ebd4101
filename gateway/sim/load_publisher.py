"""Load of a simulated SGLang engine on ZeroMQ, one PUB socket a rank.

Wire format (0.5.19 to 0.5.23): three frames `[b"load", sequence (8 bytes, big-endian, from 0), payload]`; the payload
is a msgpack array that begins with `"LoadStat"` and has every field, up to 0.5.19 the first five.

Rules (as the engine's):
1. A change goes out at once, but no more often than every `LEAST_GAP_S`; nothing new every `HEARTBEAT_S`.
2. Few messages are kept for a subscriber that does not read: the next ones tell more.

Runs on the event loop without a task, by one timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import zmq

from gateway.sim.publisher import bind
from gateway.sim.releases import Release

LOAD_TOPIC = "load"
HEARTBEAT_S = 1.0
LEAST_GAP_S = 0.05
_SEND_LIMIT = 8


class LoadStat(NamedTuple):
    """What a rank's scheduler knows, in the order of the wire: requests, tokens of KV in use and room for them, the
    rank; then tokens that those which wait have to compute, tokens in use with the waiting prompts, the most requests
    that run at a time, and tokens and microseconds of prefills since the start."""

    running: int
    waiting: int
    tokens: int
    capacity: int
    rank: int | None
    waiting_uncached_tokens: int = 0
    total_tokens: int = 0
    max_running: int = 0
    prefill_tokens: int = 0
    prefill_us: int = 0


def encode_load(stat: LoadStat, release: Release) -> bytes:
    """The payload of one message."""
    fields = list(stat) if release >= (0, 5, 20) else list(stat[:5])
    return msgspec.msgpack.encode(["LoadStat", *fields])


class LoadPublisher:
    """Publishes what `look` sees, at `host` and `port` (0: a free one); call `changed` when that may be something else.

    Raises zmq.ZMQError when the port is taken.
    """

    def __init__(
        self, look: Callable[[], LoadStat], release: Release, *, host: str, port: int, online: bool = True
    ) -> None:
        self.port = port
        self.sequence = 0
        self._look = look
        self._release = release
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._pub: zmq.Socket[bytes] | None = None
        self._last: LoadStat | None = None
        self._looked_at = self._sent_at = float("-inf")
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        if online:
            self.go_online()
        self.changed()

    def go_online(self) -> None:
        """Open the socket; nothing to do when it is open. Raises zmq.ZMQError."""
        if self._pub is not None:
            return
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.SNDHWM, _SEND_LIMIT)
            self.port = bind(self._pub, self._host, self.port)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            self._pub = None
            raise

    def go_offline(self) -> None:
        """Close the socket and wait until its port is free (milliseconds); what is published reaches nobody."""
        pub, self._pub = self._pub, None
        if pub is not None:
            pub.close(linger=0)
            self._context.term()

    def close(self) -> None:
        """The end of this publisher."""
        if self._timer is not None:
            self._timer.cancel()
        self.go_offline()

    def changed(self) -> None:
        """The load may be another."""
        if not self._soon:
            self._soon = True
            self._arm(max(0.0, self._looked_at + LEAST_GAP_S - self._loop.time()))

    def _arm(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(wait_s, self._publish)

    def _publish(self) -> None:
        self._soon = False
        now = self._looked_at = self._loop.time()
        stat = self._look()
        if stat != self._last or now - self._sent_at >= HEARTBEAT_S:
            self._last, self._sent_at = stat, now
            if self._pub is not None:
                number = self.sequence.to_bytes(8, "big")
                self._pub.send_multipart((LOAD_TOPIC.encode(), number, encode_load(stat, self._release)))
            self.sequence += 1
        self._arm(HEARTBEAT_S)
