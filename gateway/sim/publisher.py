"""KV events of a simulated engine on ZeroMQ, as vLLM sends them: PUB for live batches, ROUTER for replay.

Wire format (vLLM 0.9 to 0.33):
- live: three frames `[topic, sequence (8 bytes, big-endian), payload]`; the sequence starts at 0 for each publisher;
- payload: msgpack array `[unix seconds, [events], rank]`; an event is a map with the key `type` (from 0.24 on) or an
  array with the type first and trailing defaults cut off (before);
- replay: a DEALER asks `["", start sequence]` and gets each buffered batch from there on, then an end marker with
  sequence `ff * 8` and an empty payload; from 0.26 on each reply carries the topic before the sequence.

Rules:
1. A batch that was lost on purpose (`lose`) consumes its sequence number and stays in the replay buffer.
2. While held, batches keep their numbers and their order and go out on release.
3. `close` frees the ports before it returns, so a publisher that follows may bind them.

Runs on the event loop without a task: the replay socket's descriptor wakes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import zmq

_END = b"\xff" * 8
_MEDIUM = "GPU"


class Encoding(StrEnum):
    """Form of an event: `map` from vLLM 0.24 on, `array` before."""

    MAP = "map"
    ARRAY = "array"


class Replay(StrEnum):
    """Layout of replay answers: `new` from vLLM 0.26 on, `old` before, `off` without the socket."""

    OFF = "off"
    OLD = "old"
    NEW = "new"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """`hashes[i]` names tokens `[i * block_size : (i + 1) * block_size]` of `token_ids`; `extra_keys` has one entry a
    block (adapter name, cache salt in the prompt's first block), None where there is nothing beside the tokens."""

    hashes: Sequence[int]
    parent: int | None
    token_ids: Sequence[int]
    block_size: int
    adapter: str | None = None
    extra_keys: Sequence[Sequence[str] | None] | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One event a block on the wire."""

    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Every block of every medium is gone."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


def encode_batch(events: Sequence[Event], *, unix_s: float, rank: int, encoding: Encoding) -> bytes:
    """The payload of one batch."""
    wire: list[object] = []
    for event in events:
        match event:
            case BlockStored():
                wire.append(_stored(event, encoding))
            case BlockRemoved():
                wire.extend(_removed(block, encoding) for block in event.hashes)
            case AllBlocksCleared():
                kind = "AllBlocksCleared"
                wire.append([kind] if encoding is Encoding.ARRAY else {"type": kind})
    return msgspec.msgpack.encode([unix_s, wire, rank])


def _stored(event: BlockStored, encoding: Encoding) -> object:
    lora_id = 1 if event.adapter is not None else None
    hashes, tokens = list(event.hashes), list(event.token_ids)
    extra = event.extra_keys if event.extra_keys is not None else [None] * len(hashes)
    if encoding is Encoding.ARRAY:
        row = ["BlockStored", hashes, event.parent, tokens, event.block_size, lora_id, _MEDIUM, event.adapter]
        return row if event.extra_keys is None else [*row, extra]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": event.parent,
        "token_ids": tokens,
        "block_size": event.block_size,
        "lora_id": lora_id,
        "medium": _MEDIUM,
        "lora_name": event.adapter,
        "extra_keys": extra,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def _removed(block: int, encoding: Encoding) -> object:
    if encoding is Encoding.ARRAY:
        return ["BlockRemoved", [block], _MEDIUM]
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": _MEDIUM, "group_idx": 0}


class EventPublisher:
    """The life of one publisher process. Ports of 0 take free ones; the newest `buffer_steps` batches are replayable.

    Raises zmq.ZMQError when a port is taken.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int = 0,
        replay_port: int = 0,
        topic: str = "",
        rank: int = 0,
        encoding: Encoding = Encoding.MAP,
        replay: Replay = Replay.NEW,
        buffer_steps: int = 10_000,
    ) -> None:
        self._topic = topic.encode()
        self._rank = rank
        self._encoding = encoding
        self._replay = replay
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._held: list[tuple[int, bytes]] | None = None
        self._lose = 0
        self.sequence = 0
        self.replays = 0
        self._context = zmq.Context()
        self._replay_socket: zmq.Socket[bytes] | None = None
        self._replay_fd = -1
        self.replay_port: int | None = None
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.SNDHWM, 100_000)
            self.port = _bind(self._pub, host, port)
            if replay is not Replay.OFF:
                self._replay_socket = self._context.socket(zmq.ROUTER)
                self._replay_socket.setsockopt(zmq.SNDHWM, 0)
                self.replay_port = _bind(self._replay_socket, host, replay_port)
                self._replay_fd = int(self._replay_socket.getsockopt(zmq.FD))
                self._loop.add_reader(self._replay_fd, self._answer_replays)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    # ---------------------------------------------------------------- publishing

    def publish(self, events: Sequence[Event], unix_s: float) -> None:
        """One batch; none when there are no events."""
        if not events:
            return
        payload = encode_batch(events, unix_s=unix_s, rank=self._rank, encoding=self._encoding)
        entry = (self.sequence, payload)
        self.sequence += 1
        self._buffer.append(entry)
        if self._lose:
            self._lose -= 1
        elif self._held is not None:
            self._held.append(entry)
        else:
            self._send(entry)
        if self._replay_socket is not None:
            self._answer_replays()

    def lose(self, batches: int) -> None:
        """The next `batches` batches are not sent."""
        self._lose = batches

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

    def close(self) -> None:
        """Close both sockets and wait until their ports are free (milliseconds)."""
        socket, self._replay_socket = self._replay_socket, None
        if socket is not None:
            self._loop.remove_reader(self._replay_fd)
            socket.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()

    def _send(self, entry: tuple[int, bytes]) -> None:
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


def _bind(socket: zmq.Socket[bytes], host: str, port: int) -> int:
    # ZeroMQ binds addresses, not names.
    address = "127.0.0.1" if host == "localhost" else host
    socket.bind(f"tcp://{address}:{port or '*'}")
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    return int(bytes(bound).rstrip(b"\0").rpartition(b":")[2])
