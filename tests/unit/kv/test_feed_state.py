"""The feed's state machine: start, gaps, restarts, replays that stop early, bounds (failure case B2, basics of B1)."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gateway.kv.events import KvBatch, decode_batch, parse_live
from gateway.kv.feed_state import Action, Apply, AskReplay, FeedLimits, FeedPhase, FeedState, Purge
from gateway.kv.index import KvIndex
from gateway.records import EngineKind, Slot, Tier, TrustState

GOLDEN = Path(__file__).parents[2] / "golden" / "kv_events"


def payload(ts: float) -> bytes:
    return msgspec.msgpack.encode([ts, [], 0])


def live(feed: FeedState, *numbers: int, now: float = 0.0) -> list[Action]:
    """Live batches whose own time grows with their number."""
    return [action for seq in numbers for action in feed.on_live(seq, payload(100.0 + seq), now)]


def replay(feed: FeedState, *numbers: int, now: float = 0.0) -> list[Action]:
    return [action for seq in numbers for action in feed.on_replay(seq, payload(100.0 + seq), now)]


def short(actions: list[Action]) -> list[object]:
    """Applied numbers as they are, questions as `ask N`, purges by their reason."""
    words: list[object] = []
    for action in actions:
        match action:
            case Apply():
                words.append(action.seq)
            case AskReplay():
                words.append(f"ask {action.from_seq}")
            case Purge():
                words.append(action.reason)
    return words


def started(*, can_replay: bool = True, limits: FeedLimits | None = None) -> FeedState:
    """A feed that is live, with batches 0 to 2 applied."""
    feed = FeedState(can_replay=can_replay, limits=limits)
    feed.on_connected(0.0)
    if can_replay:
        replay(feed, 0, 1, 2)
        feed.on_replay_end(0.0)
    else:
        live(feed, 0, 1, 2)
    assert feed.phase is FeedPhase.LIVE
    return feed


# ---------------------------------------------------------------- start


def test_start_replays_from_zero_and_buffers_live_batches() -> None:
    feed = FeedState(can_replay=True)
    assert (feed.phase, feed.caught_up) == (FeedPhase.STARTING, False)
    assert short(feed.on_connected(0.0)) == ["ask 0"]
    assert (feed.phase, feed.caught_up) == (FeedPhase.REPLAYING, False)
    assert live(feed, 2, 3) == []
    assert short(replay(feed, 0, 1, 2)) == [0, 1, 2]
    assert short(feed.on_replay_end(0.0)) == [3]
    assert (feed.phase, feed.caught_up, feed.expected) == (FeedPhase.LIVE, True, 4)
    assert short(live(feed, 4)) == [4]
    assert (feed.counters.batches, feed.counters.gaps, feed.counters.resets) == (5, 0, 0)
    assert feed.counters.replays == {"complete": 1}
    assert feed.counters.last_event_unix == 104.0


def test_what_a_replay_was_faster_with_is_dropped() -> None:
    feed = started()
    assert short(live(feed, 1, 2, 3)) == [3]
    assert (feed.counters.duplicates, feed.counters.resets) == (2, 0)


def test_batches_between_replay_and_subscription_are_asked_for() -> None:
    feed = started()
    assert short(live(feed, 5)) == ["ask 3"]
    assert short(replay(feed, 3, 4, 5)) == [3, 4, 5]
    assert short(feed.on_replay_end(0.0)) == []
    assert feed.phase is FeedPhase.LIVE


def test_nothing_was_published_yet() -> None:
    feed = FeedState(can_replay=True)
    feed.on_connected(0.0)
    assert feed.on_replay_end(0.0) == []
    assert feed.phase is FeedPhase.LIVE
    assert short(live(feed, 0, 1)) == [0, 1]


def test_first_live_number_after_an_empty_replay_is_not_zero() -> None:
    feed = FeedState(can_replay=True)
    feed.on_connected(0.0)
    feed.on_replay_end(0.0)
    assert short(live(feed, 2)) == ["ask 0"]
    assert feed.counters.gaps == 0
    assert short(replay(feed, 0, 1, 2)) == [0, 1, 2]


def test_without_replay_a_late_start_is_known_to_be_partial() -> None:
    feed = FeedState(can_replay=False)
    assert feed.on_connected(0.0) == []
    assert feed.caught_up
    assert short(live(feed, 7, 8)) == [7, 8]
    assert feed.phase is FeedPhase.LOST
    assert feed.counters.gaps == 0


def test_trimmed_history_at_start() -> None:
    feed = FeedState(can_replay=True)
    feed.on_connected(0.0)
    assert short(replay(feed, 500, 501)) == [500, 501]
    feed.on_replay_end(0.0)
    assert (feed.phase, feed.caught_up) == (FeedPhase.LOST, True)
    assert feed.counters.replays == {"history_gone": 1}


# ---------------------------------------------------------------- gaps


def test_a_gap_is_replayed_while_live_batches_wait() -> None:
    feed = started()
    assert short(live(feed, 5, 6)) == ["ask 3"]
    assert not feed.caught_up
    assert short(replay(feed, 3, 4, 5)) == [3, 4, 5]
    assert short(feed.on_replay_end(0.0)) == [6]
    assert feed.phase is FeedPhase.LIVE
    assert feed.counters.gaps == 1
    assert sum(feed.counters.purges.values()) == 0


def test_a_gap_without_replay_purges_and_goes_on() -> None:
    feed = started(can_replay=False)
    assert short(live(feed, 5, 6)) == ["gap", 5, 6]
    assert feed.phase is FeedPhase.LOST
    assert (feed.counters.gaps, feed.counters.replays) == (1, {"unavailable": 1})
    assert short(live(feed, 8)) == ["gap", 8]


def test_a_gap_whose_history_is_gone_purges_and_goes_on_from_there() -> None:
    feed = started()
    live(feed, 9)
    assert short(replay(feed, 6, 7)) == ["history_gone", 6, 7]
    assert short(replay(feed, 8, 9)) == [8, 9]
    feed.on_replay_end(0.0)
    assert feed.phase is FeedPhase.LOST
    assert feed.counters.replays == {"complete": 1, "history_gone": 1}


def test_a_hole_inside_a_replay_is_asked_for_once_and_then_taken_for_lost() -> None:
    feed = started()
    live(feed, 8)
    assert short(replay(feed, 3, 5)) == [3, "ask 4"]
    assert short(replay(feed, 5, 6)) == ["history_gone", 5, 6]
    assert short(replay(feed, 7)) == [7]
    assert short(feed.on_replay_end(0.0)) == [8]
    assert feed.phase is FeedPhase.LOST


def test_an_engine_that_never_has_the_missing_batch_is_not_asked_for_ever() -> None:
    feed = started()
    questions = short(live(feed, 5))
    while feed.phase is FeedPhase.REPLAYING:
        questions += short(feed.on_replay_end(0.0))
        assert len(questions) < 10
    assert questions == ["ask 3", "ask 3", "ask 3", "gap", 5]


# ---------------------------------------------------------------- replays that stop early


def test_silence_asks_again_from_the_next_missing_number() -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(reply_timeout_s=1.0))
    feed.on_connected(10.0)
    replay(feed, 0, 1, now=10.5)
    assert feed.deadline == 11.5
    assert feed.on_tick(11.4) == []
    assert short(feed.on_tick(11.5)) == ["ask 2"]
    assert short(replay(feed, 2, now=11.6)) == [2]
    feed.on_replay_end(11.7)
    assert feed.phase is FeedPhase.LIVE
    assert feed.deadline is None


def test_tries_in_vain_are_bounded_and_get_slower() -> None:
    feed = started(limits=FeedLimits(reply_timeout_s=1.0, replay_tries=3, replay_rest_s=60.0))
    assert short(live(feed, 5, now=100.0)) == ["ask 3"]
    assert feed.deadline == 101.0
    assert short(feed.on_tick(101.0)) == ["ask 3"]
    assert feed.deadline == 103.0
    assert short(feed.on_tick(103.0)) == ["ask 3"]
    assert feed.deadline == 107.0
    live(feed, 6, 8, now=104.0)
    assert short(feed.on_tick(107.0)) == ["gap", 5, 6, "gap", 8]
    assert feed.phase is FeedPhase.LOST
    assert feed.on_tick(110.0) == []
    assert feed.counters.replays == {"complete": 1, "timed_out": 1, "unavailable": 1}
    # The replay rests: the next gap purges at once. After the rest it is asked again.
    assert short(live(feed, 10, now=120.0)) == ["gap", 10]
    assert short(live(feed, 12, now=167.0)) == ["ask 11"]


def test_an_unanswered_start_ends_in_a_partial_view() -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(replay_tries=2))
    feed.on_connected(0.0)
    assert short(feed.on_tick(1.0)) == ["ask 0"]
    assert feed.on_tick(3.0) == []
    assert (feed.phase, feed.caught_up) == (FeedPhase.LOST, True)
    assert short(live(feed, 7, now=3.5)) == [7]


def test_a_missing_end_marker_after_everything_came_loses_nothing() -> None:
    feed = FeedState(can_replay=True)
    feed.on_connected(0.0)
    replay(feed, 0, 1)
    for now in (1.0, 2.0, 4.0, 8.0):
        feed.on_tick(now)
    assert (feed.phase, feed.expected) == (FeedPhase.LIVE, 2)
    assert short(live(feed, 2, now=9.0)) == [2]


def test_late_replies_change_nothing() -> None:
    feed = started()
    assert replay(feed, 3) == []
    assert feed.on_replay_end(0.0) == []
    assert feed.on_tick(1e9) == []
    assert short(live(feed, 3)) == [3]


# ---------------------------------------------------------------- restarts


def test_a_number_that_falls_is_a_restart() -> None:
    feed = started()
    live(feed, 3, 4)
    assert short(feed.on_live(0, payload(900.0), 1.0)) == ["restart", 0]
    assert feed.phase is FeedPhase.LIVE
    assert feed.counters.resets == 1
    assert short(live(feed, 1, 2)) == [1, 2]


def test_a_repeated_number_is_a_restart_too() -> None:
    feed = started(can_replay=False)
    assert short(feed.on_live(2, payload(900.0), 1.0)) == ["restart", 2]
    assert feed.phase is FeedPhase.LOST


def test_a_restart_seen_late_is_replayed_from_zero() -> None:
    feed = started()
    live(feed, 3, 4, 5)
    assert short(feed.on_live(2, payload(900.0), 1.0)) == ["restart", "ask 0"]
    assert short([*feed.on_replay(0, payload(898.0), 1.0), *feed.on_replay(1, payload(899.0), 1.0)]) == [0, 1]
    assert short(feed.on_replay(2, payload(900.0), 1.0)) == [2]
    assert feed.on_replay_end(1.0) == []
    assert feed.phase is FeedPhase.LIVE


def test_a_restart_between_replay_and_first_live_batch_is_told_by_its_time() -> None:
    feed = started()
    assert short(feed.on_live(0, payload(900.0), 1.0)) == ["restart", 0]


def test_a_restart_during_a_replay() -> None:
    feed = started()
    live(feed, 6, 7)
    assert short(feed.on_live(0, payload(900.0), 1.0)) == ["restart", 0]
    assert replay(feed, 3, 4) == []
    assert short(feed.on_live(1, payload(901.0), 1.0)) == [1]


# ---------------------------------------------------------------- trust


def test_trust_follows_what_was_heard() -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(replay_tries=1))
    seen = [feed.trust]
    feed.on_connected(0.0)
    seen.append(feed.trust)
    feed.on_replay_end(0.0)
    seen.append(feed.trust)
    live(feed, 0, 4)
    seen.append(feed.trust)
    feed.on_tick(1.0)
    seen.append(feed.trust)
    assert seen == ["catching_up", "catching_up", "trusted", "catching_up", "uncertain"]


def test_a_feed_nothing_was_ever_heard_on_is_blind() -> None:
    for feed in (FeedState(can_replay=False), FeedState(can_replay=True, limits=FeedLimits(replay_tries=1))):
        feed.on_connected(0.0)
        feed.on_tick(1.0)
        assert feed.caught_up
        assert feed.trust is TrustState.BLIND
    live(feed, 7)
    assert feed.trust is TrustState.UNCERTAIN


# ---------------------------------------------------------------- the rest


def test_resync_purges_and_replays() -> None:
    feed = started()
    assert short(feed.resync(5.0)) == ["resync", "ask 0"]
    replay(feed, 0, 1, 2, now=5.0)
    feed.on_replay_end(5.0)
    assert feed.phase is FeedPhase.LIVE
    assert short(feed.on_connected(6.0)) == ["resync", "ask 0"]


def test_resync_without_replay_takes_what_comes() -> None:
    feed = started(can_replay=False)
    assert short(feed.resync(5.0)) == ["resync"]
    assert short(live(feed, 9)) == [9]
    assert feed.phase is FeedPhase.LOST


def test_an_undecodable_batch_purges() -> None:
    feed = started()
    live(feed, 3)
    assert short(feed.on_undecodable()) == ["undecodable"]
    assert (feed.phase, feed.counters.errors) == (FeedPhase.LOST, 1)
    assert short(live(feed, 4)) == [4]


@pytest.mark.parametrize("limits", [FeedLimits(buffered_batches=2), FeedLimits(buffered_bytes=2 * len(payload(1.0)))])
def test_the_buffer_is_bounded_and_its_overflow_comes_back_as_a_gap(limits: FeedLimits) -> None:
    feed = started(limits=limits)
    live(feed, 4, 5, 6, 7)
    assert feed.counters.buffer_overflows == 2
    replay(feed, 3)
    assert short(feed.on_replay_end(0.0)) == [4, 5]
    assert short(live(feed, 8)) == ["ask 6"]


# ---------------------------------------------------------------- golden scenarios, with the index


@pytest.mark.parametrize(
    ("name", "engine", "resets", "gaps"),
    [
        ("vllm_0.33_scenario_refcount", EngineKind.VLLM, 0, 0),
        ("vllm_0.33_scenario_restart", EngineKind.VLLM, 1, 0),
        ("vllm_0.33_scenario_gap", EngineKind.VLLM, 0, 1),
        ("sglang_0.5.23_scenario_restart", EngineKind.SGLANG, 1, 0),
    ],
)
def test_golden_scenario(name: str, engine: EngineKind, resets: int, gaps: int) -> None:
    content = json.loads((GOLDEN / f"{name}.json").read_text())
    index, worker = KvIndex(), Slot(0)
    index.bind(worker, block_size=4, engine=engine)
    feed = FeedState(can_replay=False)
    feed.on_connected(0.0)
    for frames, decoded in zip(content["messages_hex"], content["decoded_messages"], strict=True):
        message = parse_live([bytes.fromhex(frame) for frame in frames])
        for action in feed.on_live(message.seq, message.payload, 0.0):
            match action:
                case Apply():
                    batch = decode_batch(action.payload)
                    assert isinstance(batch, KvBatch)
                    index.apply(worker, 0, batch.events)
                case Purge():
                    index.purge(worker, 0)
                case AskReplay():
                    pytest.fail("there is no replay here")
        if decoded["resident_after"] is not None:
            expected = {value % 2**64 for value in decoded["resident_after"]}
            assert index.engine_hashes(worker, 0, Tier.GPU) == expected
    assert (feed.counters.resets, feed.counters.gaps) == (resets, gaps)
