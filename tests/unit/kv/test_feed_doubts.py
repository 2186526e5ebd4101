"""Where a feed must not be believed: restarts in every disguise, silence, loss."""

from __future__ import annotations

import pytest

from gateway.kv.feed_state import FeedState
from gateway.kv.feed_words import FeedLimits, FeedPhase
from gateway.records import TrustState
from tests.following import live, payload, replay, short, started

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
    assert short(feed.on_live(2, payload(900.0), 1.0)) == ["restart", "ask 0", "show 2"]
    assert short([*feed.on_replay(0, payload(898.0), 1.0), *feed.on_replay(1, payload(899.0), 1.0)]) == [0, 1, 2, "end"]
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


def reconnected(*, newest: int = 4) -> FeedState:
    """A feed with batches up to `newest` applied whose connection broke and is there again."""
    feed = started()
    live(feed, *range(3, newest + 1))
    assert feed.trust is TrustState.TRUSTED
    assert short(feed.on_connected(10.0)) == [f"ask {newest}"]
    assert (feed.doubt, feed.trust) == ("reconnected", TrustState.UNCERTAIN)
    return feed


def test_a_check_that_is_asked_again_is_about_what_was_held_before_the_cut() -> None:
    """The next number came live meanwhile: of the same process or of another one, and only the old mark can tell."""
    feed = reconnected()
    assert short(live(feed, 5, now=10.1)) == [5]
    assert short(feed.on_tick(60.0)) == ["ask 4"]
    assert short(feed.on_replay(4, payload(900.0), 60.0)) == ["restart", "ask 0"]
    assert feed.counters.resets == 1


def test_the_same_process_after_a_cut() -> None:
    feed = reconnected()
    assert replay(feed, 4) == []
    assert (feed.doubt, feed.trust) == (None, TrustState.TRUSTED)
    assert short(replay(feed, 5, 6)) == [5, 6]  # published while cut off
    assert feed.on_replay_end(10.0) == []
    assert (feed.asking, feed.counters.resets, feed.counters.reconnects) == (False, 0, 1)
    assert short(live(feed, 7)) == [7]


def test_a_new_process_that_passed_the_old_number_while_cut_off() -> None:
    feed = reconnected()
    assert short(live(feed, 9)) == ["show 9"]
    assert short(feed.on_replay(4, payload(900.0), 10.0)) == ["restart", "ask 0"]
    assert feed.counters.resets == 1
    assert short([*feed.on_replay(0, payload(896.0), 10.0)]) == [0]


def test_a_new_process_with_exactly_as_many_batches() -> None:
    feed = reconnected()
    assert short(feed.on_live(5, payload(901.0), 10.0)) == [5]
    assert short(feed.on_replay(4, payload(900.0), 10.0)) == ["restart", "ask 0"]


def test_a_new_process_with_fewer_batches() -> None:
    feed = reconnected()
    assert short(feed.on_replay_end(10.0)) == ["restart", "ask 0"]
    assert feed.counters.resets == 1


def test_a_cut_longer_than_the_replays_memory() -> None:
    feed = reconnected()
    assert short(replay(feed, 40, 41, now=10.0)) == ["history_gone", 40, 41]
    feed.on_replay_end(10.0)
    assert feed.phase is FeedPhase.LOST


def test_a_cut_with_a_gap_is_checked_and_filled_by_one_replay() -> None:
    feed = reconnected()
    assert short(live(feed, 7)) == ["show 7"]
    assert short(replay(feed, 4, 5, 6)) == [5, 6, 7, "end"]
    assert (feed.phase, feed.doubt, feed.counters.gaps) == (FeedPhase.LIVE, None, 1)


def test_a_cut_without_replay_believes_the_next_number_only() -> None:
    for number, words in ((3, [3]), (4, ["gap", 4]), (2, ["restart", 2]), (0, ["restart", 0])):
        feed = started(can_replay=False)
        assert feed.on_connected(10.0) == []
        assert feed.trust is TrustState.UNCERTAIN
        assert short(feed.on_live(number, payload(900.0), 10.0)) == words
        assert feed.doubt is None


def test_a_check_without_an_answer_leaves_a_doubt() -> None:
    feed = reconnected()
    for now in (11.0, 13.0, 17.0):
        feed.on_tick(now)
    assert (feed.asking, feed.phase, feed.trust) == (False, FeedPhase.LIVE, TrustState.UNCERTAIN)
    assert short(live(feed, 5, now=18.0)) == [5]
    assert feed.trust is TrustState.TRUSTED


def test_a_cut_during_the_first_replay_begins_anew() -> None:
    feed = FeedState(can_replay=True)
    feed.on_connected(0.0)
    replay(feed, 0, 1)
    assert short(feed.on_connected(1.0)) == ["reconnect", "ask 0"]


def test_a_start_time_after_what_we_hold_is_a_restart() -> None:
    feed = started()
    assert feed.on_process_started(99.0, 5.0) == []
    assert short(feed.on_process_started(150.0, 5.0)) == ["restart", "ask 0"]
    assert feed.counters.resets == 1
    assert feed.on_process_started(150.0, 5.0) == []


def test_a_restart_known_by_its_numbers_is_not_counted_twice() -> None:
    feed = started(can_replay=False)
    feed.on_live(0, payload(900.0), 1.0)
    assert feed.on_process_started(890.0, 5.0) == []
    assert (feed.phase, feed.counters.resets) == (FeedPhase.LIVE, 1)


def test_removals_of_unknown_blocks_contradict_a_whole_feed() -> None:
    feed = started(limits=FeedLimits(judged_removals=10, contradiction_rest_s=600.0))
    assert feed.on_applied(8, 2, 1.0) == []
    assert feed.on_applied(0, 4, 1.0) == []
    assert feed.counters.purges == {}
    feed = started(limits=FeedLimits(judged_removals=10, contradiction_rest_s=600.0))
    assert short(feed.on_applied(4, 6, 1.0)) == ["contradiction", "ask 0"]
    replay(feed, 0, 1, 2)
    feed.on_replay_end(1.0)
    assert feed.on_applied(0, 10, 300.0) == []
    assert short(feed.on_applied(0, 10, 601.0)) == ["contradiction", "ask 0"]


def test_removals_of_unknown_blocks_are_usual_where_history_is_missing() -> None:
    feed = started(can_replay=False, limits=FeedLimits(judged_removals=10))
    live(feed, 9)
    assert feed.on_applied(0, 1000, 1.0) == []


# ---------------------------------------------------------------- silence and trust


def test_a_worker_that_serves_without_a_word_is_doubted_until_it_speaks() -> None:
    feed = started(limits=FeedLimits(silent_s=10.0))
    live(feed, 3, now=50.0)
    deadlines = [feed.deadline]
    feed.on_served(4, 49.0, 51.0)  # it announced something meanwhile
    deadlines.append(feed.deadline)
    feed.on_served(0, 52.0, 60.0)  # everything was cached
    deadlines.append(feed.deadline)
    feed.on_served(4, 52.0, 60.0)
    deadlines.append(feed.deadline)
    assert deadlines == [None, None, None, 70.0]
    assert short(feed.on_tick(70.0)) == ["ask 3"]
    assert (feed.doubt, feed.trust, feed.counters.silences) == ("silent", TrustState.UNCERTAIN, 1)
    assert replay(feed, 3, now=70.0) == []
    feed.on_replay_end(70.0)
    assert feed.doubt == "silent"
    live(feed, 4, now=80.0)
    assert feed.trust is TrustState.TRUSTED


def test_what_a_silent_subscription_missed_comes_by_replay() -> None:
    feed = started(limits=FeedLimits(silent_s=10.0))
    feed.on_served(4, 52.0, 60.0)
    feed.on_tick(70.0)
    assert short(replay(feed, 2, 3, 4, now=70.0)) == [3, 4]
    assert feed.trust is TrustState.TRUSTED


def test_an_event_in_time_ends_the_wait() -> None:
    feed = started()
    feed.on_served(4, 52.0, 60.0)
    live(feed, 3, now=61.0)
    assert feed.deadline is None


def test_a_lost_feed_is_tried_again_and_keeps_what_it_has_until_more_is_there() -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(reply_timeout_s=1.0, replay_tries=1, replay_rest_s=60.0))
    feed.on_connected(0.0)
    feed.on_tick(1.0)
    live(feed, 7, now=2.0)
    assert (feed.phase, feed.deadline) == (FeedPhase.LOST, 61.0)
    assert short(feed.on_tick(61.0)) == ["ask 0"]
    assert (feed.phase, feed.caught_up) == (FeedPhase.LOST, True)
    assert feed.on_tick(62.0) == []
    assert feed.deadline is not None
    again = feed.deadline
    assert again > 150.0  # slower
    assert short(feed.on_tick(again)) == ["ask 0"]
    assert short(replay(feed, 0, *range(1, 8), now=again)) == ["relearn", *range(8)]
    feed.on_replay_end(again)
    assert (feed.phase, feed.trust) == (FeedPhase.LIVE, TrustState.TRUSTED)


@pytest.mark.parametrize(("replies", "words"), [((7, 8), []), ((4, 5, 6, 7), ["relearn", 4, 5, 6, 7])])
def test_a_trial_that_finds_no_beginning_is_the_last(replies: tuple[int, ...], words: list[object]) -> None:
    feed = FeedState(can_replay=True, limits=FeedLimits(reply_timeout_s=1.0, replay_tries=1, replay_rest_s=60.0))
    feed.on_connected(0.0)
    feed.on_tick(1.0)
    live(feed, 7, now=2.0)
    feed.on_tick(61.0)
    assert short(replay(feed, *replies, now=61.0)) == words
    feed.on_replay_end(61.0)
    assert (feed.phase, feed.deadline) == (FeedPhase.LOST, None)


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
