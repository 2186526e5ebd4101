"""Checks over what was asked: each finding, and what is no finding because it was not asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway import findings
from gateway.doctor.checks import (
    FeedSeen,
    Heard,
    LoadSeen,
    Reach,
    Seen,
    Tried,
    check_block_size,
    check_clock,
    check_events,
    check_hashes,
    check_hits,
    check_load_addresses,
    check_replay,
    check_salts,
    check_sockets,
    judge,
    outside,
)
from gateway.doctor.fleet import Checked, worst
from gateway.records import EngineKind, EventSource, Finding, LoadEndpoint, Severity, WorkerFacts, WorkerId, WorkerSpec

SOURCE = EventSource(0, "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5657")
FACTS = WorkerFacts(EngineKind.VLLM, "0.33.0", ("llama",), block_size=16, events=(SOURCE,))
SPEC = WorkerSpec(name=WorkerId("w1"), url="http://10.0.0.1:8000")
HEARD = Heard(batches=1, hashes=frozenset({7}), block_sizes=frozenset({16}), skew_s=0.0)


def seen(heard: Heard | None = HEARD, *, facts: WorkerFacts = FACTS, **more: Any) -> Seen:
    feed = FeedSeen(SOURCE, Reach.OPEN, Reach.OPEN, heard)
    return replace(Seen(SPEC, facts, feeds=(feed,), tried=Tried(200, 0, 192, 0)), **more)


def codes(found: Any) -> list[str]:
    return [one.code for one in found]


def test_nothing_is_wrong() -> None:
    assert judge(seen()) == []


def test_what_was_not_asked_is_no_finding() -> None:
    assert judge(Seen(SPEC)) == []
    assert judge(Seen(SPEC, FACTS)) == []
    assert judge(seen(None, tried=None)) == []


@pytest.mark.parametrize(
    ("said", "window", "expected"),
    [((10, 11), (10.5, 10.6), 0), ((10, 11), (12, 13), -1), ((10, 11), (7, 8), 2), ((10, 10), (9, 11), 0)],
)
def test_how_far_a_time_lies_outside(said: tuple[float, float], window: tuple[float, float], expected: float) -> None:
    assert outside(*said, window=window) == expected


def test_sockets() -> None:
    feed = FeedSeen(SOURCE, Reach.NOBODY, Reach.FOREIGN)
    found = list(check_sockets(seen(feeds=(feed,))))
    assert codes(found) == ["events_unreachable", "replay_unreachable"]
    assert SOURCE.endpoint in found[0].message
    assert "tcp://10.0.0.1:5657" in found[1].message


def test_no_replay_is_said_once_and_not_where_it_is_wanted_so() -> None:
    without = replace(FACTS, events=(replace(SOURCE, replay_endpoint=None),))
    assert codes(check_replay(seen(facts=without))) == ["no_replay"]
    told = replace(without, findings=(findings.NO_REPLAY.found(),))
    assert codes(judge(seen(facts=told))) == ["no_replay"]
    assert codes(check_replay(seen(facts=without, spec=replace(SPEC, kv_replay="")))) == []


def test_silent_events() -> None:
    assert codes(check_events(seen(Heard(batches=4)))) == ["events_silent"]
    assert codes(check_events(seen(Heard(), tried=Tried(200, status=400)))) == []


@pytest.mark.parametrize(("routed", "silent"), [(True, ["events_silent"]), (False, [])])
def test_silent_ranks(routed: bool, silent: list[str]) -> None:
    """Where the engine chooses the rank, the others have nothing to tell."""
    second = EventSource(1, "tcp://10.0.0.1:5558", "tcp://10.0.0.1:5658")
    facts = replace(FACTS, events=(SOURCE, second), ranks=(0, 1), rank_routing=routed)
    feeds = (FeedSeen(SOURCE, Reach.OPEN, Reach.OPEN, HEARD), FeedSeen(second, Reach.OPEN, Reach.OPEN, Heard()))
    found = list(check_events(seen(facts=facts, feeds=feeds)))
    assert codes(found) == silent
    assert all("5558" in one.message and "5557" not in one.message for one in found)


def test_block_sizes() -> None:
    assert codes(check_block_size(seen(replace(HEARD, block_sizes=frozenset({32}))))) == ["block_size_wrong"]
    # Cache groups of a hybrid model have sizes of their own; one of them is the one keys are cut in.
    assert codes(check_block_size(seen(replace(HEARD, block_sizes=frozenset({16, 64}))))) == []


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        (Tried(200, 0, None, None), ["hits_not_reported"]),
        (Tried(200, None, 0, None), ["repeat_missed"]),
        (Tried(200, None, 192, None), []),
        (Tried(200, status=503, problem="full"), ["probe_refused"]),
    ],
)
def test_hits(tried: Tried, expected: list[str]) -> None:
    assert codes(check_hits(seen(tried=tried))) == expected


def test_hits_where_the_engine_chooses_the_rank() -> None:
    facts = replace(FACTS, ranks=(0, 1))
    assert codes(check_hits(seen(facts=facts, tried=Tried(200, 0, 0, 0)))) == []
    assert codes(check_hits(seen(facts=replace(facts, rank_routing=True), tried=Tried(200, 0, 0, 0)))) == [
        "repeat_missed"
    ]


def test_without_prefix_caching_nothing_else_is_blamed() -> None:
    facts = replace(FACTS, findings=(findings.PREFIX_CACHING_OFF.found(),))
    assert codes(judge(seen(Heard(), facts=facts, tried=Tried(200, None, None, None)))) == ["prefix_caching_off"]


def test_salts() -> None:
    assert codes(check_salts(seen(replace(HEARD, salt_shown=True)))) == ["salts_in_clear"]
    for own in ("ipc:///run/kv", "tcp://127.0.0.1:5557", "tcp://localhost:5557", "tcp://[::1]:5557"):
        local = FeedSeen(EventSource(0, own), Reach.OPEN, None, replace(HEARD, salt_shown=True))
        assert codes(check_salts(seen(feeds=(local,)))) == []
    assert codes(check_salts(seen(tried=Tried(200, 0, 192, 192)))) == ["salt_ignored"]


def test_clocks() -> None:
    assert codes(check_clock(seen(skew_s=1.9))) == []
    (ahead,) = check_clock(seen(skew_s=2.5))
    assert "2.5 s ahead" in ahead.message
    (behind,) = check_clock(seen(replace(HEARD, skew_s=-120.0)))
    assert "120.0 s behind" in behind.message
    assert "events" in behind.message
    assert codes(check_clock(seen(replace(HEARD, skew_s=-9.0), skew_s=-9.0))) == ["clock_skew"]


def test_hashes_of_several_workers() -> None:
    second = replace(SPEC, name=WorkerId("w2"))
    other = replace(HEARD, hashes=frozenset({8}))
    assert list(check_hashes([seen(), seen(spec=second)])) == []
    ((worker, found),) = check_hashes([seen(), seen(other, spec=second)])
    assert (worker.name, found.code, found.severity) == ("w2", "hashes_unseeded", Severity.INFO)
    # Another engine, model or block size has names of its own.
    for facts in (replace(FACTS, engine=EngineKind.SGLANG), replace(FACTS, models=("qwen",))):
        assert list(check_hashes([seen(), seen(other, facts=facts, spec=second)])) == []
    assert list(check_hashes([seen(), seen(replace(other, block_sizes=frozenset({32})), spec=second)])) == []


def test_the_worst_comes_first_and_each_code_once() -> None:
    def found(severity: Severity, code: str) -> Finding:
        return Finding(severity, code, "what", "fix")

    checked = Checked(SPEC, FACTS, [found(Severity.INFO, "a")])
    checked.add([found(Severity.ERROR, "b"), found(Severity.WARNING, "a"), found(Severity.WARNING, "c")])
    assert [(one.severity.value, one.code) for one in checked.findings] == [
        ("error", "b"),
        ("warning", "c"),
        ("info", "a"),
    ]
    assert worst(checked.findings) is Severity.ERROR
    assert worst([]) is None


def test_load_sockets_that_are_not_heard_or_that_several_name() -> None:
    own, others = LoadEndpoint(0, "tcp://h:6000", "load"), LoadEndpoint(1, "tcp://h:6001", "load")
    quiet = seen(loads=(LoadSeen(own, Reach.OPEN), LoadSeen(others, Reach.SILENT)))
    assert codes(judge(quiet)) == ["load_unheard"]
    assert "tcp://h:6001" in judge(quiet)[0].message
    heard = seen(loads=(LoadSeen(own, Reach.OPEN),))
    assert judge(heard) == []
    assert list(check_load_addresses([heard, seen()])) == []
    shared = list(check_load_addresses([heard, quiet, seen()]))
    assert [finding.code for _, finding in shared] == ["load_unheard"] * 2
    assert all("tcp://h:6000" in finding.message and "6001" not in finding.message for _, finding in shared)
