"""A decision as a header line: what it says, that it is one bounded line, and who may see it."""

from __future__ import annotations

import json

from gateway.edge.debug import decision_line, may_see
from gateway.records import Candidate, Decision, PrefixMode, Terms, WorkerId


def decision(count: int, *, name: str = "w", excluded: int = 0) -> Decision:
    candidates = [
        Candidate(WorkerId(f"{name}{number}"), 16 * number, 0.987, Terms(cost=float(count - number), hit_s=0.12345))
        for number in range(count)
    ]
    return Decision(
        request_id="r",
        model="llama",
        pool="default",
        policy="seconds",
        worker=candidates[0].worker,
        predicted_tokens=0,
        available_tokens=16 * count,
        prompt_tokens=4000,
        block_size=16,
        mode=PrefixMode.EXACT,
        candidates=candidates,
        excluded=tuple((WorkerId(f"x{number}"), "draining") for number in range(excluded)),
    )


def told(line: bytes) -> dict[str, object]:
    name, value = line.split(b": ", 1)
    assert name == b"x-kvgate-decision"
    assert value.endswith(b"\r\n")
    answer: dict[str, object] = json.loads(value)
    return answer


def test_the_chosen_worker_comes_first_then_the_best() -> None:
    said = told(decision_line(decision(3, excluded=1)))
    assert (said["worker"], said["predicted"], said["available"]) == ("w0", 0, 48)
    assert said["candidates"] == [
        {"worker": "w0", "overlap": 0, "trust": 0.99, "cost": 3.0, "hit": 0.1235},
        {"worker": "w2", "overlap": 32, "trust": 0.99, "cost": 1.0, "hit": 0.1235},
        {"worker": "w1", "overlap": 16, "trust": 0.99, "cost": 2.0, "hit": 0.1235},
    ]
    assert said["excluded"] == {"x0": "draining"}
    assert "more" not in said


def test_it_is_one_short_line_whatever_the_fleet() -> None:
    line = decision_line(decision(500, name="\u4e2d\n" * 200, excluded=400))
    assert len(line) < 8192
    assert line.isascii()
    assert line.count(b"\n") == line.count(b"\r") == 1
    assert told(line)["more"] == 494


def test_only_the_token_opens_it() -> None:
    assert may_see(b"secret", b"secret")
    assert not may_see(b"wrong", b"secret")
    assert not may_see(None, b"secret")
    assert not may_see(b"", b"")  # without an admin token nobody may
