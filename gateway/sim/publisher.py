"""KV events of a simulated engine on ZeroMQ: PUB for live batches, ROUTER for replay.

Wire format (vLLM 0.9 to 0.33, SGLang 0.4.6 to 0.5.23); the payload is made by `gateway.sim.event_bytes`:
- live: three frames `[topic, sequence (8 bytes, big-endian), payload]`; the sequence starts at 0 for each publisher;
- replay: a DEALER asks `["", start sequence]` and gets each buffered batch from there on, then an end marker with
  sequence `ff * 8` and an empty payload; from vLLM 0.26 and SGLang 0.5.22 on each reply carries the topic before the
  sequence.

Rules:
1. A batch that was lost on purpose (`lose`) consumes its sequence number; it stays in the replay buffer unless it is
   to be lost for replays too.
2. While held, batches keep their numbers and their order and go out on release.
3. `close` frees the ports before it returns, so a publisher that follows may bind them.

Runs on the event loop without a task: the replay socket's descriptor wakes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import zmq

from gateway.sim.event_bytes import Event

_END = b"\xff" * 8

Encode = Callable[[Sequence[Event], float], bytes]
"""Makes the payload of a batch of its events and the time in Unix seconds."""


class Replay(StrEnum):
    """Layout of replay answers: `new` from vLLM 0.26 and SGLang 0.5.22 on, `old` before, `off` without the socket."""

    OFF = "off"
    OLD = "old"
    NEW = "new"


class EventPublisher:
    """The life of one publisher process (of one rank). Ports of 0 take free ones; the newest `buffer_steps` batches are
    replayable.

    Raises zmq.ZMQError when a port is taken.
    """

    def __init__(
        self,
        encode: Encode,
        *,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        topic: str = "",
        replay: Replay = Replay.NEW,
        buffer_steps: int = 10_000,
        online: bool = True,
    ) -> None:
        self._topic = topic.encode()
        self._encode = encode
        self._replay = replay
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._held: list[tuple[int, bytes]] | None = None
        self._lose = 0
        self._lost_for_good = False
        self.sequence = 0
        self.replays = 0
        self._host = host
        self._pub: zmq.Socket[bytes] | None = None
        self._replay_socket: zmq.Socket[bytes] | None = None
        self._replay_fd = -1
        self.port = port
        self.replay_port = None if replay is Replay.OFF else replay_port
        if online:
            self.go_online()

    # ---------------------------------------------------------------- sockets

    def go_online(self) -> None:
        """Open the sockets, at the ports they had; nothing to do when they are open. Raises zmq.ZMQError."""
        if self._pub is not None:
            return
        self._context = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.SNDHWM, 100_000)
            self.port = bind(self._pub, self._host, self.port)
            if self.replay_port is not None:
                self._replay_socket = self._context.socket(zmq.ROUTER)
                self._replay_socket.setsockopt(zmq.SNDHWM, 0)
                self.replay_port = bind(self._replay_socket, self._host, self.replay_port)
                self._replay_fd = int(self._replay_socket.getsockopt(zmq.FD))
                self._loop.add_reader(self._replay_fd, self._answer_replays)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            self._pub = self._replay_socket = None
            raise

    def go_offline(self) -> None:
        """Close both sockets and wait until their ports are free (milliseconds). Batches are numbered and kept for
        replays as before, and reach nobody."""
        pub, self._pub = self._pub, None
        if pub is None:
            return
        socket, self._replay_socket = self._replay_socket, None
        if socket is not None:
            self._loop.remove_reader(self._replay_fd)
            socket.close(linger=0)
        pub.close(linger=0)
        self._context.term()

    def close(self) -> None:
        """The end of this publisher."""
        self.go_offline()

    # ---------------------------------------------------------------- publishing

    def publish(self, events: Sequence[Event], unix_s: float) -> None:
        """One batch; none when there are no events."""
        if not events:
            return
        entry = (self.sequence, self._encode(events, unix_s))
        self.sequence += 1
        if not (self._lose and self._lost_for_good):
            self._buffer.append(entry)
        if self._lose:
            self._lose -= 1
        elif self._held is not None:
            self._held.append(entry)
        else:
            self._send(entry)
        if self._replay_socket is not None:
            self._answer_replays()

    def lose(self, batches: int, *, for_good: bool = False) -> None:
        """The next `batches` batches are not sent; `for_good`: nor replayed, as when they could not be encoded."""
        self._lose = batches
        self._lost_for_good = for_good

    def hold(self) -> None:
        """Keep batches back until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Send what was held, in order."""
        held, self._held = self._held, None
        for entry in held or ():
            self._send(entry)

    def trim(self) -> None:
        """Forget the history: a replay has nothing before this moment."""
        self._buffer.clear()

    def _send(self, entry: tuple[int, bytes]) -> None:
        if self._pub is not None:
            self._pub.send_multipart((self._topic, entry[0].to_bytes(8, "big"), entry[1]))

    # ---------------------------------------------------------------- replay

    def _answer_replays(self) -> None:
        # The descriptor signals edges only: go on until nothing is left to read.
        socket = self._replay_socket
        while socket is not None and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = socket.recv_multipart(zmq.NOBLOCK)
            if len(frames) == 3 and not frames[1] and len(frames[2]) == 8:
                self._replay_from(socket, frames[0], int.from_bytes(frames[2], "big"))

    def _replay_from(self, socket: zmq.Socket[bytes], peer: bytes, start: int) -> None:
        self.replays += 1
        new = self._replay is Replay.NEW
        for sequence, payload in self._buffer:
            if sequence >= start:
                number = sequence.to_bytes(8, "big")
                topic = (self._topic,) if new else ()
                socket.send_multipart((peer, b"", *topic, number, payload))
        socket.send_multipart((peer, b"", b"", _END, b"") if new else (peer, b"", _END, b""))


def bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    """The port that is bound: the given one, or a free one for 0. Raises zmq.ZMQError when it is taken."""
    # ZeroMQ binds addresses, not names.
    address = "127.0.0.1" if host == "localhost" else host
    socket.bind(f"tcp://{address}:{port or '*'}")
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    return int(bytes(bound).rstrip(b"\0").rpartition(b":")[2])
