"""Speaking and listening: the two tasks that carry messages between this replica and the others.

Rules:
1. No request ever waits for them, and they for no request. What is to be said waits in the journal, which is bounded;
   what is heard is applied between two turns of the loop.
2. Messages are published to one channel that every replica hears, its own included. Nothing is stored: a message that
   nobody hears is gone, and the next full state, one every `state_s`, makes good for it.
3. News are sent at once, and then those of `batch_s` together; none while nobody is known who would hear them.
4. A failure ends the connection it was seen on. Each task connects again by itself, with growing pauses, and then asks
   the others for everything. Meanwhile what they told runs out (`Peers.tick`), and this replica goes on alone.
5. Its own state has to come back within `silent_s`: a store that takes messages and delivers none is down.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import structlog

from gateway.replicas.journal import Journal
from gateway.replicas.messages import Message, Refused, decode, encode
from gateway.replicas.peers import DEAD_S, Peers
from gateway.replicas.store import STORE_ERRORS, Client, open_store
from gateway.store_address import StoreAddress

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 3.0
_LEAST_AGAIN_S: Final = 0.25
"""Everything is told again at most this often, however many ask."""


_PEER_S: Final = 0.005
"""With so much longer a batch for each peer, hearing all of them costs a few per cent of a core."""


@dataclass(frozen=True, slots=True)
class ExchangeSettings:
    """Periods in seconds. `batch_s` is below what a prefill takes and above what a message costs the others; where many
    listen it is longer, up to `longest_batch_s`."""

    batch_s: float = 0.02
    longest_batch_s: float = 0.05
    state_s: float = 1.0
    silent_s: float = DEAD_S


class Exchange:
    """`speak` and `listen` are run by the supervisor; `bye` is said once at the end."""

    def __init__(
        self,
        address: StoreAddress,
        journal: Journal,
        peers: Peers,
        *,
        channel: str,
        clock: Callable[[], float],
        rng: Random,
        settings: ExchangeSettings | None = None,
    ) -> None:
        self.address = address
        self.peers = peers
        self.counts: Counter[str] = Counter()
        """`sent`, `sent_bytes`, `heard`, `heard_bytes`, `failed` (connections), and messages refused, by reason."""
        self.lag_s: float | None = None
        """How long this replica's last state took through the store and back; None while it is down."""
        self.error: str | None = None
        """Why the store is down."""
        self._journal = journal
        self._channel = channel
        self._clock = clock
        self._rng = rng
        self._settings = settings or ExchangeSettings()
        self._listening = False
        self._speaking = False
        self._ask = True
        self._again = False
        self._again_at = 0.0
        self._state_at = 0.0
        self._sent_states: dict[int, float] = {}
        self._news = asyncio.Event()
        self._log = structlog.get_logger("kvgate.replicas")

    @property
    def up(self) -> bool:
        """Messages go to the store and come back."""
        return self._listening and self._speaking and self.lag_s is not None

    def wake(self) -> None:
        """The journal has news."""
        self._news.set()

    async def bye(self) -> None:
        """Tell the others that this replica ends, if the store takes it at once."""
        if not self.up:
            return
        try:
            async with asyncio.timeout(self.address.timeout_s), open_store(self.address) as client:
                await client.publish(self._channel, encode(self._journal.farewell()))
        except STORE_ERRORS as error:
            self._log.info("others were not told that this replica ends", reason=_reason(error))

    # ------------------------------------------------------------------ speaking

    async def speak(self) -> None:
        """Say what is to be said, until cancelled."""
        await self._keep("speak", self._speak)

    async def _speak(self) -> None:
        try:
            async with open_store(self.address) as client:
                self._ask = True
                self._state_at = 0.0
                while True:
                    for message in self._due():
                        await self._send(client, message)
                    self._speaking = True
                    await self._until_due()
        finally:
            self._speaking = False

    def _due(self) -> list[Message]:
        now = self._clock()
        again = self._again and now >= self._again_at + _LEAST_AGAIN_S
        if now < self._state_at and not again and not self._journal.overflown:
            return self._journal.news(now) if self.peers.peers else []
        if again:
            self._again, self._again_at = False, now
        ask = self._ask or self.peers.wanting
        self._ask = self.peers.wanting = False
        self._state_at = now + self._settings.state_s
        messages = self._journal.state(now, ask=ask, again=again)
        if self._listening:
            self._sent_states = {messages[-1].seq: now}
        return messages

    async def _send(self, client: Client, message: Message) -> None:
        payload = encode(message)
        async with asyncio.timeout(2 * self.address.timeout_s):
            await client.publish(self._channel, payload)
        self.counts["sent"] += 1
        self.counts["sent_bytes"] += len(payload)

    async def _until_due(self) -> None:
        settings = self._settings
        await asyncio.sleep(max(settings.batch_s, min(settings.longest_batch_s, len(self.peers.peers) * _PEER_S)))
        wait_s = self._state_at - self._clock()
        if wait_s <= 0.0:
            return
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    await self._news.wait()
                    self._news.clear()
                    if self._again or self.peers.peers:  # else nobody would hear the news
                        return
        except TimeoutError:
            return

    # ------------------------------------------------------------------ listening

    async def listen(self) -> None:
        """Hear what the others say, until cancelled."""
        await self._keep("listen", self._listen)

    async def _listen(self) -> None:
        silent_s = self._settings.silent_s
        try:
            async with open_store(self.address) as client:
                subscription = client.pubsub()
                try:
                    async with asyncio.timeout(2 * self.address.timeout_s):
                        await subscription.subscribe(self._channel)
                    heard_self_at = self._clock()
                    while True:
                        async with asyncio.timeout(silent_s):
                            event: dict[str, Any] | None = await subscription.get_message(timeout=silent_s)
                        if event is not None and event["type"] == "subscribe":
                            self._listening = self._ask = True
                            self._state_at = 0.0
                            self._news.set()
                        elif event is not None and event["type"] == "message" and self._hear(event["data"]):
                            heard_self_at = self._clock()
                        if self._clock() - heard_self_at > silent_s:
                            raise TimeoutError("messages do not come back")
                finally:
                    await subscription.aclose()  # type: ignore[no-untyped-call]
        finally:
            self._listening = False
            self.lag_s = None
            self._sent_states = {}

    def _hear(self, payload: bytes) -> bool:
        """Apply one message. True when it is this replica's own."""
        now = self._clock()
        self.counts["heard"] += 1
        self.counts["heard_bytes"] += len(payload)
        try:
            message = decode(payload)
        except Refused as error:
            self.counts[error.reason] += 1
            return False
        if message.replica == self._journal.replica:
            sent_at = self._sent_states.pop(message.seq, None)
            if sent_at is not None:
                self._came_back(now - sent_at)
            return True
        if self.peers.hear(message, now):
            self._again = True
            self._news.set()
        return False

    def _came_back(self, lag_s: float) -> None:
        if self.lag_s is None:
            self.error = None
            self._log.info("store is up", store=str(self.address))
        self.lag_s = lag_s

    # ------------------------------------------------------------------ failures

    async def _keep(self, what: str, run: Callable[[], Any]) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            began = self._clock()
            try:
                await run()
            except STORE_ERRORS as error:
                self.counts["failed"] += 1
                reason = _reason(error)
                if self.error is None:
                    self._log.warning("store is down: this replica goes on alone", task=what, reason=reason)
                self.error = reason
                self.lag_s = None
            if self._clock() - began > 10 * _LONGEST_PAUSE_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.5))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _reason(error: BaseException) -> str:
    """One line; a client's message may hold several."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
