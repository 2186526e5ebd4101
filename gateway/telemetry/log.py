"""Logs: one line an event on one stream, JSON for machines or columns for people, and one line a request.

Rules:
1. A line holds no prompt text, no keys and no session ids. Text a client chose (model, request id) is cut to
   `MAX_CLIENT_TEXT` characters.
2. Time stamps come from the wall clock passed in, UTC in milliseconds.
3. Libraries that log through the standard library (uvicorn, httpx) end up in the same stream and form.
4. Logging never fails: what UTF-8 cannot hold is escaped, and a stream that takes nothing more loses lines,
   nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import BinaryIO, Literal, NamedTuple

import msgspec
import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from gateway.records import Outcome, Result

MAX_CLIENT_TEXT = 128

MAX_WAITING_LINES = 64
"""Some 100 KB, and a third of a millisecond to write."""

_QUIET_LIBRARIES = ("httpx", "httpcore", "asyncio")
"""Their INFO lines are one a poll and worker."""


class Logs(NamedTuple):
    """The root logger, for events, and the writer of request lines."""

    logger: FilteringBoundLogger
    requests: RequestLog


def set_up_logging(
    *, form: Literal["json", "console"], level: str, stream: BinaryIO, wall: Callable[[], float]
) -> Logs:
    """Configure structlog and the standard library for this process.

    Called once by the command; `level` is debug, info, warning or error; `wall` gives Unix seconds.
    """
    threshold = logging.getLevelNamesMapping()[level.upper()]

    def stamp(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        event["time"] = _stamp(wall())
        return event

    processors: list[Processor] = [
        structlog.processors.add_log_level,
        stamp,
        structlog.processors.format_exc_info,
        _Json() if form == "json" else _Console(),
    ]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.BytesLoggerFactory(_Forgiving(stream)),  # type: ignore[arg-type]  # needs no more
        cache_logger_on_first_use=True,
    )
    logger: FilteringBoundLogger = structlog.get_logger()
    root = logging.getLogger()
    root.handlers[:] = [_ToStructlog(logger)]
    root.setLevel(threshold)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(threshold, logging.WARNING))
    direct = stream if form == "json" else None
    return Logs(logger, RequestLog(logger, wall=wall, threshold=threshold, direct=direct))


_WORTH_A_WARNING = frozenset({Result.WORKER_FAILED, Result.TIMED_OUT})
"""A client that left or sent nonsense is everyday life."""


class _Line(msgspec.Struct, omit_defaults=True):
    """A request line. Times are in milliseconds; what is not known, zero or usual is left out."""

    time: str
    level: str
    event: str
    request_id: str
    model: str
    result: str
    status: int
    duration_ms: float
    path: str | None = None
    worker: str | None = None
    pool: str | None = None
    mode: str | None = None
    prompt_tokens: int | None = None
    available_tokens: int | None = None
    predicted_tokens: int | None = None
    delivered_tokens: int | None = None
    missed_tokens: int = 0
    miss_cause: str | None = None
    completion_tokens: int | None = None
    ttft_ms: float | None = None
    overhead_ms: float | None = None
    affinity: str = "none"
    retries: int = 0
    hedged: str | None = None
    error_code: str | None = None
    tenant: str | None = None
    trace_id: str | None = None


class RequestLog:
    """Writes one line for each outcome; a failed worker makes it a warning.

    `direct` is the stream of the JSON form: there an outcome waits for `flush`, which writes the lines of all that
    wait. A write for each line costs more than all else about it, and a line made among others costs half of one made
    alone, whose code the processor has forgotten. Without `direct` the line goes through the logger, for twice as much.
    """

    def __init__(
        self,
        logger: FilteringBoundLogger,
        *,
        wall: Callable[[], float],
        threshold: int = logging.INFO,
        direct: BinaryIO | None = None,
    ) -> None:
        self._logger = logger
        self._wall = wall
        self._threshold = threshold
        self._direct = direct
        self.lost = 0
        """Lines that could not be written."""
        self._waiting: list[tuple[Outcome, float]] = []
        self._some_wait = asyncio.Event()
        self._encode_lines = msgspec.json.Encoder().encode_lines

    def record(self, outcome: Outcome) -> None:
        """One ended request."""
        level = _level(outcome)
        if level < self._threshold:
            return
        wall_s = self._wall()
        if self._direct is not None:
            waiting = self._waiting
            if not waiting:
                self._some_wait.set()
            waiting.append((outcome, wall_s))
            if len(waiting) >= MAX_WAITING_LINES:
                self.flush()
        else:
            fields = msgspec.to_builtins(_line(outcome, wall_s))
            del fields["time"], fields["level"]  # the logger adds its own
            self._logger.log(level, **fields)

    async def wait(self) -> None:
        """Until a line waits to be written."""
        await self._some_wait.wait()

    def flush(self) -> None:
        """Write the lines that wait; to be called a fraction of a second after `wait`, and at the end."""
        stream, ended = self._direct, self._waiting
        if stream is None or not ended:
            return
        self._waiting = []
        self._some_wait.clear()
        lines = self._encode_lines([_line(outcome, wall_s) for outcome, wall_s in ended])
        try:
            stream.write(lines)
            stream.flush()
        except OSError:  # whoever read the log is gone, or does not keep up: requests go on
            self.lost += len(ended)


def _client_text(text: str) -> str:
    """Cut, and without the lone surrogates that JSON lets a client write."""
    text = text[:MAX_CLIENT_TEXT]
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _level(outcome: Outcome) -> int:
    return logging.WARNING if outcome.result in _WORTH_A_WARNING else logging.INFO


def _line(outcome: Outcome, wall_s: float) -> _Line:
    line = _Line(
        _stamp(wall_s),
        "info" if _level(outcome) == logging.INFO else "warning",
        "request",
        _client_text(outcome.request_id),
        _client_text(outcome.model),
        outcome.result,
        outcome.status,
        round((outcome.ended_at - outcome.started_at) * 1e3, 3),
    )
    line.error_code = outcome.error_code
    line.tenant = outcome.tenant
    line.retries = outcome.retries
    if outcome.hedged is not None:
        line.hedged = outcome.hedged.value
    if outcome.trace is not None:
        line.trace_id = outcome.trace.trace_id
    if outcome.endpoint is not None:
        line.path = outcome.endpoint.value
    if outcome.worker is None:
        return line
    stages = outcome.stages
    line.worker = outcome.worker
    line.pool = outcome.pool
    line.mode = outcome.mode
    line.prompt_tokens = outcome.prompt_tokens
    line.available_tokens = outcome.available_tokens
    line.predicted_tokens = outcome.predicted_tokens
    line.delivered_tokens = outcome.delivered_tokens
    line.completion_tokens = outcome.completion_tokens
    line.affinity = outcome.affinity
    line.overhead_ms = round(sum(stages) * 1e3, 3)
    if outcome.ttft_s is not None:
        line.ttft_ms = round(outcome.ttft_s * 1e3, 3)
    if outcome.missed_tokens:
        line.missed_tokens = outcome.missed_tokens
        line.miss_cause = outcome.miss_cause if outcome.miss_cause is not None else "unknown"
    return line


def _stamp(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")


class _Forgiving:
    """The log's stream for loggers, who must not fail with it: whoever read it may be gone (rule 4)."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(data)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


class _Json:
    """Renders an event as one JSON object, time and level first; unknown objects by `str`."""

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> bytes:
        front = {"time": event.pop("time"), "level": event.pop("level"), "event": event.pop("event")}
        line = {**front, **event}
        try:
            return self._encode(line)
        except UnicodeEncodeError:  # lone surrogates: the standard encoder escapes them
            return json.dumps(line, default=str).encode()


class _Console:
    """Renders an event for people, without colours: the stream may be a file."""

    def __init__(self) -> None:
        self._render = structlog.dev.ConsoleRenderer(colors=False, timestamp_key="time", pad_event_to=20)

    def __call__(self, logger: WrappedLogger, name: str, event: EventDict) -> bytes:
        return self._render(logger, name, event).encode("utf-8", "backslashreplace")


class _ToStructlog(logging.Handler):
    """Passes records of the standard library on."""

    def __init__(self, logger: FilteringBoundLogger) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        self._logger.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None)
