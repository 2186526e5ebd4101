"""Errors of a request: whose fault, which status, whether another worker may be tried.

    GatewayError
    |-- ClientError            4xx, the request is at fault; never retried
    |   |-- BadRequest         400
    |   |-- NotFound           404
    |   |-- UnknownModel       404
    |   |-- PayloadTooLarge    413
    |   `-- RequestTimeout     408, the client sent too slowly
    |-- NoWorker               503, nobody in the pool may serve it now
    |-- QueueFull              429, more requests wait for a worker than may
    |-- QueueTimeout           503, no worker had room within the time a request may wait
    |-- FleetFull              503, a worker cannot join: there is no room for more
    |-- DeadlineExceeded       504, the time that the request may take has passed; no worker's fault
    |-- WorkerError            the chosen worker is at fault; `retryable` says whether another one may be tried
    |   |-- WorkerUnreachable  502, no connection
    |   |-- WorkerBroken       502, connection lost or answer malformed
    |   `-- WorkerTimeout      504, a deadline of the worker's phases passed
    `-- ShuttingDown           503

One seam turns them into bytes: `edge.responses`. The shape is OpenAI's error object
(`{"error": {"message", "type", "code", "param"}}`), Anthropic's on `/v1/messages`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_NAME_SHOWN = 128
"""Characters of a client's model name an error repeats."""

_NAMES_SHOWN = 5
"""Known model names an UnknownModel error lists: enough to see a typo, few enough for one line."""


class GatewayError(Exception):
    """`message` is for the client: it names the problem and, where there is one, the fix; no addresses, no secrets.

    `code` is a fixed word clients may switch on; `param` names the field of the body at fault.
    """

    status: int = 500
    type: str = "server_error"
    code: str = "internal_error"
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class ClientError(GatewayError):
    """The request itself is at fault."""

    status = 400
    type = "invalid_request_error"
    code = "bad_request"


class BadRequest(ClientError):
    """Malformed HTTP, JSON or fields."""


class NotFound(ClientError):
    """No such path, or nothing of that name."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class UnknownModel(ClientError):
    """No pool serves the model."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"

    @classmethod
    def among(cls, model: str, known: Iterable[str]) -> UnknownModel:
        """The error for a client's `model` where `known` are served; a few of them are named."""
        names = sorted(known)
        model = model if len(model) <= _NAME_SHOWN else model[:_NAME_SHOWN] + "..."
        shown = ", ".join(names[:_NAMES_SHOWN])
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        return cls(f"model {model!r} is not served; there are {shown}{more}", param="model")


class PayloadTooLarge(ClientError):
    """Body or header above its limit."""

    status = 413
    code = "payload_too_large"


class RequestTimeout(ClientError):
    """The client did not send its header or body in time."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class NoWorker(GatewayError):
    """No worker of the model's pool may take the request now, or none has said yet which models it serves."""

    status = 503
    type = "service_unavailable_error"
    code = "no_worker"

    @classmethod
    def ready(cls, model: str) -> NoWorker:
        """As clients see it; the time to come again is about one probe period."""
        return cls(f"no worker of model {model!r} is ready", retry_after_s=1.0)

    @classmethod
    def joined(cls) -> NoWorker:
        """While nobody has joined nothing says that a model is not served: clients would give up for good."""
        return cls("no worker has reported a model yet", retry_after_s=1.0)


class QueueFull(GatewayError):
    """As many requests of the pool wait as may, and this one has no better claim than they."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class QueueTimeout(GatewayError):
    """It has waited `admission.queue_timeout_s` and every worker was busy with others."""

    status = 503
    type = "service_unavailable_error"
    code = "queue_timeout"


class FleetFull(GatewayError):
    """As many workers as there may be, those included that left and still answer requests."""

    status = 503
    type = "service_unavailable_error"
    code = "fleet_full"


class ShuttingDown(GatewayError):
    """The process drains and takes no new work."""

    status = 503
    type = "service_unavailable_error"
    code = "shutting_down"


class DeadlineExceeded(GatewayError):
    """The time that a request may take has passed: `timeouts.total_s`, or less where the client asked for less."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"

    @classmethod
    def passed(cls) -> DeadlineExceeded:
        """As clients see it."""
        return cls("the request took longer than it may (timeouts.total_s, or x-request-timeout-s)")


class WorkerTaken(GatewayError):
    """A worker of that name or address is in the fleet."""

    status = 409
    type = "invalid_request_error"
    code = "worker_exists"


WORKER_STATUS = "worker_status"
"""Code of an attempt that a worker answered with 5xx."""

WORKER_BUSY = "worker_busy"
"""Code of an attempt that a worker had no room for: 429, or 503 with Retry-After."""

OVERTAKEN = "overtaken"
"""Code of an attempt that was late, and whose second worker answered first."""

UNREADABLE = (msgspec.MsgspecError, RecursionError)
"""What decoding raises for bytes from outside; the second where something is nested too deeply, be it in a field that
nobody reads."""


class WorkerError(GatewayError):
    """The chosen worker failed before the first byte of its answer."""

    status = 502
    type = "upstream_error"
    code = "worker_error"
    retryable = True


class WorkerUnreachable(WorkerError):
    """No connection to the worker within the connect timeout."""

    code = "worker_unreachable"


class WorkerBroken(WorkerError):
    """The worker closed the connection or sent something that is no HTTP answer."""

    code = "worker_broken"


class WorkerTimeout(WorkerError):
    """The worker took longer than a phase may take."""

    status = 504
    type = "timeout_error"
    code = "worker_timeout"
