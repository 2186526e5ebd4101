"""Which worker served a session last.

Rules:
1. Bounded twice: at most `max_sessions`, least recently used out first, and none older than `ttl_s` is believed.
2. A record is advice: the score gives the worker a credit, never a veto, and a worker that is gone is simply not among
   the candidates.
3. The name of a session comes from the client (header or configured body field), never from keys or prompt text.
"""

from __future__ import annotations

from collections import OrderedDict

from xxhash import xxh3_64_intdigest

from gateway.records import WorkerId

_AT_ONCE = 10_000
"""Records dropped in one call, some milliseconds."""


def session_digest(session: str) -> int:
    """A session's name as other replicas know it: unsigned 64 bits. Short, no secret."""
    return xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"))


class Sessions:
    """Session name -> worker, least recently used first; beside it, by digest, what other replicas told."""

    __slots__ = ("_counts", "_max", "_records", "_told", "_ttl_s")

    def __init__(self, *, max_sessions: int = 1_000_000, ttl_s: float = 3600.0) -> None:
        self._max = max_sessions
        self._ttl_s = ttl_s
        self._records: OrderedDict[str, tuple[WorkerId, float]] = OrderedDict()
        self._told: OrderedDict[int, tuple[WorkerId, float]] = OrderedDict()
        self._counts: dict[WorkerId, int] = {}
        """Records of each worker, so that nobody has to walk a million of them."""

    def apply(self, *, max_sessions: int, ttl_s: float) -> None:
        """From now on these limits; a smaller number is reached with the next calls of `expire`."""
        self._max = max_sessions
        self._ttl_s = ttl_s

    def __len__(self) -> int:
        return len(self._records)

    def find(self, session: str, now: float) -> WorkerId | None:
        """The worker of the session's last request, None without one inside the life time."""
        record = self._latest(session)
        if record is None or now - record[1] > self._ttl_s:
            return None
        return record[0]

    def keep(self, session: str, worker: WorkerId, now: float) -> None:
        """The session's latest request went to `worker`."""
        records = self._records
        before = records.get(session)
        records[session] = (worker, now)
        if before is None:
            self._counts[worker] = self._counts.get(worker, 0) + 1
            if len(records) > self._max:
                self._drop(records.popitem(last=False)[1][0])
            return
        records.move_to_end(session)
        if before[0] != worker:
            self._drop(before[0])
            self._counts[worker] = self._counts.get(worker, 0) + 1

    def record(self, session: str, now: float) -> tuple[WorkerId, float] | None:
        """Worker of the session's last request and seconds since; None as for `find`."""
        record = self._latest(session)
        if record is None or now - record[1] > self._ttl_s:
            return None
        return record[0], now - record[1]

    def told(self, digest: int, worker: WorkerId, now: float) -> None:
        """Another replica sent the session of this digest to `worker`; the later of its record and ours counts."""
        self._told[digest] = (worker, now)
        self._told.move_to_end(digest)
        if len(self._told) > self._max:
            self._told.popitem(last=False)

    def _latest(self, session: str) -> tuple[WorkerId, float] | None:
        record = self._records.get(session)
        if self._told:
            told = self._told.get(session_digest(session))
            if told is not None and (record is None or told[1] > record[1]):
                return told
        return record

    def forget(self, session: str) -> bool:
        """Remember nothing of a session; False when nothing was."""
        told = self._told.pop(session_digest(session), None)
        record = self._records.pop(session, None)
        if record is None:
            return told is not None
        self._drop(record[0])
        return True

    def expire(self, now: float) -> int:
        """Drops records past their life time, and those that are too many since the limits changed, some thousands a
        call; returns how many. Costs those records only."""
        records, told = self._records, self._told
        limit, gone = now - self._ttl_s, 0
        while gone < _AT_ONCE and records and (len(records) > self._max or next(iter(records.values()))[1] < limit):
            self._drop(records.popitem(last=False)[1][0])
            gone += 1
        while gone < _AT_ONCE and told and (len(told) > self._max or next(iter(told.values()))[1] < limit):
            told.popitem(last=False)
            gone += 1
        return gone

    def by_worker(self) -> dict[WorkerId, int]:
        """How many sessions point to each worker, also to those that have left."""
        return dict(self._counts)

    def _drop(self, worker: WorkerId) -> None:
        left = self._counts[worker] - 1
        if left:
            self._counts[worker] = left
        else:
            del self._counts[worker]
