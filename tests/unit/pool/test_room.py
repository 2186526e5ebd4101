"""How many requests a worker should have, from what it says."""

from __future__ import annotations

from gateway.pool.room import Room
from gateway.records import LoadSample


def poll(
    room: Room, running: float, waiting: float, kv: float = 0.1, *, inflight: float = 0, explained: bool = False
) -> int | None:
    room.observe(LoadSample(running, waiting, kv), inflight=inflight, explained=explained)
    return room.limit


def test_no_polls_no_limit() -> None:
    assert Room().limit is None


def test_a_full_cache_with_requests_waiting_limits_at_once() -> None:
    assert poll(Room(), 32, 4, 0.95) == 35


def test_a_full_batch_limits_when_two_polls_show_it() -> None:
    room = Room()
    assert poll(room, 8, 3) is None
    assert poll(room, 8, 3) == 9


def test_waiting_for_prefills_is_no_want_of_room() -> None:
    room = Room()
    assert poll(room, 8, 3, explained=True) is None
    assert poll(room, 8, 3, explained=True) is None
    assert poll(room, 8, 3) is None  # one poll may be a moment


def test_the_limit_rises_while_it_binds_and_nobody_waits() -> None:
    room = Room()
    poll(room, 16, 3, 0.95)
    assert room.limit == 18
    assert poll(room, 16, 0, inflight=10) == 18
    assert poll(room, 18, 0, inflight=18) == 21


def test_it_is_never_below_one_and_is_forgotten_with_the_polls() -> None:
    room = Room()
    assert poll(room, 0, 5, 1.0) is None  # nothing runs: it is not full, it is stuck
    assert poll(room, 1, 5, 1.0) == 2
    room.forget()
    assert room.limit is None


def test_an_operators_number_counts_alone() -> None:
    room = Room(4)
    assert poll(room, 32, 4, 0.95) == 4
    room.forget()
    assert room.limit == 4
    room.configure(None)
    assert poll(room, 8, 0) is None
    assert poll(room, 32, 4, 0.95) == 35
    room.configure(7)
    assert room.limit == 7
