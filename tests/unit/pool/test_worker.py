"""One worker's accounting: reservations, waiting time, KV room, other clients' work, what first bytes teach."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gateway.pool import PoolRates, Reservation, Worker
from gateway.pool.worker import STALE_S
from gateway.records import EngineKind, LoadSample, Slot, WorkerFacts, WorkerId, WorkerSpec


def make_worker(*, kv_blocks: int | None = 1000, rates: PoolRates | None = None) -> Worker:
    spec = WorkerSpec(WorkerId("w"), "http://w:8000")
    facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=16, kv_blocks=kv_blocks)
    return Worker(spec.name, Slot(0), spec, facts, rates or PoolRates(), 16, added_at=0.0)


def make_reservation(prefill_s: float = 1.0, *, new: int = 1000, output: int = 0, streamed: bool = True) -> Reservation:
    return Reservation(new, 0, output, prefill_s, streamed, sent_at=0.0)


def test_wait_is_what_is_ahead_less_what_has_run() -> None:
    worker = make_worker()
    first, second = make_reservation(2.0), make_reservation(3.0)
    worker.reserve(first, 10.0)
    worker.reserve(second, 11.0)
    assert (worker.pending_s, worker.head_s, worker.head_since) == (5.0, 2.0, 10.0)
    worker.first_byte(first, 12.5)
    assert (worker.pending_s, worker.head_s, worker.head_since) == (3.0, 3.0, 12.5)
    worker.first_byte(second, 14.0)
    assert (worker.pending_s, worker.head_s, worker.pending) == (0.0, 0.0, 0)
    assert worker.inflight_requests == 2


def test_the_head_goes_on_when_another_one_finishes_first() -> None:
    worker = make_worker()
    first, second = make_reservation(2.0), make_reservation(3.0)
    worker.reserve(first, 10.0)
    worker.reserve(second, 10.0)
    worker.first_byte(second, 11.0)
    assert (worker.pending_s, worker.head_since) == (2.0, 10.0)


def test_release_puts_every_number_back_and_is_once_only() -> None:
    worker = make_worker()
    reservations = [make_reservation(1.0, output=100) for _ in range(3)]
    for reservation in reservations:
        worker.reserve(reservation, 1.0)
    worker.first_byte(reservations[1], 2.0)
    for reservation in reservations:
        worker.release(reservation, 3.0)
        worker.release(reservation, 3.0)
        worker.first_byte(reservation, 3.0)
    state = (worker.inflight_requests, worker.inflight_tokens, worker.pending, worker.pending_s, worker.kv_tokens)
    assert state == (0, 0, 0, 0.0, 0)
    assert worker.unindexed_tokens == 0


def test_requests_without_a_stream_leave_the_queue_when_their_estimate_has_run_out() -> None:
    worker = make_worker()
    plain = [make_reservation(1.0, streamed=False) for _ in range(3)]
    for reservation in plain:
        worker.reserve(reservation, 10.0)
    worker.tick(12.5)
    assert (worker.pending, worker.pending_s, worker.head_since) == (1, 1.0, 12.0)
    worker.tick(20.0)
    assert worker.pending == 0
    assert worker.inflight_requests == 3


def test_kv_room_is_the_poll_plus_what_we_did_since() -> None:
    worker = make_worker(kv_blocks=1000)  # 16,000 tokens
    running, queued = make_reservation(new=800, output=200), make_reservation(new=500, output=100)
    worker.reserve(running, 0.0)
    worker.first_byte(running, 1.0)
    worker.reserve(queued, 1.0)
    assert worker.kv_tokens == 1600
    worker.observe(LoadSample(running=2, waiting=0, kv_usage=0.5), 2.0)
    assert worker.kv_tokens == 8000  # the head of the queue is in the engine's own figure
    later = make_reservation(new=1000, output=0)
    worker.reserve(later, 2.5)
    assert worker.kv_tokens == 9000
    worker.release(running, 3.0)
    assert worker.kv_tokens == 8000


def test_a_stale_poll_says_nothing() -> None:
    worker = make_worker()
    worker.observe(LoadSample(running=0, waiting=0, kv_usage=0.9), 1.0)
    worker.tick(1.0 + STALE_S)
    assert worker.kv_tokens == 14_400
    worker.tick(1.1 + STALE_S)
    assert (worker.load, worker.kv_tokens) == (None, 0)


def test_capacity_of_a_poll_wins_over_the_probe_and_none_means_no_price() -> None:
    worker = make_worker(kv_blocks=None)
    assert worker.kv_capacity == 0
    worker.observe(LoadSample(0, 0, 0.0, kv_blocks=50), 1.0)
    assert worker.kv_capacity == 800


def test_other_clients_work_counts_after_two_polls_and_at_the_hit_rate_seen() -> None:
    rates = PoolRates()
    rates.learn_prompt(1000)
    worker = make_worker(rates=rates)
    busy = LoadSample(running=2, waiting=4, kv_usage=0.1, prefix_queries=0.0, prefix_hits=0.0)
    worker.observe(busy, 1.0)
    assert (worker.foreign_requests, worker.foreign_s) == (0.0, 0.0)
    worker.observe(busy, 2.0)
    assert worker.foreign_requests == 6.0
    assert worker.foreign_s == pytest.approx(4 * rates.prefill_s(500, 500))  # half of a prompt is taken to hit
    for number in range(1, 100):
        worker.observe(LoadSample(2, 4, 0.1, prefix_queries=1000.0 * number, prefix_hits=950.0 * number), 2.0 + number)
    assert worker.hit_rate == pytest.approx(0.95, abs=0.01)
    assert worker.foreign_s < 4 * rates.prefill_s(100, 900)


def test_our_own_requests_are_not_taken_for_others() -> None:
    worker = make_worker()
    for _ in range(3):
        worker.reserve(make_reservation(), 0.0)
    for at in (1.0, 2.0, 3.0):
        worker.observe(LoadSample(running=1, waiting=2, kv_usage=0.1), at)
    assert (worker.foreign_requests, worker.foreign_s) == (0.0, 0.0)


def learn_once(worker: Worker, *, streamed: bool = True, took_s: float = 0.5) -> int:
    before = worker.rates.samples
    reservation = make_reservation(0.2, streamed=streamed)
    worker.reserve(reservation, 100.0)
    worker.first_byte(reservation, 100.0 + took_s)
    worker.release(reservation, 101.0)
    return worker.rates.samples - before


def test_a_first_byte_of_an_idle_worker_teaches_its_speed() -> None:
    worker = make_worker()
    assert learn_once(worker) == 1


def test_what_says_nothing_about_prefill_is_not_learned_from() -> None:
    assert learn_once(make_worker(), streamed=False) == 0  # the head of a whole answer comes at its end
    crowded = make_worker(kv_blocks=65)  # 1,040 tokens: the request may have waited for room
    assert learn_once(crowded) == 0
    gone = make_worker()
    reservation = make_reservation()
    gone.reserve(reservation, 1.0)
    gone.release(reservation, 2.0)
    assert gone.rates.samples == 0


def test_a_busy_period_is_learned_as_a_whole() -> None:
    """Two prompts prefilled in one batch give their first bytes together; their sum is what took the time."""
    worker = make_worker()
    for _ in range(40):
        first, second = make_reservation(0.1, new=500), make_reservation(0.1, new=500)
        worker.reserve(first, 100.0)
        worker.reserve(second, 100.0)
        worker.first_byte(first, 100.3)
        worker.first_byte(second, 100.3)
        worker.release(first, 101.0)
        worker.release(second, 101.0)
    assert worker.rates.samples == 40
    assert 2 * worker.rates.prefill_s(500, 0) == pytest.approx(0.3, rel=0.1)


def test_a_worker_that_never_idles_is_soon_known_to_be_slow() -> None:
    """Its busy period is closed when it has taken twice the estimate of all that was sent, not after eight prefills."""
    worker = make_worker()
    for _ in range(10):
        learn_once(worker, took_s=0.2)
    first, second = make_reservation(0.2), make_reservation(0.2)
    worker.reserve(first, 200.0)
    worker.reserve(second, 200.0)
    known = worker.rates.samples
    worker.first_byte(first, 200.3)
    assert worker.rates.samples == known
    third = make_reservation(0.2)
    worker.reserve(third, 200.3)
    worker.first_byte(second, 203.0)
    assert worker.rates.samples == known + 1


def test_an_account_of_regret_is_bounded_fades_and_ends_with_the_slowness() -> None:
    worker = make_worker()
    for _ in range(20):
        worker.speed.learn(10.0)
    worker.relearn()
    worker.owe(3.0)
    assert (worker.regret_s, worker.standing[7], worker.rates.regretted) == (3.0, 3.0, True)
    worker.owe(-4.0)
    assert worker.regret_s == 0.0
    worker.owe(1e6)
    most = worker.regret_s
    assert most < 60.0
    worker.tick(0.5)
    assert 0.9 * most < worker.regret_s < most
    for _ in range(5):
        worker.speed.learn(1.0)
    worker.relearn()
    assert worker.regret_s == worker.standing[7] == 0.0


def test_victims_are_worth_less_the_slower_the_cache_turns_over() -> None:
    def discount(every_s: float) -> float:
        worker = make_worker()
        at = 0.0
        while at < 300.0:
            at += every_s
            reservation = make_reservation(0.01, new=800)
            worker.reserve(reservation, at)
            worker.first_byte(reservation, at + 0.01)
            worker.release(reservation, at + 0.02)
        return worker.evict_discount

    fast, slow = discount(1.0), discount(30.0)
    assert 0.0 < slow < fast < 1.0
    # 16,000 idle tokens at 800 tokens a second are 20 s old.
    assert fast == pytest.approx(2.718 ** (-20 / 300), rel=0.05)


def busy_period(worker: Worker, *, then: Reservation) -> None:
    """Eight first bytes close a period while `then` is still waiting."""
    streams = [make_reservation(1.0) for _ in range(8)]
    for reservation in streams:
        worker.reserve(reservation, 0.0)
    worker.reserve(then, 0.0)
    for number, reservation in enumerate(streams, 1):
        worker.first_byte(reservation, float(number))


def test_a_prefill_nobody_saw_end_spoils_the_period_that_began_behind_it() -> None:
    """Its seconds would be learned as those of the others' tokens."""
    worker = make_worker()
    busy_period(worker, then=make_reservation(5.0, streamed=False))
    before = worker.rates.samples
    late = make_reservation(1.0)
    worker.reserve(late, 8.5)
    worker.settle_due(13.0)
    worker.first_byte(late, 14.0)
    assert worker.rates.samples == before


def test_a_period_that_begins_beside_other_clients_work_is_not_learned() -> None:
    worker = make_worker()
    worker.rates.learn_prompt(1000)
    last = make_reservation(1.0)
    busy = LoadSample(running=9, waiting=8, kv_usage=0.1)
    worker.observe(busy, 0.0)
    worker.observe(busy, 0.0)
    assert worker.foreign_s > 0.0
    busy_period(worker, then=last)
    worker.first_byte(last, 9.0)
    assert worker.rates.samples == 0


def test_a_usage_outside_its_range_is_none() -> None:
    worker = make_worker()
    worker.observe(LoadSample(running=0, waiting=0, kv_usage=-3.0), 0.0)
    assert worker.kv_tokens == 0
    worker.observe(LoadSample(running=0, waiting=0, kv_usage=1e308), 0.0)
    assert worker.kv_tokens == worker.kv_capacity


def test_a_sample_lasts_as_long_as_it_is_told_to() -> None:
    spec = WorkerSpec(WorkerId("w"), "http://w:8000")
    facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=16)
    worker = Worker(spec.name, Slot(0), spec, facts, PoolRates(), 16, added_at=0.0, stale_s=50.0)
    worker.observe(LoadSample(running=0, waiting=0, kv_usage=0.5), 0.0)
    worker.tick(49.0)
    assert worker.load is not None
    worker.tick(51.0)
    assert worker.load is None


def test_kv_room_said_in_tokens_counts_as_said_and_room_not_said_leaves_ours() -> None:
    worker = make_worker()
    worker.reserve(make_reservation(new=1000, output=500), 0.0)
    worker.observe(LoadSample(1, 0, None, kv_tokens=4000), 1.0)
    assert worker.kv_tokens == 4000
    worker.reserve(make_reservation(new=100, output=0), 1.5)
    assert worker.kv_tokens == 4100
    worker.observe(LoadSample(2, 0, None), 2.0)
    assert worker.kv_tokens == 1600


def test_an_overtaken_request_speaks_of_a_worker_that_answers_nobody() -> None:
    """Once for all that were sent before it was seen, and not of one that answers others meanwhile."""
    worker = make_worker()
    first, second, third, fourth = (Reservation(1000, 0, 0, 1.0, True, sent_at=at) for at in (1.0, 2.0, 6.0, 10.0))
    worker.reserve(first, 1.0)
    worker.reserve(second, 2.0)
    assert worker.overtaken(first, 5.0)
    worker.release(first, 5.0)
    assert not worker.overtaken(second, 5.5), "sent before that was seen"
    worker.release(second, 5.5)
    worker.reserve(third, 6.0)
    assert worker.overtaken(third, 9.0)
    worker.release(third, 9.0)
    other = Reservation(1000, 0, 0, 1.0, True, sent_at=10.0)
    worker.reserve(fourth, 10.0)
    worker.reserve(other, 10.0)
    worker.first_byte(other, 11.0)
    assert not worker.overtaken(fourth, 12.0), "it answers others"
    worker.release(fourth, 12.0)
    worker.release(other, 12.0)
    assert (worker.inflight_requests, worker.pending) == (0, 0)


def test_an_overtaken_request_is_evidence_for_the_speed() -> None:
    worker = make_worker()
    for at in range(10):  # speeds are learned
        seen = make_reservation()
        worker.reserve(seen, float(at))
        worker.first_byte(seen, at + 0.5)
        worker.release(seen, at + 0.5)
    before, pool = worker.slowdown, worker.rates.prefill
    for at in range(20, 220, 10):
        late = make_reservation()
        worker.reserve(late, float(at))
        worker.overtaken(late, at + 5.0)
        worker.release(late, at + 5.0)
    assert worker.slowdown > 1.5 * before
    assert worker.rates.prefill == pool, "of the others it says nothing"
    slow = worker.slowdown
    beside, early = make_reservation(), make_reservation()
    worker.reserve(early, 270.0)
    worker.overtaken(early, 270.1)  # sooner than expected: it may have been about to answer
    worker.reserve(beside, 271.0)
    worker.overtaken(beside, 290.0)  # behind another one
    assert worker.slowdown == slow


def test_what_decisions_read_follows_a_speed_that_is_known_better_and_a_changed_cache() -> None:
    worker = make_worker()
    worker.speed.learn(3.0)
    worker.relearn()
    assert worker.standing[0] == worker.slowdown != 1.0
    worker.refit(replace(worker.facts, kv_blocks=500), 16)
    assert worker.standing[9] == worker.kv_capacity == 8_000


def test_who_joins_earns_nothing_for_waits_from_before() -> None:
    rates = PoolRates()
    rates.waited_s = 7.0
    worker = make_worker(rates=rates)
    assert (worker.idle_since_s, rates.settled_s) == (7.0, 7.0)
