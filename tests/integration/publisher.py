"""A publisher of KV events with a replay socket, over real ZMQ, and a feed that follows it.

Written from the wire format alone; it shares no code with the simulated engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import msgspec
import uvloop
import zmq

from gateway.kv.feed_state import FeedState
from gateway.kv.feed_words import FeedLimits
from gateway.kv.index import KvIndex
from gateway.records import EventSource, Slot, Tier, WorkerId
from gateway.upstream.kv_feed import KvFeed, TurnLimits

SIZE = 4
WORKER = Slot(2)
DEADLINE_S = 30.0


def stored(name: int, parent: int | None = None) -> dict[str, Any]:
    """Block `name` with tokens of its own."""
    return {
        "type": "BlockStored",
        "block_hashes": [name],
        "parent_block_hash": parent,
        "token_ids": [name, 1, 2, 3],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(name: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU"}


class Engine:
    """A publisher with a replay buffer. `layout` is `old`, `new` or `off`; `reply_limit` cuts every replay after so
    many batches, without an end marker, as engines with a full send queue do."""

    def __init__(self, context: zmq.Context[Any], *, layout: str = "new", topic: bytes = b"kv@w@m") -> None:
        self._context = context
        self._layout = layout
        self._topic = topic
        self.reply_limit: int | None = None
        self.requests: list[int] = []
        self.answering = threading.Event()
        self.answering.set()
        self.rank = 0
        self._live = context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.SNDHWM, 0)
        self._replay = context.socket(zmq.ROUTER)
        self._replay.setsockopt(zmq.SNDHWM, 0)
        self.port = self._live.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self._replay.bind_to_random_port("tcp://127.0.0.1")
        self._begin()

    def _begin(self) -> None:
        self.seq = 0
        self.buffer: list[tuple[int, bytes]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def source(self) -> EventSource:
        replay = None if self._layout == "off" else f"tcp://127.0.0.1:{self.replay_port}"
        return EventSource(0, f"tcp://127.0.0.1:{self.port}", replay, "kv@")

    def publish(self, *events: dict[str, Any], lose: bool = False, raw: bytes | None = None) -> None:
        payload = raw if raw is not None else msgspec.msgpack.encode([time.time(), list(events), self.rank])
        self.buffer.append((self.seq, payload))
        if not lose:
            self._live.send_multipart([self._topic, self.seq.to_bytes(8, "big"), payload])
        self.seq += 1

    def send(self, frames: list[bytes]) -> None:
        self._live.send_multipart(frames)

    async def subscriber(self) -> None:
        """Wait for a subscription: what is published before it is lost."""
        await until(lambda: bool(self._live.poll(0)))
        assert self._live.recv()[:1] == b"\x01"

    def restart(self, *events: dict[str, Any]) -> None:
        """A new process on the same ports: empty cache, sequence 0, no clear event. It publishes `events`, a batch
        each, before anybody can subscribe."""
        self._stop()
        self.cut()
        self._begin()
        for event in events:
            self.publish(event, lose=True)
        self.mend()

    def cut(self) -> None:
        """The event socket goes, its connections with it, and its port is free."""
        watch = self._live.get_monitor_socket(zmq.EVENT_CLOSED)
        self._live.close(linger=0)
        closed = watch.poll(DEADLINE_S * 1e3)  # by a thread of ZMQ's
        watch.close(linger=0)
        assert closed

    def mend(self) -> None:
        """The event socket is there again."""
        self._live = self._context.socket(zmq.XPUB)
        self._live.setsockopt(zmq.SNDHWM, 0)
        self._live.bind(f"tcp://127.0.0.1:{self.port}")

    def close(self) -> None:
        self._stop()
        self._live.close(linger=0)
        self._replay.close(linger=0)

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _serve(self) -> None:
        prefix = [b""] if self._layout == "old" else [b"", self._topic]
        end = [b"", b"\xff" * 8, b""] if self._layout == "old" else [b"", b"", b"\xff" * 8, b""]
        while not self._stopping.is_set():
            if not self._replay.poll(5):
                continue
            while not self.answering.wait(0.005) and not self._stopping.is_set():
                pass
            client, empty, start = self._replay.recv_multipart()
            assert empty == b""
            first = int.from_bytes(start, "big")
            self.requests.append(first)
            kept = [entry for entry in list(self.buffer) if entry[0] >= first]
            for seq, payload in kept[: self.reply_limit]:
                self._replay.send_multipart([client, *prefix, seq.to_bytes(8, "big"), payload])
            if self.reply_limit is None or len(kept) <= self.reply_limit:
                self._replay.send_multipart([client, *end])


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    context: zmq.Context[Any] = zmq.Context()
    made = Engine(context, **options)
    try:
        yield made
    finally:
        made.close()
        context.term()


@asynccontextmanager
async def following(
    source: EventSource,
    *,
    index: KvIndex | None = None,
    limits: FeedLimits | None = None,
    turns: TurnLimits | None = None,
    on_trust: Callable[[], None] = lambda: None,
) -> AsyncIterator[tuple[KvFeed, KvIndex]]:
    """A feed that runs, with an index of its own; leaving cancels it and proves that its sockets are closed."""
    if index is None:
        index = KvIndex()
        index.bind(WORKER, block_size=SIZE)
    context: zmq.Context[Any] = zmq.Context()
    feed = KvFeed(
        WorkerId("w"),
        WORKER,
        source,
        index=index,
        context=context,
        clock=time.monotonic,
        turns=asyncio.Lock(),
        on_trust=on_trust,
        state=FeedState(can_replay=source.replay_endpoint is not None, limits=limits),
        limits=turns,
    )
    task = asyncio.create_task(feed.run())
    try:
        yield feed, index
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(context.term)  # blocks for ever while a socket is open


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  # the index has no event to wait for
            await asyncio.sleep(0.002)


def resident(index: KvIndex) -> frozenset[int]:
    return index.engine_hashes(WORKER, 0, Tier.GPU)


def on_both_loops(scenario: Callable[[], Coroutine[Any, Any, None]], loop: str) -> None:
    if loop == "uvloop":
        uvloop.run(scenario())
    else:
        asyncio.run(scenario())
