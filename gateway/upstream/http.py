"""The client of the data plane: one request to one worker, and its answer as a stream of bytes.

Rules:
1. `open` counts a stream at once, synchronously; it is counted until its connection has nothing more to do with it.
   Leases minus `open_streams` must be 0 whenever no code runs between reserving and opening.
2. A kept connection that the worker closed before any byte of an answer costs nothing: the request goes out once more,
   on a fresh connection to the same worker.
3. Every other failure before the answer begins is a WorkerError and the caller's business. Later ones go to the sink.
4. `abort` is synchronous, may come at any moment, and ends the worker's work by closing its connection.

It never looks into bodies and chooses no worker.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable

from gateway.records import WorkerId, WorkerSpec
from gateway.upstream.connection import AnswerSink, Connection, StaleConnection
from gateway.upstream.connections import Timeouts, WorkerConnections
from gateway.upstream.deadlines import Deadlines
from gateway.upstream.headers import AnswerHead, RequestHead


class UpstreamStream:
    """One request on one worker, from `Upstream.open` to its end."""

    __slots__ = ("_connection", "_connections", "_counts", "_open", "connected_at")

    def __init__(self, connections: WorkerConnections, counts: Counter[tuple[WorkerId, str]]) -> None:
        self._connections = connections
        self._connection: Connection | None = None
        self._open = True
        self._counts = counts
        counts[connections.spec.name, connections.spec.url] += 1
        self.connected_at = 0.0
        """When a connection was at hand; known once an answer has come."""

    async def send(
        self, head: RequestHead, body: bytes, *, total_at: float, timeouts: Timeouts | None = None
    ) -> AnswerHead:
        """Send the request and wait until the answer begins: its head, and for a stream of events a byte behind it.

        `timeouts` are those of this request, the worker's when None. Raises WorkerError, and DeadlineExceeded when it
        is `total_at`.
        """
        timeouts = timeouts or self._connections.timeouts
        connections = self._connections
        raw = head.to_worker(connections.host_header, connections.credentials, len(body), rank=connections.rank_header)
        try:
            connection = connections.take()
            if connection is not None:
                try:
                    return await self._ask(connection, raw, body, timeouts, total_at)
                except StaleConnection:
                    pass
            connection = await connections.connect(within_s=timeouts.connect_s, total_at=total_at)
            return await self._ask(connection, raw, body, timeouts, total_at)
        except BaseException:
            self.abort()
            raise

    def relay_to(self, sink: AnswerSink) -> None:
        """From here on the body goes to `sink`, synchronously, as it arrives."""
        assert self._connection is not None
        self._connection.relay_to(sink)

    def pause(self) -> None:
        """The sink takes no more for now."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """The sink takes bytes again."""
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """End it now; the sink hears nothing. Without effect when it is over."""
        if self._open and self._connection is not None:
            self._connection.abort()
        self._over()

    async def _ask(
        self, connection: Connection, raw: bytes, body: bytes, timeouts: Timeouts, total_at: float
    ) -> AnswerHead:
        self._connection = connection
        self.connected_at = self._connections.clock()
        return await connection.send(raw, body, timeouts=timeouts, total_at=total_at, on_over=self._over)

    def _over(self) -> None:
        if self._open:
            self._open = False
            self._connection = None
            spec = self._connections.spec
            counted = spec.name, spec.url
            self._counts[counted] -= 1
            if not self._counts[counted]:
                del self._counts[counted]


class Upstream:
    """Connections to all workers. One for the process; made and closed by the composition root."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        timeouts: Timeouts | None = None,
        tls: ssl.SSLContext | None = None,
        max_idle_per_worker: int = 256,
        tick_s: float = 0.25,
    ) -> None:
        """`tls` is used for workers with an https URL; without it the system's authorities are. `tick_s` is the
        precision of the timeouts."""
        self.timeouts = timeouts or Timeouts()
        self._clock = clock
        self._tls = tls
        self._max_idle = max_idle_per_worker
        self._deadlines = Deadlines(clock, tick_s=tick_s)
        self._workers: dict[WorkerId, WorkerConnections] = {}
        self._open: set[Connection] = set()
        """Also those to workers that have left, or are at another address now."""
        self._counts: Counter[tuple[WorkerId, str]] = Counter()

    def open(self, worker: WorkerSpec) -> UpstreamStream:
        """Begin a stream; does no I/O yet."""
        connections = self._workers.get(worker.name)
        if connections is None or (connections.spec is not worker and connections.spec != worker):
            connections = self._renew(worker)
        return UpstreamStream(connections, self._counts)

    def apply(self, timeouts: Timeouts) -> None:
        """From the next request on; streams that run keep theirs."""
        self.timeouts = timeouts
        for connections in self._workers.values():
            connections.timeouts = timeouts

    def open_streams(self, worker: WorkerSpec | None = None) -> int:
        """Streams of a worker (or of all) that are not over, also those of workers that left. A worker of the same name
        at another address is another one."""
        return self._counts.total() if worker is None else self._counts[worker.name, worker.url]

    def idle_connections(self, worker: WorkerId) -> int:
        """Kept connections of a worker."""
        connections = self._workers.get(worker)
        return connections.idle if connections is not None else 0

    def wrote(self, worker: WorkerId, since: float) -> bool:
        """Whether a worker has sent bytes in the middle of some answer after `since`, when this was asked before."""
        connections = self._workers.get(worker)
        return connections is not None and connections.wrote(since)

    def forget(self, worker: WorkerId) -> None:
        """A worker left the fleet: close its idle connections. Streams that run go on."""
        connections = self._workers.pop(worker, None)
        if connections is not None:
            connections.close_idle()

    def close(self) -> None:
        """Drop every connection; streams that still run fail."""
        for connection in list(self._open):
            connection.shut()
        self._workers.clear()

    def _renew(self, worker: WorkerSpec) -> WorkerConnections:
        old = self._workers.get(worker.name)
        connections = WorkerConnections(
            worker,
            timeouts=self.timeouts,
            clock=self._clock,
            deadlines=self._deadlines,
            tls=self._tls,
            max_idle=self._max_idle,
            open_connections=self._open,
        )
        if old is not None:
            old.close_idle()
        self._workers[worker.name] = connections
        return connections
