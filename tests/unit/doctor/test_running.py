"""What a running gateway's own numbers say about its workers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.doctor import read_gateway
from gateway.doctor.running import Counts, Member, check_member, read_counts
from gateway.records import WorkerId


def member(**more: Any) -> Member:
    known: dict[str, Any] = {"id": "w1", "url": "http://10.0.0.1:8000", "state": "ready", "trust": 1.0}
    return Member(**(known | {"index_blocks": {"gpu": 40}} | more))


def codes(worker: Member, counts: Counts | None = None) -> list[str]:
    return [found.code for found in check_member(worker, counts or Counts())]


def test_a_worker_that_is_fine() -> None:
    assert codes(member(), Counts(requests=100, available=500, predicted=400, reported=900, delivered=400)) == []


def test_a_worker_that_gets_nothing() -> None:
    assert codes(member(state="gone", reason="away")) == ["not_ready"]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (Counts(requests=100, reported=900, delivered=600), ["zero_matches"]),
        (Counts(requests=100), ["zero_matches"]),  # whether there were hits is not reported
        (Counts(requests=100, reported=900), []),  # prompts that have nothing in common
        (Counts(requests=19), []),
        (
            Counts(requests=100, available=500, predicted=500, promised=500, reported=900, delivered=600),
            ["zero_matches"],
        ),
        (Counts(requests=100, available=500, predicted=500, promised=484, reported=900, delivered=600), []),
        (Counts(requests=100, available=160), []),  # other workers held it
    ],
)
def test_zero_matches(counts: Counts, expected: list[str]) -> None:
    assert codes(member(), counts) == expected
    assert codes(member(index_blocks={"gpu": 0}), counts) == []


def test_route_misses_name_the_main_cause() -> None:
    counts = Counts(predictions=100, misses={"evicted": 2, "identity": 9})
    (found,) = check_member(member(), counts)
    assert found.code == "route_misses"
    assert "11% of 100" in found.message
    assert "identity" in found.message
    assert codes(member(), Counts(predictions=100, misses={"evicted": 5})) == []
    assert codes(member(), Counts(predictions=10, misses={"evicted": 9})) == []


def test_trust_and_feed() -> None:
    events = [{"rank": 0, "endpoint": "tcp://10.0.0.1:5557"}]
    answer = {"id": "w1", "url": "u", "state": "ready", "trust": 0.5, "events": events}
    worker = json.dumps(answer | {"feed": {"errors": 2, "replays": {"unavailable": 1, "complete": 9}}}).encode()
    assert codes(msgspec.json.decode(worker, type=Member)) == ["low_trust", "feed_errors"]
    assert codes(member(trust=0.5)) == []  # without events there is nothing to trust


def test_counts_are_those_of_the_worker() -> None:
    text = b"""
kvgate_requests_total{model="m",pool="p",worker="w1",code="200"} 7.0
kvgate_requests_total{model="m",pool="p",worker="w1",code="500"} 1.0
kvgate_requests_total{model="m",pool="p",worker="w2",code="200"} 90.0
kvgate_delivered_tokens_total{model="m",pool="p",worker="w1"} 64.0
kvgate_route_predictions_total{worker="w1"} 5.0
kvgate_route_misses_total{worker="w1",cause="evicted"} 2.0
kvgate_route_misses_total{worker="w2",cause="evicted"} 3.0
"""
    assert read_counts(text, "w1") == Counts(requests=8, delivered=64, predictions=5, misses={"evicted": 2})


# --------------------------------------------------------------------------- asking


WORKERS = {
    "workers": [
        {
            "id": f"w1@{rank}",
            "member": "w1",
            "url": "http://10.0.0.1:8000",
            "state": "ready" if rank else "gone",
            "trust": 1.0,
            "events": [{"rank": rank, "endpoint": f"tcp://10.0.0.1:{5557 + rank}", "replay_endpoint": None}],
            "findings": [{"severity": "warning", "code": "no_replay", "message": "m", "fix": "f"}],
            "new_field": [1],
        }
        for rank in (0, 1)
    ],
    "joining": [{"id": "w2", "error": "no connection"}],
}


def test_ranks_of_one_server_are_checked_once() -> None:
    seen = read_gateway(json.dumps(WORKERS).encode(), b"")
    (server,) = seen.servers
    assert (server.name, server.url, server.kv_events) == ("w1", "http://10.0.0.1:8000", "tcp://10.0.0.1:5557")
    found = {name: [one.code for one in many] for name, many in seen.findings.items()}
    assert found == {"w1@0": ["not_ready"], "w1": ["no_replay"], "w1@1": [], "w2": ["not_joined"]}
    assert "no connection" in seen.findings[WorkerId("w2")][0].message


@pytest.mark.parametrize("answer", [b"<html>", b'{"workers": [{"id": 1}]}', b'{"a": ' + b"[" * 100_000])
def test_an_answer_that_is_none(answer: bytes) -> None:
    seen = read_gateway(answer, b"")
    assert seen.problem is not None
    assert seen.problem.code == "gateway_unreachable"
    assert "unexpected" in seen.problem.message
