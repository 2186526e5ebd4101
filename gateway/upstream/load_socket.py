"""Load of SGLang's workers as they publish it: one ZeroMQ socket for each data-parallel rank of a server.

Wire format (SGLang 0.5.19 on, `managers/scheduler_components/load_publisher.py`), behind `--load-publish-endpoint`:
three frames `[topic, sequence (8 bytes, big-endian), payload]`; the payload is a msgpack array `["LoadStat", running,
waiting, tokens, capacity, rank]`, from 0.5.20 on with five further numbers. `tokens` are those in use of `capacity` (0:
unknown). A change is published at once, nothing new once a second. The sequence starts at 0 with each process.

Rules:
1. Only the newest message of a rank counts, and none is older than the engine's last step. The socket is drained every
   `DRAIN_S`; ZeroMQ's own "keep the newest" (ZMQ_CONFLATE) cannot be used with several frames.
2. A rank's load is the socket's while the last message is younger than `FRESH_S`. Then the polls take over.
3. Whose load it is says the address. A message that names another rank comes from another server that has the port: it
   is none of this one's, and counts as unreadable.
4. What cannot be read is counted, and says nothing of the load or of its age. Nothing of it ends the loop.
5. A sequence that goes back is a new process. It is told at most every `RESTART_S`: what publishes out of order must
   not have its worker probed without end.
6. A socket that brought nothing for `reopen_s` is opened anew: zmq makes lost connections again, but gives one up for
   good over a message that is too large or breaks its protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
import zmq

from gateway.records import LoadEndpoint, LoadSample, LoadSource
from gateway.upstream.feed_sockets import configure, readable
from gateway.upstream.load_text import together

DRAIN_S: Final = 0.25
"""Least seconds between two looks: as often as a tightened poll comes by default. What is learned from loads (who else
is there, how much fits) was made for that pace."""

FRESH_S: Final = 3.0
"""An engine says something every second. With the next poll the sample is still younger than what is forgotten."""

UNHEARD_S: Final = 2 * FRESH_S
"""Silence that is worth telling an operator; before that it may be a long step of the engine, or its start."""

REOPEN_S: Final = 10.0
RESTART_S: Final = 10.0

_MOST: Final = 256
"""Messages taken of a rank in one drain, and held by zmq meanwhile: ten seconds of a busy engine's. What floods a
socket costs no more than this."""

_MESSAGE_BYTES: Final = 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class _LoadStat(msgspec.Struct, array_like=True, tag="LoadStat", gc=False):
    """The payload; fields after these are not read."""

    running: _Count
    waiting: _Count
    tokens: _Count
    capacity: _Count
    rank: int | None = None
    waiting_uncached_tokens: Any = None
    total_tokens: _Count | None = None


_decode: Final = msgspec.msgpack.Decoder(_LoadStat).decode


def parse_load(frames: Sequence[bytes], rank: int) -> tuple[int, LoadSample]:
    """Sequence and load of one message of a rank. Raises ValueError for what is no such message."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise ValueError("a load message has three frames, the second of 8 bytes")
    try:
        stat = _decode(frames[2])
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if stat.rank not in (None, rank):
        raise ValueError(f"load of rank {stat.rank} where rank {rank} publishes")
    usage = min(1.0, stat.tokens / stat.capacity) if stat.capacity else None
    tokens = (stat.tokens if stat.total_tokens is None else stat.total_tokens) if usage is None else None
    sample = LoadSample(stat.running, stat.waiting, usage, kv_tokens=tokens, source=LoadSource.SOCKET)
    return int.from_bytes(frames[1], "big"), sample


class RankLoad:
    """What one rank has said: its newest load, when it was heard, and counts of messages."""

    __slots__ = ("_sequence", "active_at", "endpoint", "errors", "heard_at", "messages", "restarts", "sample")

    def __init__(self, endpoint: LoadEndpoint) -> None:
        self.endpoint = endpoint
        self.sample: LoadSample | None = None
        self.heard_at: float | None = None
        self.active_at: float | None = None
        """When its socket was opened, or brought anything at all."""
        self.messages = 0
        self.errors = 0
        self.restarts = 0
        self._sequence = 0

    def take(self, messages: Sequence[Sequence[bytes]], now: float) -> bool:
        """What a drain has found, oldest first and at least one; whether there is a new load in it."""
        self.messages += len(messages)
        self.active_at = now
        for frames in reversed(messages):
            try:
                sequence, self.sample = parse_load(frames, self.endpoint.rank)
            except ValueError:
                self.errors += 1
                continue
            if sequence < self._sequence:
                self.restarts += 1
            self._sequence, self.heard_at = sequence, now
            return True
        return False

    def fresh(self, now: float) -> bool:
        """Whether what it said last still holds."""
        return self.heard_at is not None and now - self.heard_at <= FRESH_S


class LoadSocket:
    """Hears the ranks of one server; whoever has it calls `drain` every `DRAIN_S`, and `close` in the end. Make a new
    one when their addresses change.

    `whole`: the ranks are one worker, whose load is that of all of them; it is told under None, once all are fresh.
    `on_load` gets what is new, by rank. `on_restart` is called when a rank has begun anew, before its load is told.
    """

    def __init__(
        self,
        endpoints: Sequence[LoadEndpoint],
        *,
        whole: bool,
        context: zmq.Context[Any],
        clock: Callable[[], float],
        on_load: Callable[[Mapping[int | None, LoadSample]], None],
        on_restart: Callable[[], None],
        reopen_s: float = REOPEN_S,
    ) -> None:
        self.endpoints = tuple(endpoints)
        self.ranks: Mapping[int, RankLoad] = {endpoint.rank: RankLoad(endpoint) for endpoint in endpoints}
        self.whole = whole
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._context = context
        self._clock = clock
        self._since = clock()
        self._on_load = on_load
        self._on_restart = on_restart
        self._reopen_s = reopen_s
        self._restarted_at = float("-inf")

    def fresh(self, rank: int | None) -> bool:
        """Whether the load of this rank, or of all (None), has been heard and still holds."""
        now = self._clock()
        if rank is None:
            return all(heard.fresh(now) for heard in self.ranks.values())
        return rank in self.ranks and self.ranks[rank].fresh(now)

    def begin_anew(self) -> None:
        """The server was away: its silence counts from now on."""
        self._since = self._clock()

    def unheard(self) -> tuple[LoadEndpoint, ...]:
        """Where nothing that can be read has come from for `UNHEARD_S`."""
        now = self._clock()
        return tuple(
            heard.endpoint
            for heard in self.ranks.values()
            if now - self._since > UNHEARD_S and (heard.heard_at is None or now - heard.heard_at > UNHEARD_S)
        )

    def drain(self) -> None:
        """Take what has come since the last time; the first time opens the sockets. Never waits.

        Raises zmq.ZMQError when an address is malformed or the context closed.
        """
        now, restarts = self._clock(), self._restarts
        new: dict[int | None, LoadSample] = {}
        for rank, heard in self.ranks.items():
            socket = self._open(heard, now)
            messages: list[list[bytes]] = []
            while len(messages) < _MOST and readable(socket):
                messages.append(socket.recv_multipart(zmq.NOBLOCK))
            if messages and heard.take(messages, now) and heard.sample is not None:
                new[rank] = heard.sample
        if self._restarts != restarts and now - self._restarted_at >= RESTART_S:
            self._restarted_at = now
            self._on_restart()
        if self.whole:
            new = {None: self._sum()} if new and self.fresh(None) else {}
        if new:
            self._on_load(new)

    def close(self) -> None:
        """Hear nothing more; a later `drain` begins again."""
        while self._sockets:
            self._sockets.popitem()[1].close(linger=0)

    def _open(self, heard: RankLoad, now: float) -> zmq.Socket[bytes]:
        """The rank's socket; a new one where there is none, or one that was silent for too long (rule 6)."""
        rank = heard.endpoint.rank
        socket = self._sockets.get(rank)
        if socket is not None:
            if heard.active_at is not None and now - heard.active_at <= self._reopen_s:
                return socket
            socket.close(linger=0)
        socket = self._sockets[rank] = zmq.Socket(self._context, zmq.SUB)
        heard.active_at = now
        configure(socket, messages=_MOST, message_bytes=_MESSAGE_BYTES)
        socket.setsockopt(zmq.SUBSCRIBE, heard.endpoint.topic.encode())
        socket.connect(heard.endpoint.endpoint)
        return socket

    @property
    def _restarts(self) -> int:
        return sum(heard.restarts for heard in self.ranks.values())

    def _sum(self) -> LoadSample:
        return together([heard.sample for heard in self.ranks.values() if heard.sample is not None])
