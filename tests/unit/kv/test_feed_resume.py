"""A feed that goes on from where another process was: only when the engine shows the very same last batch."""

from __future__ import annotations

import pytest

from gateway.kv import FeedPoint
from gateway.kv.feed_state import FeedState
from gateway.kv.feed_words import FeedLimits, FeedPhase
from gateway.records import TrustState
from tests.following import live, replay, short, started


@pytest.fixture
def point() -> FeedPoint:
    """Of a feed that has applied batches 0, 1 and 2."""
    point = started().point
    assert point is not None
    assert (point.seq, point.oldest_ts, point.newest_ts) == (2, 100.0, 102.0)
    return point


def _resumed(point: FeedPoint) -> FeedState:
    feed = FeedState(can_replay=True)
    feed.resume(point)
    feed.on_opened(0.0)
    assert (feed.phase, feed.caught_up, feed.point) == (FeedPhase.STARTING, False, None)
    return feed


def test_the_replay_begins_with_the_last_batch_and_brings_what_followed(point: FeedPoint) -> None:
    feed = _resumed(point)
    assert short(feed.on_connected(0.0)) == ["ask 2"]
    assert (feed.caught_up, feed.trust) == (False, TrustState.CATCHING_UP)
    assert short(live(feed, 5)) == ["show 5"]
    assert short(replay(feed, 2, 3, 4)) == [3, 4, 5, "end"]
    assert (feed.phase, feed.trust, feed.expected) == (FeedPhase.LIVE, TrustState.TRUSTED, 6)
    assert not feed.counters.purges


def test_nothing_followed(point: FeedPoint) -> None:
    feed = _resumed(point)
    feed.on_connected(0.0)
    assert short(replay(feed, 2)) == []
    assert short(feed.on_replay_end(0.0)) == []
    assert (feed.phase, feed.trust) == (FeedPhase.LIVE, TrustState.TRUSTED)
    assert short(live(feed, 3)) == [3]


def test_another_process_at_the_same_number(point: FeedPoint) -> None:
    feed = _resumed(point._replace(digest=point.digest ^ 1))
    feed.on_connected(0.0)
    assert short(replay(feed, 2)) == ["restart", "ask 0"]
    assert short(replay(feed, 0, 1)) == [0, 1]


def test_a_younger_process_has_fewer_batches(point: FeedPoint) -> None:
    feed = _resumed(point)
    feed.on_connected(0.0)
    assert short(feed.on_replay_end(0.0)) == ["restart", "ask 0"]


def test_the_engine_does_not_go_back_so_far(point: FeedPoint) -> None:
    feed = _resumed(point)
    feed.on_connected(0.0)
    assert short(replay(feed, 7, 8)) == ["history_gone", 7, 8]
    feed.on_replay_end(0.0)
    assert feed.trust is TrustState.UNCERTAIN


def test_without_an_answer_it_is_kept_and_doubted(point: FeedPoint) -> None:
    limits = FeedLimits()
    feed = FeedState(can_replay=True, limits=limits)
    feed.resume(point)
    feed.on_connected(0.0)
    for _ in range(limits.replay_tries):
        deadline = feed.deadline
        assert deadline is not None
        feed.on_tick(deadline)
    assert feed.caught_up
    assert feed.trust is not TrustState.TRUSTED
    assert feed.point is None


def test_asked_to_learn_anew_before_it_is_connected(point: FeedPoint) -> None:
    feed = _resumed(point)
    assert short(feed.resync(0.0)) == ["resync"]
    assert short(feed.on_connected(0.0)) == ["ask 0"]


def test_the_process_is_known_to_be_younger(point: FeedPoint) -> None:
    feed = _resumed(point)
    assert "restart" in short(feed.on_process_started(150.0, 0.0))
    assert feed.expected == 0
