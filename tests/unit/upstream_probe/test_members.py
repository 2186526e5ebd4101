"""What is learned of a server from the answers of its workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from gateway.records import Endpoint, EngineKind, Outcome, Result, WorkerFacts, WorkerId, WorkerSpec
from gateway.upstream.members import Member

FACTS = WorkerFacts(EngineKind.VLLM, "0.32.0", ("m",))


def member() -> Member:
    return Member(WorkerSpec(WorkerId("w1"), "http://w1:8000"))


def outcome(**more: Any) -> Outcome:
    ended = Outcome("r", Endpoint.CHAT, "m", "default", WorkerId("w1"), Result.COMPLETED, 200, False, 0.0, 1.0)
    return structs.replace(ended, completion_tokens=1, **more)


def test_one_answer_with_a_count_is_proof_also_of_none() -> None:
    server = member()
    assert server.with_reports(FACTS).cached_tokens_reported is None
    server.answered(outcome(predicted_tokens=0, delivered_tokens=0))
    assert server.with_reports(FACTS) == replace(FACTS, cached_tokens_reported=True)


def test_a_server_is_silent_when_hits_are_never_reported() -> None:
    server = member()
    for _ in range(100):
        server.answered(outcome(predicted_tokens=0))  # nothing to report
        server.answered(outcome(predicted_tokens=64, endpoint=Endpoint.COMPLETIONS))  # several prompts have no count
    for _ in range(7):
        server.answered(outcome(predicted_tokens=64))
        assert server.with_reports(FACTS).cached_tokens_reported is None
    server.answered(outcome(predicted_tokens=64))
    told = server.with_reports(FACTS)
    assert told.cached_tokens_reported is False
    assert [finding.code for finding in told.findings] == ["hits_not_reported"]
    server.answered(outcome(predicted_tokens=64, delivered_tokens=64))
    assert server.with_reports(FACTS).cached_tokens_reported is True


@pytest.mark.parametrize("said", [True, False])
def test_what_the_server_says_wins(said: bool) -> None:
    server = member()
    server.answered(outcome(delivered_tokens=1))
    facts = replace(FACTS, cached_tokens_reported=said)
    assert server.with_reports(facts) is facts


def test_a_restart_may_have_changed_it() -> None:
    server = member()
    server.answered(outcome(delivered_tokens=1))
    server.restarted(None)
    assert server.with_reports(FACTS) is FACTS
