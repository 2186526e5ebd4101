"""Log lines: form, level, content, and what must not be in them."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import structlog

from gateway.records import Endpoint, Hedged, MissCause, Outcome, PrefixMode, Result, StageTimes, WorkerId
from gateway.telemetry import Logs, set_up_logging
from gateway.telemetry.log import MAX_CLIENT_TEXT, MAX_WAITING_LINES

WALL_S = 1_795_963_860.5


@pytest.fixture(autouse=True)
def _unchanged_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    quiet = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "asyncio")}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name, before in quiet.items():
        logging.getLogger(name).setLevel(before)
    structlog.reset_defaults()


def logs(form: Literal["json", "console"] = "json", level: str = "info") -> tuple[Logs, io.BytesIO]:
    stream = io.BytesIO()
    return set_up_logging(form=form, level=level, stream=stream, wall=lambda: WALL_S), stream


def write(made: Logs, ended: Outcome) -> None:
    made.requests.record(ended)
    made.requests.flush()


def outcome(**changes: Any) -> Outcome:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "endpoint": Endpoint.CHAT,
        "model": "llama",
        "pool": "default",
        "worker": WorkerId("w1"),
        "result": Result.COMPLETED,
        "status": 200,
        "stream": True,
        "started_at": 10.0,
        "ended_at": 12.0,
        "prompt_tokens": 1000,
        "available_tokens": 800,
        "predicted_tokens": 640,
        "delivered_tokens": 0,
        "completion_tokens": 50,
        "ttft_s": 0.3,
        "mode": PrefixMode.EXACT,
        "stages": StageTimes(parse_s=1e-3, prefix_s=2e-3),
    }
    return Outcome(**{**fields, **changes})


def lines(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_one_json_line() -> None:
    log, stream = logs()
    write(log, outcome(missed_tokens=640, miss_cause=MissCause.UNKNOWN, affinity="kept", retries=1, hedged=Hedged.WON))
    assert lines(stream) == [
        {
            "time": "2026-11-29T14:51:00.500+00:00",
            "level": "info",
            "event": "request",
            "request_id": "r1",
            "model": "llama",
            "result": "completed",
            "status": 200,
            "duration_ms": 2000.0,
            "path": "/v1/chat/completions",
            "worker": "w1",
            "pool": "default",
            "mode": "exact",
            "prompt_tokens": 1000,
            "available_tokens": 800,
            "predicted_tokens": 640,
            "delivered_tokens": 0,
            "missed_tokens": 640,
            "miss_cause": "unknown",
            "completion_tokens": 50,
            "ttft_ms": 300.0,
            "overhead_ms": 3.0,
            "affinity": "kept",
            "retries": 1,
            "hedged": "won",
        }
    ]


def test_a_refused_request_says_no_more_than_is_known() -> None:
    log, stream = logs()
    write(
        log,
        outcome(endpoint=None, worker=None, pool="", result=Result.REFUSED, status=404, error_code="model_not_found"),
    )
    (line,) = lines(stream)
    assert set(line) == {
        "time",
        "level",
        "event",
        "request_id",
        "model",
        "result",
        "status",
        "duration_ms",
        "error_code",
    }


@pytest.mark.parametrize(
    ("result", "level"),
    [(Result.WORKER_FAILED, "warning"), (Result.TIMED_OUT, "warning"), (Result.CLIENT_GONE, "info")],
)
def test_level_of_a_request(result: Result, level: str) -> None:
    log, stream = logs()
    write(log, outcome(result=result))
    assert lines(stream)[0]["level"] == level


def test_the_level_filters() -> None:
    log, stream = logs(level="warning")
    write(log, outcome())
    log.logger.info("nothing")
    logging.getLogger("some.library").info("nothing")
    assert stream.getvalue() == b""
    write(log, outcome(result=Result.WORKER_FAILED))
    log.logger.warning("something")
    logging.getLogger("some.library").warning("something")
    assert len(lines(stream)) == 3


def test_text_of_clients_is_cut_and_stays_on_its_line() -> None:
    log, stream = logs()
    write(log, outcome(model="m" * 10_000, request_id='"}\n{"level": "forged"}' + "r" * 10_000))
    (line,) = lines(stream)
    assert len(line["model"]) == len(line["request_id"]) == MAX_CLIENT_TEXT


def test_events_and_the_standard_library_share_the_stream() -> None:
    log, stream = logs()
    log.logger.info("worker joined", worker="w1", facts=WorkerId)
    logging.getLogger("some.library").info("started on %s", 8000)
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        logging.getLogger("other").exception("failed")
    joined, started, failed = lines(stream)
    assert (joined["event"], joined["worker"], joined["level"]) == ("worker joined", "w1", "info")
    assert (started["event"], started["logger"]) == ("started on 8000", "some.library")
    assert "RuntimeError: boom" in failed["exception"]


def test_polls_do_not_fill_the_log() -> None:
    _, stream = logs()
    logging.getLogger("httpx").info("HTTP Request: GET http://10.0.0.1/metrics")
    assert stream.getvalue() == b""


def test_console_form_is_for_people() -> None:
    log, stream = logs(form="console")
    write(log, outcome())
    log.logger.warning("worker gone", worker="w1")
    first, second = stream.getvalue().decode().splitlines()
    assert "request" in first
    assert "delivered_tokens=0" in first
    assert "warning" in second
    assert "worker=w1" in second
    assert "\x1b" not in stream.getvalue().decode()


def test_request_lines_wait_to_be_written_together() -> None:
    log, stream = logs()
    log.requests.record(outcome(request_id="first"))
    log.requests.record(outcome(request_id="second"))
    assert stream.getvalue() == b""
    log.requests.flush()
    assert [line["request_id"] for line in lines(stream)] == ["first", "second"]
    log.requests.flush()
    assert len(lines(stream)) == 2
    for _ in range(MAX_WAITING_LINES):
        log.requests.record(outcome())
    assert len(lines(stream)) == 2 + MAX_WAITING_LINES


def test_a_line_has_the_time_of_the_end_and_not_of_its_writing() -> None:
    stream, now = io.BytesIO(), iter((WALL_S, WALL_S + 0.25))
    made = set_up_logging(form="json", level="info", stream=stream, wall=lambda: next(now))
    made.requests.record(outcome())
    made.requests.record(outcome(result=Result.WORKER_FAILED))
    made.requests.flush()
    assert [(line["time"][-12:], line["level"]) for line in lines(stream)] == [
        ("00.500+00:00", "info"),
        ("00.750+00:00", "warning"),
    ]


@pytest.mark.parametrize("form", ["json", "console"])
def test_lone_surrogates_of_a_client_are_escaped(form: Literal["json", "console"]) -> None:
    """JSON lets a client write them; a line that cannot be encoded must not end the request that is logged."""
    made, stream = logs(form)
    write(made, outcome(model="\ud800x"))
    made.logger.info("odd", text="\ud800x")
    first, second = stream.getvalue().decode().splitlines()
    assert "ud800x" in first
    assert "ud800x" in second


def test_a_stream_that_is_gone_loses_lines_and_nothing_else() -> None:
    class Gone(io.BytesIO):
        def write(self, _: Any) -> int:
            raise BrokenPipeError(32, "Broken pipe")

    made = set_up_logging(form="json", level="info", stream=Gone(), wall=lambda: WALL_S)
    made.logger.info("joined")
    logging.getLogger("kvgate.edge").error("a bug")
    write(made, outcome())
    assert made.requests.lost == 1
