"""Errors as bytes."""

from __future__ import annotations

import json
import random

from gateway.edge import request_id_maker
from gateway.edge.relay import chunk
from gateway.edge.responses import HeaderTooLarge, InternalError, error_object, error_response
from gateway.errors import BadRequest, GatewayError, NoWorker, UnknownModel, WorkerTimeout
from gateway.records import Endpoint


def test_openai_shape() -> None:
    error = BadRequest("no", code="x", param="model")
    assert error_object(error) == {
        "error": {"message": "no", "type": "invalid_request_error", "code": "x", "param": "model"}
    }


def test_anthropic_shape() -> None:
    def kind(error: GatewayError) -> object:
        shown = error_object(error, Endpoint.MESSAGES)
        assert shown["type"] == "error"
        return shown["error"]["type"]  # type: ignore[index]

    assert kind(BadRequest("x")) == "invalid_request_error"
    assert kind(UnknownModel("x")) == "not_found_error"
    assert kind(NoWorker("x")) == "overloaded_error"
    assert kind(WorkerTimeout("x")) == "timeout_error"
    assert kind(InternalError()) == "api_error"


def test_a_whole_answer() -> None:
    raw = error_response(
        NoWorker("wait", retry_after_s=1.2), endpoint=None, receipts=b"x-request-id: r\r\n", keep_alive=False
    )
    head, body = raw.split(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"HTTP/1.1 503 Service Unavailable"
    assert set(lines[1:]) == {
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        b"retry-after: 2",
        b"x-request-id: r",
        b"connection: close",
    }
    assert json.loads(body)["error"]["code"] == "no_worker"
    kept = error_response(HeaderTooLarge("x"), endpoint=None, receipts=b"", keep_alive=True)
    assert kept.startswith(b"HTTP/1.1 431 ")
    assert b"connection: close" not in kept


def test_chunks_of_every_size() -> None:
    for size in (1, 15, 16, 4095, 4096, 70_000):
        assert chunk(b"x" * size) == b"%x\r\n%b\r\n" % (size, b"x" * size)


def test_request_ids_differ_within_and_between_processes() -> None:
    one, other = request_id_maker(random.Random(1)), request_id_maker(random.Random(2))
    ids = {maker() for maker in (one, other) for _ in range(1000)}
    assert len(ids) == 2000
