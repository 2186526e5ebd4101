"""Workers that announce themselves in the store: the side-car's part and the gateway's.

One sorted set has a member for each worker: a record in JSON, scored with the store's own time (Unix seconds) at which
it ends unless it is announced again.

Rules:
1. Only the store's clock is used; those of workers and gateways may differ.
2. A worker stays as long as its last announcement was to last, whatever became of the record: a store that begins anew
   empty takes nobody out. After a time without answers everybody is given that long once more.
3. One that leaves in order says so, by a record that takes the place of its own, and is gone at the next look.
4. Of several records of one address the one that lasts longest counts. One that cannot be read is left out and logged,
   and does not keep others from being seen.
5. No more workers are kept than a look reads records, whatever became of those records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Annotated, Final

import msgspec
import structlog
from msgspec import Meta

from gateway.discovery import Found, Publish
from gateway.pool import MAX_WORKERS
from gateway.records import WorkerSpec
from gateway.replicas.store import STORE_ERRORS, Client, open_store
from gateway.store_address import StoreAddress

LIFE_PERIODS: Final = 3
"""Periods of the heartbeat an announcement lasts: two may be missed."""

_JITTER: Final = 0.1
_MAX_RECORDS: Final = 4 * MAX_WORKERS
_MAX_BYTES: Final = 8192
_KEPT_S: Final = 60.0
"""Records are removed this long after they ended."""
_LONGEST_PAUSE_S: Final = 5.0


class _Record(msgspec.Struct, frozen=True):
    """`worker` has the keys of an entry of `workers`; `left` says that it is going."""

    url: str
    life_s: Annotated[float, Meta(gt=0, le=86_400)]
    worker: msgspec.Raw = msgspec.Raw(b"{}")
    left: bool = False


_encode: Final = msgspec.json.Encoder(order="sorted").encode
_decode: Final = msgspec.json.Decoder(_Record).decode


def registry_key(prefix: str) -> str:
    """Where the records are."""
    return f"{prefix}:workers"


class Announcer:
    """Announces one worker every `heartbeat_s` while `alive()` says that it answers; takes it out at the end."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        prefix: str,
        url: str,
        worker: bytes,
        heartbeat_s: float,
        alive: Callable[[], Awaitable[bool]],
        on_change: Callable[[str], None],
    ) -> None:
        """`worker` is the JSON of its entry; `on_change` gets a sentence whenever something is different."""
        self._address = address
        self._key = registry_key(prefix)
        self._life_s = heartbeat_s * LIFE_PERIODS
        self._record = _encode(_Record(url, self._life_s, msgspec.Raw(worker)))
        self._gone = _encode(_Record(url, self._life_s, left=True))
        self._heartbeat_s = heartbeat_s
        self._alive = alive
        self._on_change = on_change
        self._said: str | None = None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with open_store(self._address) as client:
                    while True:
                        await self._beat(client)
                        await asyncio.sleep(self._heartbeat_s)
            except STORE_ERRORS as error:
                self._say(f"the store does not answer: {error}")
            await asyncio.sleep(min(self._heartbeat_s, _LONGEST_PAUSE_S))

    async def leave(self) -> None:
        """Say that the worker goes. Raises what `STORE_ERRORS` names."""
        async with asyncio.timeout(2 * self._address.timeout_s), open_store(self._address) as client:
            await client.zadd(self._key, {self._gone: await _now(client) + self._life_s})
            await client.zrem(self._key, self._record)

    async def _beat(self, client: Client) -> None:
        if not await self._alive():
            self._say("the worker does not answer: it is not announced")
            return
        await client.zrem(self._key, self._gone)
        await client.zadd(self._key, {self._record: await _now(client) + self._life_s})
        self._say("announced")

    def _say(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._on_change(what)


class RegistrySource:
    """Looks every `refresh_s` (`discovery.Source`). `read` makes a worker of a record's JSON, or raises ValueError."""

    name = "registry"

    def __init__(
        self,
        address: StoreAddress,
        *,
        prefix: str,
        refresh_s: float,
        read: Callable[[bytes], WorkerSpec],
        clock: Callable[[], float],
        rng: Random,
    ) -> None:
        self.looks_for = (address, prefix, refresh_s)
        self._address = address
        self._key = registry_key(prefix)
        self._refresh_s = refresh_s
        self._read = read
        self._clock = clock
        self._rng = rng
        self._present: dict[str, tuple[Found, float, float]] = {}
        """By address: the worker, until when, and how long an announcement of it lasts."""
        self._lost = False
        self._unread = 0
        self._log = structlog.get_logger("kvgate.registry")

    async def run(self, publish: Publish) -> None:
        """Never returns."""
        while True:
            try:
                async with open_store(self._address) as client:
                    while True:
                        async with asyncio.timeout(4 * self._address.timeout_s):
                            await self._look(client, publish)
                        await self._pause()
            except STORE_ERRORS as error:
                self._lost = True
                publish.failed(f"the registry cannot be read: {type(error).__name__}: {error}")
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._refresh_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER))

    async def _look(self, client: Client, publish: Publish) -> None:
        store_now = await _now(client)
        await client.zremrangebyscore(self._key, "-inf", store_now - _KEPT_S)
        rows = await client.zrange(self._key, 0, _MAX_RECORDS - 1, desc=True, withscores=True)
        now = self._clock()
        if self._lost:
            self._lost = False
            for url, (found, until, life_s) in self._present.items():
                self._present[url] = found, max(until, now + life_s), life_s
        unread = self._take([(bytes(text), float(ends)) for text, ends in rows], store_now, now)  # type: ignore[arg-type, str-unpack]
        lasting = sorted(self._present.items(), key=lambda item: item[1][1], reverse=True)
        self._present = {url: entry for url, entry in lasting[:_MAX_RECORDS] if entry[1] > now}
        publish.present([found for found, _, _ in self._present.values()])
        if unread != self._unread:
            self._unread = unread
            self._log.warning("records of the registry that cannot be read are left out", count=unread)

    def _take(self, rows: list[tuple[bytes, float]], store_now: float, now: float) -> int:
        """Records, the longest-lasting first. Returns how many cannot be read."""
        seen: set[str] = set()
        unread = 0
        for text, ends in rows:
            try:
                record = _decode(text) if len(text) <= _MAX_BYTES else None
                if record is None:
                    raise ValueError("too long")
                if record.url in seen:
                    continue
                seen.add(record.url)
                if record.left:
                    self._present.pop(record.url, None)
                    continue
                until = now + min(ends - store_now, record.life_s)
                self._present[record.url] = Found(self._read(bytes(record.worker))), until, record.life_s
            except (ValueError, RecursionError):  # msgspec's and pydantic's are; nested too deeply
                unread += 1
        return unread


async def _now(client: Client) -> float:
    """The store's time, Unix seconds."""
    seconds, micros = await client.time()
    return float(seconds) + float(micros) / 1e6
