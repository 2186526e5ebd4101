"""What is written down about one request as it goes: its names, when each step was made, and how that is told in the
end - to the client in headers, to the rest of the gateway in records."""

from __future__ import annotations

from gateway.edge.attempts import Attempts
from gateway.edge.debug import decision_line
from gateway.edge.relay import Relay
from gateway.records import Ending, Endpoint, InferenceRequest, Outcome, Result, StageTimes, Trace


class Notes:
    """`asked` is the model's name as the client wrote it, `model` the served name it stands for. Times are those of the
    clock, in seconds; a step that was not made has the time of the one before."""

    __slots__ = (
        "asked", "endpoint", "located_at", "model", "parsed_at", "request_id", "started_at", "streamed", "tenant",
        "trace",
    )  # fmt: skip

    def __init__(
        self, endpoint: Endpoint, request_id: bytes, tenant: str | None, now: float, trace: Trace | None
    ) -> None:
        self.endpoint = endpoint
        self.request_id = request_id
        self.tenant = tenant
        self.trace = trace
        self.asked = self.model = ""
        self.streamed = False
        self.started_at = self.parsed_at = self.located_at = now

    @property
    def request_name(self) -> str:
        """The request's id as text."""
        return self.request_id.decode("latin-1")

    def begun(self, now: float) -> None:
        """Its body is whole."""
        self.started_at = self.parsed_at = self.located_at = now

    def parsed(self, request: InferenceRequest, now: float) -> None:
        """What is asked is known."""
        self.model = request.model
        self.streamed = request.stream
        self.parsed_at = self.located_at = now

    def stages(self, work: Attempts) -> StageTimes:
        """Seconds between the steps made: whole body, parsed, located, reserved (less the wait), connected."""
        located_at = self.located_at
        reserved_at, connected_at = work.reserved_at or located_at, work.connected_at or located_at
        return StageTimes(
            self.parsed_at - self.started_at,
            located_at - self.parsed_at,
            reserved_at - located_at - (work.queued_s if work.reserved_at is not None else 0.0),
            work.queued_s,
            connected_at - reserved_at,
        )

    def ending(self, result: Result, status: int, now: float, relay: Relay | None, error_code: str | None) -> Ending:
        """How it ended; `relay` has passed an answer on."""
        if relay is None:
            return Ending(result, status, now, error_code=error_code, trace=self.trace)
        return Ending(
            result,
            status,
            now,
            relay.usage() if result is Result.COMPLETED else None,
            relay.chunks,
            relay.first_byte_at,
            relay.last_byte_at,
            error_code,
            self.trace,
        )

    def unplaced(self, ending: Ending, work: Attempts) -> Outcome:
        """The outcome of a request that no worker was chosen for."""
        return Outcome(
            request_id=self.request_name,
            endpoint=self.endpoint,
            model=self.model,
            pool="",
            worker=None,
            result=ending.result,
            status=ending.status,
            stream=self.streamed,
            started_at=self.started_at,
            ended_at=ending.ended_at,
            stages=self.stages(work),
            error_code=ending.error_code,
            tenant=self.tenant,
            trace=ending.trace,
        )


def receipts(notes: Notes, work: Attempts | None, *, debug: bool) -> bytes:
    """Lines of the answer's head: the request's id, and with `work` who does it; `debug` adds the decision."""
    lease = work.lease if work is not None else None
    if work is None or lease is None:
        return b"x-request-id: %b\r\n" % notes.request_id
    decision = decision_line(lease.decision) if debug else b""
    return b"x-request-id: %b\r\nx-kvgate-worker: %b\r\nx-kvgate-predicted-tokens: %d\r\nx-kvgate-retries: %d\r\n%b" % (
        notes.request_id,
        lease.worker.id.encode(),
        lease.decision.predicted_tokens,
        work.retries,
        decision,
    )
