"""Sessions that engines were told of, closed where a session has moved on or come to its end.

SGLang with `--enable-session-radix-cache` keeps the prefix of a session it knows (`session_id` in the body, 0.5.16 on)
longer than others, until `POST /close_session` drops the reference.

Rules:
1. Nothing here is in a request's way: `used` notes and returns; closing is done by `run`, a task of the supervisor.
2. Bounded: at most `max_sessions` are remembered, the longest unused is closed first; as many wait to be closed.
3. Closing is tried once. An engine that misses it keeps some pages longer, no more.
4. Engines get a name made of tenant and session: tenants that use the same name do not meet, and no client's word is
   handed on.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

from gateway.records import WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed

_LOOK_S = 1.0
_TIMEOUT_S = 2.0


def engine_session(tenant: str | None, session: str) -> str:
    """What engines call a client's session."""
    return "kvgate-" + xxh3_128_hexdigest(json.dumps([tenant, session]).encode())


class _Use(NamedTuple):
    worker: WorkerSpec
    at: float


class EngineSessions:
    """One for a process. `ttl_s` gives the life time of sessions now in force, in seconds."""

    def __init__(
        self,
        control: ControlClient,
        clock: Callable[[], float],
        *,
        ttl_s: Callable[[], float],
        max_sessions: int = 100_000,
    ) -> None:
        self.results: Counter[str] = Counter()
        """Sessions by what became of closing them: `closed`, `failed`, `dropped` (too many waited)."""
        self._control = control
        self._clock = clock
        self._ttl_s = ttl_s
        self._max = max_sessions
        self._uses: OrderedDict[str, _Use] = OrderedDict()
        self._ending: deque[tuple[str, WorkerSpec]] = deque()

    def __len__(self) -> int:
        return len(self._uses)

    def used(self, name: str, worker: WorkerSpec, now: float) -> None:
        """A request of the session goes to `worker`; where it was before, it is over."""
        uses = self._uses
        before = uses.get(name)
        uses[name] = _Use(worker, now)
        uses.move_to_end(name)
        if before is not None and before.worker.url != worker.url:
            self._end(name, before.worker)
        if len(uses) > self._max:
            oldest, use = uses.popitem(last=False)
            self._end(oldest, use.worker)

    def expire(self, now: float) -> None:
        """Sessions past their life time are over."""
        limit = now - self._ttl_s()
        while self._uses and next(iter(self._uses.values())).at < limit:
            name, use = self._uses.popitem(last=False)
            self._end(name, use.worker)

    async def run(self) -> None:
        """Close what is over, one after the other, for ever."""
        while True:
            self.expire(self._clock())
            while self._ending:
                await self._close(*self._ending.popleft())
            await asyncio.sleep(_LOOK_S)

    def _end(self, name: str, worker: WorkerSpec) -> None:
        if len(self._ending) >= self._max:
            self._ending.popleft()
            self.results["dropped"] += 1
        self._ending.append((name, worker))

    async def _close(self, name: str, worker: WorkerSpec) -> None:
        body = json.dumps({"session_id": name}).encode()
        try:
            answer = await self._control.post(
                f"{worker.url}/close_session", body, api_key=worker.api_key, timeout_s=_TIMEOUT_S
            )
        except ProbeFailed:
            self.results["failed"] += 1
            return
        self.results["closed" if answer.status == 200 else "failed"] += 1
