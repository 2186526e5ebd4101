"""The feed's state machine: start, gaps, restarts, replays that stop early, bounds."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from gateway.kv.events import KvBatch, decode_batch, parse_live
from gateway.kv.feed_state import FeedState
from gateway.kv.feed_words import Apply, AskReplay, EndPreview, FeedLimits, FeedPhase, Preview, Purge
from gateway.kv.index import KvIndex
from gateway.records import EngineKind, Slot, Tier, TrustState
from tests.following import live, payload, replay, short, started

GOLDEN = Path(__file__).parents[2] / "golden" / "kv_events"


# ---------------------------------------------------------------- start


def test_start_replays_from_zero_while_live_batches_are_shown() -> None:
    feed = FeedState(can_replay=True)
    assert (feed.phase, feed.caught_up) == (FeedPhase.STARTING, False)
    assert short(feed.on_connected(0.0)) == ["ask 0"]
    assert (feed.phase, feed.caught_up) == (FeedPhase.REPLAYING, False)
    assert short(live(feed, 3, 4)) == ["show 3", "show 4"]
    assert short(replay(feed, 0, 1)) == [0, 1]
    assert (feed.asking, feed.caught_up) == (True, False)
    # The replay has reached what came live: its end need not be waited for.
    assert short(replay(feed, 2, 3)) == [2, 3, 4, "end"]
    assert (feed.phase, feed.caught_up) == (FeedPhase.LIVE, True)
    assert feed.on_replay_end(0.0) == []
    assert (feed.phase, feed.caught_up, feed.asking, feed.expected) == (FeedPhase.LIVE, True, False, 5)
    assert short(live(feed, 5)) == [5]
    assert (feed.counters.batches, feed.counters.gaps, feed.counters.resets) == (6, 0, 0)
    assert feed.counters.replays == {"complete": 1}
    assert feed.counters.last_event_unix == 105.0


def test_what_came_before_a_doubt_is_dropped_and_what_came_after_is_asked_for_again() -> None:
    feed = started()
    live(feed, 3, 4, now=10.0)
    live(feed, 5, 6, now=20.0)
    assert short(feed.relearn(15.0, 30.0)) == ["contradicted", "ask 5"]
    assert (feed.phase, feed.trust) == (FeedPhase.REPAIRING, TrustState.CATCHING_UP)
    assert short(live(feed, 7)) == ["show 7"]
    assert short(replay(feed, 5, 6)) == [5, 6, 7, "end"]
    assert (feed.phase, feed.trust) == (FeedPhase.LIVE, TrustState.TRUSTED)
    assert feed.counters.gaps == 0


def test_nothing_came_after_a_doubt() -> None:
    feed = started()
    live(feed, 3, now=10.0)
    assert short(feed.relearn(15.0, 30.0)) == ["contradicted"]
    assert (feed.phase, feed.expected) == (FeedPhase.LIVE, 4)
    assert short(live(feed, 4)) == [4]


def test_a_doubt_without_a_replay_only_drops() -> None:
    feed = FeedState(can_replay=False)
    feed.on_connected(0.0)
    live(feed, 0, 1, now=10.0)
    assert short(feed.relearn(5.0, 30.0)) == ["contradicted"]
    assert short(live(feed, 2)) == [2]
    assert feed.phase is FeedPhase.LIVE


def test_a_doubt_during_a_repair_changes_nothing() -> None:
    feed = started()
    live(feed, 5)
    assert feed.phase is FeedPhase.REPAIRING
    assert feed.relearn(0.0, 30.0) == []


def test_what_a_replay_was_faster_with_is_dropped() -> None:
    feed = started()
    assert short(live(feed, 1, 2, 3)) == [3]
    assert (feed.counters.duplicates, feed.counters.resets) == (2, 0)


def test_batches_between_replay_and_subscription_are_asked_for() -> None:
    feed = started()
    assert short(live(feed, 5)) == ["ask 3", "show 5"]
    assert short(replay(feed, 3, 4)) == [3, 4, 5, "end"]
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
    assert short(live(feed, 2)) == ["ask 0", "show 2"]
    assert feed.counters.gaps == 0
    assert short(replay(feed, 0, 1, 2)) == [0, 1, 2, "end"]


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


def test_nobody_there_at_the_start() -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(connect_timeout_s=5.0))
    feed.on_opened(10.0)
    assert (feed.phase, feed.deadline) == (FeedPhase.STARTING, 15.0)
    assert feed.on_tick(14.9) == []
    assert feed.on_tick(15.0) == []
    assert (feed.phase, feed.caught_up, feed.trust) == (FeedPhase.LOST, True, TrustState.BLIND)
    assert short(feed.on_connected(400.0)) == ["ask 0"]
    replay(feed, 0)
    feed.on_replay_end(400.0)
    assert feed.phase is FeedPhase.LIVE


def test_a_publisher_that_counts_from_one_in_milliseconds_misses_nothing() -> None:
    feed = FeedState(can_replay=False)
    feed.on_connected(0.0)
    for seq in (1, 2):
        millis = msgspec.msgpack.encode([1_700_000_000_000 + seq, [], 0])
        assert short(feed.on_live(seq, millis, 0.0)) == [seq]
    assert (feed.phase, feed.counters.gaps) == (FeedPhase.LIVE, 0)
    assert feed.counters.last_event_unix == 1_700_000_000.002
    assert short(feed.on_live(1, msgspec.msgpack.encode([1_700_000_001_000, [], 0]), 0.0)) == ["restart", 1]
    assert (feed.phase, feed.counters.resets) == (FeedPhase.LIVE, 1)


# ---------------------------------------------------------------- gaps


def test_a_gap_is_replayed_while_live_batches_are_shown() -> None:
    feed = started()
    assert short(live(feed, 5, 6)) == ["ask 3", "show 5", "show 6"]
    assert (feed.phase, feed.caught_up, feed.asking) == (FeedPhase.REPAIRING, False, True)
    assert short(replay(feed, 3)) == [3]
    assert short(replay(feed, 4)) == [4, 5, 6, "end"]
    assert (feed.phase, feed.caught_up) == (FeedPhase.LIVE, True)
    # It may bring what was lost behind the newest live batch, too.
    assert short(replay(feed, 5, 6, 7)) == [7]
    assert feed.on_replay_end(0.0) == []
    assert (feed.asking, feed.deadline, feed.counters.gaps) == (False, None, 1)
    assert sum(feed.counters.purges.values()) == 0


def test_a_second_gap_behind_a_gap() -> None:
    feed = started()
    assert short(live(feed, 5, 8)) == ["ask 3", "show 5", "show 8"]
    assert short(replay(feed, 3, 4)) == [3, 4, 5]
    assert (feed.phase, feed.asking) == (FeedPhase.REPAIRING, True)
    assert short(feed.on_replay_end(0.0)) == ["ask 6"]
    assert short(replay(feed, 6, 7)) == [6, 7, 8, "end"]
    assert (feed.phase, feed.counters.gaps) == (FeedPhase.LIVE, 2)


def test_a_gap_without_replay_purges_and_goes_on() -> None:
    feed = started(can_replay=False)
    assert short(live(feed, 5, 6)) == ["gap", 5, 6]
    assert feed.phase is FeedPhase.LOST
    assert (feed.counters.gaps, feed.counters.replays) == (1, {"unavailable": 1})
    assert short(live(feed, 8)) == ["gap", 8]


def test_a_gap_whose_history_is_gone_purges_and_goes_on_from_there() -> None:
    feed = started()
    live(feed, 9, 10)
    assert short(replay(feed, 6, 7)) == ["history_gone", 6, 7]
    assert short(replay(feed, 8)) == [8, 9, 10, "end"]
    assert feed.phase is FeedPhase.LOST
    assert feed.counters.replays == {"complete": 1, "history_gone": 1}


def test_a_hole_inside_a_replay_is_asked_for_once_and_then_taken_for_lost() -> None:
    feed = started()
    live(feed, 8)
    assert short(replay(feed, 3, 5)) == [3, "ask 4"]
    assert short(replay(feed, 5, 6)) == ["history_gone", 5, 6]
    assert short(replay(feed, 7)) == [7, 8, "end"]
    assert feed.phase is FeedPhase.LOST


def test_an_engine_that_never_has_the_missing_batch_is_not_asked_for_ever() -> None:
    feed = started(limits=FeedLimits(reply_timeout_s=1.0, replay_tries=3))
    assert short(live(feed, 5, now=10.0)) == ["ask 3", "show 5"]
    assert feed.on_replay_end(10.0) == []
    assert (feed.asking, feed.deadline) == (False, 11.0)
    assert short(feed.on_tick(11.0)) == ["ask 3"]
    feed.on_replay_end(11.0)
    assert short(feed.on_tick(13.0)) == ["ask 3"]
    assert short(feed.on_replay_end(13.0)) == ["gap", 5, "end"]
    assert feed.phase is FeedPhase.LOST


def test_no_more_than_six_tries_a_minute() -> None:
    feed = started()
    asked: list[float] = [0.0]
    seq = 3
    for second in range(1, 240):
        now = float(second)
        actions = live(feed, seq + 1, now=now)  # every other batch is lost
        deadline = feed.deadline
        if deadline is not None and now >= deadline:
            actions += feed.on_tick(now)
        asked += [now for action in actions if isinstance(action, AskReplay)]
        if feed.asking:
            replay(feed, *range(feed.expected, seq + 2), now=now)
            actions = feed.on_replay_end(now)
            assert not any(isinstance(action, AskReplay) for action in actions)
        seq += 2
    assert len(asked) >= 20
    assert all(later - first >= 60.0 for first, later in zip(asked, asked[6:], strict=False))
    assert sum(feed.counters.purges.values()) == 0


def test_what_follows_a_try_that_brought_something_is_no_new_try() -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(reply_timeout_s=1.0))
    feed.on_connected(0.0)
    for number in range(20):
        replay(feed, number, now=float(number))
        assert short(feed.on_tick(number + 1.0)) == [f"ask {number + 1}"]


# ---------------------------------------------------------------- clears


def test_a_clear_that_waits_makes_what_is_missing_needless() -> None:
    feed = started()
    live(feed, 5, 6)
    assert short(feed.on_cleared(6, 0.0)) == [6, "end"]
    assert (feed.phase, feed.asking, feed.deadline) == (FeedPhase.LIVE, False, None)
    assert replay(feed, 3, 4, 5) == []
    assert short(live(feed, 7)) == [7]


def test_a_clear_ends_a_loss() -> None:
    feed = started(can_replay=False)
    live(feed, 9)
    assert feed.phase is FeedPhase.LOST
    live(feed, 10)
    assert feed.on_cleared(10, 0.0) == []
    assert (feed.phase, feed.trust) == (FeedPhase.LIVE, TrustState.TRUSTED)


def test_a_clear_before_a_loss_says_nothing_about_it() -> None:
    feed = started(can_replay=False)
    live(feed, 3, 9)
    assert feed.on_cleared(3, 0.0) == []
    assert feed.phase is FeedPhase.LOST


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
    assert short(live(feed, 5, now=100.0)) == ["ask 3", "show 5"]
    assert feed.deadline == 101.0
    assert short(feed.on_tick(101.0)) == ["ask 3"]
    assert feed.deadline == 103.0
    assert short(feed.on_tick(103.0)) == ["ask 3"]
    assert feed.deadline == 107.0
    live(feed, 6, 8, now=104.0)
    assert short(feed.on_tick(107.0)) == ["gap", 5, 6, "gap", 8, "end"]
    assert (feed.phase, feed.deadline) == (FeedPhase.LOST, 167.0)
    assert feed.on_tick(110.0) == []
    assert feed.counters.replays == {"complete": 1, "timed_out": 1, "unavailable": 1}
    # The replay rests: the next gap purges at once. After the rest it is asked again.
    assert short(live(feed, 10, now=120.0)) == ["gap", 10]
    assert short(live(feed, 12, now=167.0)) == ["ask 11", "show 12"]


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
    for now in (1.0, 2.0, 4.0, 8.0, 16.0):
        feed.on_tick(now)
    assert (feed.phase, feed.expected) == (FeedPhase.LIVE, 2)
    assert short(live(feed, 2, now=9.0)) == [2]


def test_an_end_marker_that_got_lost_is_not_asked_for() -> None:
    feed = started(limits=FeedLimits(reply_timeout_s=1.0))
    live(feed, 4, now=10.0)
    assert short(replay(feed, 3, now=10.0)) == [3, 4, "end"]
    assert feed.on_tick(11.0) == []
    assert (feed.asking, feed.deadline) == (False, None)


def test_late_replies_change_nothing() -> None:
    feed = started()
    assert replay(feed, 3) == []
    assert feed.on_replay_end(0.0) == []
    assert feed.on_tick(1e9) == []
    assert short(live(feed, 3)) == [3]


# ---------------------------------------------------------------- the rest


def test_resync_purges_and_replays() -> None:
    feed = started()
    assert short(feed.resync(5.0)) == ["resync", "ask 0"]
    replay(feed, 0, 1, 2, now=5.0)
    feed.on_replay_end(5.0)
    assert feed.phase is FeedPhase.LIVE


def test_a_feed_that_broke_off_is_learned_anew() -> None:
    feed = started()
    assert short(feed.on_opened(5.0)) == ["reopened"]
    assert feed.phase is FeedPhase.STARTING
    assert short(feed.on_connected(6.0)) == ["ask 0"]


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
    assert short(live(feed, 4, 5, 6, 7)) == ["ask 3", "show 4", "show 5"]
    assert feed.counters.buffer_overflows == 2
    assert short(replay(feed, 3)) == [3, 4, 5, "end"]
    assert feed.on_replay_end(0.0) == []
    assert short(live(feed, 8)) == ["ask 6", "show 8"]


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
                case AskReplay() | Preview() | EndPreview():
                    pytest.fail("there is no replay here")
        if decoded["resident_after"] is not None:
            expected = {value % 2**64 for value in decoded["resident_after"]}
            assert index.engine_hashes(worker, 0, Tier.GPU) == expected
    assert (feed.counters.resets, feed.counters.gaps) == (resets, gaps)


def test_what_came_live_reaches_further_back_than_the_engines_history() -> None:
    """The engine keeps one batch only, and the feed has heard every one."""
    feed = FeedState(can_replay=True)
    assert short(feed.on_connected(0.0)) == ["ask 0"]
    live(feed, 0, 1, 2)
    assert short(replay(feed, 2)) == [0, 1, 2, "end"]
    assert (feed.phase, feed.counters.replays["history_gone"]) == (FeedPhase.LIVE, 0)


def test_history_that_is_gone_ends_where_live_batches_begin() -> None:
    feed = FeedState(can_replay=True)
    feed.on_connected(0.0)
    live(feed, 5, 6, 7)
    assert short(replay(feed, 7)) == [5, 6, 7, "end"]
    assert (feed.phase, feed.counters.replays["history_gone"]) == (FeedPhase.LOST, 1)
