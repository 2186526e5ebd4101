"""Which worker served a session last.

Rules:
1. Bounded twice: at most `max_sessions`, least recently used out first, and none older than `ttl_s` is believed.
2. A record is advice: the score gives the worker a credit, never a veto, and a worker that is gone is simply not among
   the candidates.
3. The name of a session comes from the client (header or configured body field), never from keys or prompt text.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.records import WorkerId


class Sessions:
    """Session name -> worker, least recently used first."""

    __slots__ = ("_max", "_records", "_ttl_s")

    def __init__(self, *, max_sessions: int = 1_000_000, ttl_s: float = 3600.0) -> None:
        self._max = max_sessions
        self._ttl_s = ttl_s
        self._records: OrderedDict[str, tuple[WorkerId, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, session: str, now: float) -> WorkerId | None:
        """The worker of the session's last request, None without one inside the life time."""
        record = self._records.get(session)
        if record is None or now - record[1] > self._ttl_s:
            return None
        return record[0]

    def keep(self, session: str, worker: WorkerId, now: float) -> None:
        """The session's latest request went to `worker`."""
        records = self._records
        records[session] = (worker, now)
        records.move_to_end(session)
        if len(records) > self._max:
            records.popitem(last=False)

    def expire(self, now: float) -> int:
        """Drops records past their life time; returns how many. Costs those records only."""
        records = self._records
        limit = now - self._ttl_s
        gone = 0
        while records:
            oldest = next(iter(records.values()))
            if oldest[1] >= limit:
                break
            records.popitem(last=False)
            gone += 1
        return gone

    def by_worker(self) -> dict[WorkerId, int]:
        """How many sessions point to each worker; for the admin face, costs the whole table."""
        counts: dict[WorkerId, int] = {}
        for worker, _ in self._records.values():
            counts[worker] = counts.get(worker, 0) + 1
        return counts
