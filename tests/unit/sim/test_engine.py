"""The simulated engine: its arithmetic by hand, against the reference simulator, and its invariants."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sim.engine import (
    PRESETS,
    Cleared,
    EngineModel,
    Finished,
    FirstToken,
    Happening,
    Removed,
    SimulatedEngine,
    Started,
    Stored,
    Tokens,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "sim" / "engine_reference.json"

# Round numbers: 10 ms a token, 1 s a step, no attention term.
PLAIN = EngineModel(0.01, 0.0, 0.0, 1.0, 0.0, 0.0, chunk_tokens=100, kv_tokens=1000, max_running=4)

T = TypeVar("T")


def only(kind: type[T], happenings: Iterable[Happening]) -> list[T]:
    return [item for item in happenings if isinstance(item, kind)]


def starts(happenings: Iterable[Happening]) -> list[tuple[object, ...]]:
    return [(item.request, item.at, item.cached_tokens, item.prefill_s) for item in only(Started, happenings)]


def engine(model: EngineModel = PLAIN, *, block_size: int = 10, token_stride: int = 0) -> SimulatedEngine:
    return SimulatedEngine(model, block_size=block_size, token_stride=token_stride)


def run_out(sim: SimulatedEngine) -> list[Happening]:
    """Everything until the engine is idle."""
    happenings: list[Happening] = []
    while (due := sim.next_event_at()) is not None:
        happenings += sim.advance(due)
    return happenings


# --------------------------------------------------------------------------- one and two requests, by hand


def test_a_request_alone_is_prefilled_and_decoded() -> None:
    sim = engine()
    started = only(Started, sim.submit(1, [1, 2], prompt_tokens=25, output_tokens=3, now=5.0))
    assert started == [Started(1, 5.0, 0, 0.25)]
    assert (sim.running, sim.waiting) == (1, 0)
    happenings = run_out(sim)
    assert happenings == [
        Stored(1, 5.25, 0, (1, 2), None),
        FirstToken(1, 5.25),
        Finished(1, 7.25),
    ]
    assert (sim.running, sim.waiting, sim.kv_usage) == (0, 0, 0.0)


def test_the_prefill_formula_counts_attention_over_cached_and_new_tokens() -> None:
    model = EngineModel(1e-4, 1e-6, 0.5, 1.0, 0.0, 0.0, chunk_tokens=100, kv_tokens=1000, max_running=4)
    assert model.prefill_s(200, 100) == pytest.approx(0.5 + 0.02 + 1e-6 * 200 * (100 + 100))


def test_prefills_are_first_come_first_served_and_slowed_by_decode() -> None:
    sim = engine()
    sim.submit(1, [1, 2], prompt_tokens=20, output_tokens=10, now=0.0)
    sim.submit(2, [3, 4, 5, 6, 7], prompt_tokens=50, output_tokens=1, now=0.1)
    assert (sim.running, sim.waiting) == (1, 1)
    happenings = run_out(sim)
    # The second starts at 0.2 and costs 0.5 s plus half a step of the one that decodes.
    assert starts(happenings) == [(2, pytest.approx(0.2), 0, pytest.approx(1.0))]
    assert [item.at for item in only(FirstToken, happenings)] == [pytest.approx(0.2), pytest.approx(1.2)]
    # During that second the first advanced half a token; nine are left after its first.
    ends = {item.request: item.at for item in only(Finished, happenings)}
    assert ends == {2: pytest.approx(1.2), 1: pytest.approx(1.2 + 8.5)}


def test_decode_steps_grow_with_the_batch_and_its_tokens() -> None:
    model = replace(PLAIN, step_request_s=0.5, step_kv_token_s=0.01)
    sim = engine(model)
    sim.submit(1, [], prompt_tokens=1, output_tokens=2, now=0.0)
    end = only(Finished, run_out(sim))[0]
    assert end.at == pytest.approx(0.01 + 1.0 + 0.5 + 0.01 * 3)


def test_hits_are_looked_up_at_the_start_and_capped_below_the_prompt() -> None:
    sim = engine()
    sim.submit(1, [1, 2], prompt_tokens=20, output_tokens=1, now=0.0)
    run_out(sim)
    assert only(Started, sim.submit(2, [1, 2], prompt_tokens=20, output_tokens=1, now=1.0))[0].cached_tokens == 19
    run_out(sim)
    assert only(Started, sim.submit(3, [1, 9], prompt_tokens=20, output_tokens=1, now=2.0))[0].cached_tokens == 10
    assert sim.counters.queried_tokens == 60
    assert sim.counters.hit_tokens == 29


def test_whole_block_hits_leave_the_last_block_to_compute() -> None:
    sim = SimulatedEngine(PLAIN, block_size=10, whole_block_hits=True)
    sim.submit(1, [1, 2], prompt_tokens=20, output_tokens=1, now=0.0)
    run_out(sim)
    assert only(Started, sim.submit(2, [1, 2], prompt_tokens=20, output_tokens=1, now=1.0))[0].cached_tokens == 10


def test_a_request_waits_for_room_and_for_a_place_in_the_batch() -> None:
    sim = engine(replace(PLAIN, kv_tokens=100))
    sim.submit(1, [1, 2, 3, 4], prompt_tokens=40, output_tokens=20, now=0.0)
    sim.submit(2, [5, 6, 7, 8], prompt_tokens=40, output_tokens=20, now=0.0)
    happenings = run_out(sim)
    ends = {item.request: item.at for item in only(Finished, happenings)}
    assert only(Started, happenings)[0].at == ends[1]

    sim = engine(replace(PLAIN, max_running=1))
    sim.submit(1, [], prompt_tokens=1, output_tokens=5, now=0.0)
    sim.submit(2, [], prompt_tokens=1, output_tokens=5, now=0.0)
    happenings = run_out(sim)
    assert only(Started, happenings)[0].at == only(Finished, happenings)[0].at


def test_a_request_larger_than_the_cache_runs_alone() -> None:
    sim = engine(replace(PLAIN, kv_tokens=50))
    sim.submit(1, list(range(20)), prompt_tokens=200, output_tokens=2, now=0.0)
    sim.submit(2, [90], prompt_tokens=10, output_tokens=2, now=0.0)
    happenings = run_out(sim)
    ends = {item.request: item.at for item in only(Finished, happenings)}
    assert starts(happenings) == [(2, ends[1], 0, pytest.approx(0.1))]


def test_eviction_is_told_before_the_request_that_needs_the_room() -> None:
    sim = engine(replace(PLAIN, kv_tokens=60))
    sim.submit(1, [1, 2, 3], prompt_tokens=30, output_tokens=1, now=0.0)
    run_out(sim)
    happenings = sim.submit(2, [4, 5, 6, 7], prompt_tokens=40, output_tokens=1, now=1.0)
    assert happenings[0] == Removed(1.0, (3, 2))
    assert sim.cached_blocks([1, 2, 3]) == 1
    assert sim.counters.evicted_blocks == 2


# --------------------------------------------------------------------------- grain, generated blocks


def test_a_stride_reports_every_token_once() -> None:
    sim = engine(token_stride=4)
    happenings = sim.submit(1, [], prompt_tokens=5, output_tokens=11, now=0.0) + run_out(sim)
    assert [item.count for item in only(Tokens, happenings)] == [4, 4, 2]
    assert only(Tokens, happenings)[-1].at == only(Finished, happenings)[0].at


def test_the_grain_changes_no_time() -> None:
    coarse, fine = engine(), engine(token_stride=1)
    for sim in (coarse, fine):
        sim.submit(1, [1, 2], prompt_tokens=25, output_tokens=30, now=0.0)
        sim.submit(2, [1, 3], prompt_tokens=20, output_tokens=7, now=0.1)
        sim.submit(3, [4], prompt_tokens=19, output_tokens=9, now=3.3)
    ends = [{item.request: item.at for item in only(Finished, run_out(sim))} for sim in (coarse, fine)]
    assert ends[0] == pytest.approx(ends[1])


def test_generated_tokens_fill_blocks_but_the_newest_is_not_computed() -> None:
    sim = engine(token_stride=1)
    # 15 prompt tokens: block 7 is full with five generated ones, once the sixth is out.
    sim.submit(1, [6], prompt_tokens=15, output_tokens=16, output_blocks=[7, 8], now=0.0)
    stored = only(Stored, run_out(sim))
    assert [(item.first, item.blocks, item.parent) for item in stored] == [(0, (6,), None), (1, (7,), 6), (2, (8,), 7)]
    assert stored[1].at == pytest.approx(0.15 + 5)
    assert stored[2].at == pytest.approx(0.15 + 15)
    assert sim.cached_blocks([6, 7, 8]) == 3


def test_more_output_blocks_than_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="output blocks"):
        engine().submit(1, [6], prompt_tokens=15, output_tokens=15, output_blocks=[7, 8], now=0.0)


def test_blocks_may_be_announced_at_the_start() -> None:
    sim = SimulatedEngine(PLAIN, block_size=10, store_at_start=True)
    assert only(Stored, sim.submit(1, [1, 2], prompt_tokens=20, output_tokens=1, now=0.0))
    assert not only(Stored, run_out(sim))
    sim.submit(2, [1, 9], prompt_tokens=20, output_tokens=1, now=1.0)
    assert only(Removed, sim.abort(2, 1.05)) == [Removed(1.05, (9,))]


# --------------------------------------------------------------------------- abort, clear, speed


def test_an_abort_in_the_queue_changes_nothing_else() -> None:
    sim = engine()
    sim.submit(1, [1], prompt_tokens=10, output_tokens=2, now=0.0)
    sim.submit(2, [2], prompt_tokens=10, output_tokens=2, now=0.0)
    sim.abort(2, 0.01)
    assert sim.waiting == 0
    assert [item.request for item in only(Finished, run_out(sim))] == [1]


def test_an_abort_in_prefill_frees_the_engine_for_the_next() -> None:
    sim = engine()
    sim.submit(1, [1, 2], prompt_tokens=20, output_tokens=2, now=0.0)
    sim.submit(2, [3], prompt_tokens=10, output_tokens=2, now=0.0)
    assert starts(sim.abort(1, 0.05)) == [(2, 0.05, 0, pytest.approx(0.1))]
    assert sim.cached_blocks([1, 2]) == 0
    assert not only(Removed, run_out(sim))
    assert sim.counters.aborted == 1


def test_an_abort_in_decode_frees_blocks_and_keeps_them_cached() -> None:
    sim = engine()
    sim.submit(1, [1, 2], prompt_tokens=20, output_tokens=50, now=0.0)
    sim.advance(3.0)
    sim.abort(1, 3.0)
    assert (sim.running, sim.in_use_blocks, sim.next_event_at()) == (0, 0, None)
    assert sim.cached_blocks([1, 2]) == 2
    assert sim.abort(1, 3.0) == []
    assert sim.counters.aborted == 1


def test_clear_is_refused_while_requests_run() -> None:
    sim = engine()
    sim.submit(1, [1], prompt_tokens=10, output_tokens=2, now=0.0)
    assert sim.clear(0.05) == (False, [])
    run_out(sim)
    assert sim.clear(9.0) == (True, [Cleared(9.0)])
    assert sim.resident_blocks == 0


def test_speed_divides_times() -> None:
    sim = engine()
    sim.set_speed(0.5, 0.0)
    sim.submit(1, [], prompt_tokens=10, output_tokens=2, now=0.0)
    happenings = run_out(sim)
    assert only(FirstToken, happenings)[0].at == pytest.approx(0.2)
    assert only(Finished, happenings)[0].at == pytest.approx(2.2)


def test_wrong_use_is_refused() -> None:
    sim = engine()
    sim.submit(1, [], prompt_tokens=10, output_tokens=2, now=1.0)
    with pytest.raises(ValueError, match="here already"):
        sim.submit(1, [], prompt_tokens=10, output_tokens=2, now=1.0)
    with pytest.raises(ValueError, match="full prompt blocks"):
        sim.submit(2, [1, 2], prompt_tokens=19, output_tokens=2, now=1.0)
    with pytest.raises(ValueError, match="go back"):
        sim.advance(0.5)


def test_every_preset_runs() -> None:
    for model in PRESETS.values():
        sim = engine(model, block_size=16)
        sim.submit(1, [1], prompt_tokens=20, output_tokens=5, now=0.0)
        assert len(only(Finished, run_out(sim))) == 1


# --------------------------------------------------------------------------- reference


def test_times_and_hits_equal_the_reference_simulator() -> None:
    golden = json.loads(GOLDEN.read_text())
    c = golden["constants"]
    model = EngineModel(
        c["a"], c["q"], c["ovh"], c["d0"], c["d1"], c["d2"], c["chunk"], c["kv_tokens"], c["max_running"]
    )
    engines = [SimulatedEngine(model, block_size=golden["block_size"]) for _ in range(golden["workers"])]
    happenings: list[Happening] = []
    for number, (at, prompt, output, blocks, _, _, _) in enumerate(golden["requests"]):
        sim = engines[(number + 1) % len(engines)]
        blocks = blocks[: prompt // golden["block_size"]]
        happenings += sim.submit(number, blocks, prompt_tokens=prompt, output_tokens=output, now=at)
    for sim in engines:
        happenings += run_out(sim)
    firsts = {item.request: item.at for item in only(FirstToken, happenings)}
    ends = {item.request: item.at for item in only(Finished, happenings)}
    hits = {item.request: item.cached_tokens for item in only(Started, happenings)}
    assert len(ends) == len(golden["requests"])
    for number, (_, _, _, _, first, end, hit) in enumerate(golden["requests"]):
        assert hits[number] == hit
        assert firsts[number] == pytest.approx(first, abs=1e-6)
        assert ends[number] == pytest.approx(end, abs=1e-6)


# --------------------------------------------------------------------------- invariants

actions = st.lists(
    st.tuples(
        st.floats(0, 3, allow_nan=False),
        st.sampled_from(["submit", "submit", "submit", "abort", "advance", "clear"]),
        st.integers(0, 5),  # which family of prompts, or which request to abort
        st.integers(0, 12),  # shared blocks
        st.integers(0, 4),  # own blocks
        st.integers(1, 25),  # output tokens
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(actions, st.integers(0, 3), st.booleans())
def test_invariants_hold_under_any_use(
    steps: list[tuple[float, str, int, int, int, int]], stride: int, cache_answers: bool
) -> None:
    model = replace(PLAIN, kv_tokens=300, max_running=3)
    sim = SimulatedEngine(model, block_size=10, token_stride=stride)
    now = 0.0
    known: set[int] = set()  # what events say is cached
    submitted: set[int] = set()
    ended: set[int] = set()
    aborted: set[int] = set()
    last_at = 0.0
    tokens: dict[int, int] = {}
    outputs: dict[int, int] = {}

    def check(happenings: list[Happening]) -> None:
        nonlocal last_at
        for item in happenings:
            assert item.at >= last_at
            last_at = item.at
            match item:
                case Stored(blocks=blocks, parent=parent):
                    assert known.isdisjoint(blocks), "stored twice without a removal"
                    assert parent is None or parent in known
                    known.update(blocks)
                case Removed(blocks=blocks):
                    assert known.issuperset(blocks), "removed something that was not stored"
                    known.difference_update(blocks)
                case Cleared():
                    known.clear()
                case FirstToken(request=request):
                    tokens[request] = 1
                case Tokens(request=request, count=count):
                    tokens[request] += count
                case Finished(request=request):
                    assert request not in aborted
                    ended.add(request)
                    if stride:
                        assert tokens[request] == outputs[request]
                case _:
                    pass
        assert sim.in_use_blocks <= sim.capacity_blocks
        assert sim.resident_blocks <= sim.capacity_blocks
        assert all(sim.cached_blocks([block]) for block in known), "told as stored but not resident"
        if not sim.running:
            assert sim.in_use_blocks == 0
            assert len(known) == sim.resident_blocks

    fresh = 10_000
    for gap, action, family, shared, own, output in steps:
        now += gap
        if action == "submit":
            number = len(submitted)
            blocks = [family * 100 + i for i in range(shared)] + list(range(fresh, fresh + own))
            fresh += own
            prompt = len(blocks) * 10 + 3
            tail = list(range(fresh, fresh + (prompt + output - 1) // 10 - len(blocks))) if cache_answers else []
            fresh += len(tail)
            submitted.add(number)
            outputs[number] = output
            check(sim.submit(number, blocks, prompt_tokens=prompt, output_tokens=output, output_blocks=tail, now=now))
        elif action == "abort" and submitted:
            number = max(submitted) - family
            happenings = sim.abort(number, now)
            check(happenings)
            if number in submitted and number not in ended:
                aborted.add(number)
        elif action == "clear":
            check(sim.clear(now)[1])
        else:
            check(sim.advance(now))
    while (due := sim.next_event_at()) is not None:
        check(sim.advance(due))
    assert ended | aborted == submitted
    assert (sim.running, sim.waiting, sim.in_use_blocks) == (0, 0, 0)
