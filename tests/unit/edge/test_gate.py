"""Limits of one request: what its path, its model and its client say."""

from __future__ import annotations

import pytest

from gateway.edge import PhaseTimeouts
from gateway.edge.gate import asked_seconds
from gateway.errors import BadRequest
from gateway.records import Endpoint
from gateway.upstream.connections import Timeouts

BASE = Timeouts(first_byte_s=100, idle_s=50, total_s=1000)


def test_the_models_word_counts_before_the_paths() -> None:
    limits = PhaseTimeouts(
        BASE,
        paths={Endpoint.SCORE: {"first_byte_s": 10, "idle_s": 5}},
        models={"m": {"first_byte_s": 20}},
    )
    assert limits.of(Endpoint.CHAT, "other") is BASE
    assert limits.of(Endpoint.CHAT, "m") == Timeouts(first_byte_s=20, idle_s=50, total_s=1000)
    assert limits.of(Endpoint.SCORE, "other") == Timeouts(first_byte_s=10, idle_s=5, total_s=1000)
    assert limits.of(Endpoint.SCORE, "m") == Timeouts(first_byte_s=20, idle_s=5, total_s=1000)
    assert PhaseTimeouts(BASE).of(Endpoint.SCORE, "m") is BASE


@pytest.mark.parametrize(("value", "seconds"), [(b"30", 30.0), (b" 2.5 ", 2.5), (b"1e-3", 0.001)])
def test_seconds_a_client_asks_for(value: bytes, seconds: float) -> None:
    assert asked_seconds(value) == seconds


@pytest.mark.parametrize("value", [b"", b"0", b"-3", b"nan", b"inf", b"1,5", b"ten", b"1e999", b"\xff"])
def test_what_is_no_number_of_seconds(value: bytes) -> None:
    with pytest.raises(BadRequest, match="x-request-timeout-s"):
        asked_seconds(value)
