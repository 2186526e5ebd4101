"""Whose turn it is: classes, tenants, sizes, and what happens when the line is full."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gateway.pool import AGEING, Line, PriorityClass


@dataclass(slots=True, eq=False)
class Ticket:
    name: str
    tenant: str = ""
    priority: PriorityClass = PriorityClass.NORMAL
    arrived_at: float = 0.0
    own_s: float = 1.0


def line_of(*tickets: Ticket, size: int = 100) -> Line[Ticket]:
    line: Line[Ticket] = Line(size)
    for ticket in tickets:
        line.add(ticket, ticket.arrived_at)
    return line


def order(line: Line[Ticket], limit: int = 100) -> str:
    return "".join(ticket.name for ticket in line.in_order(limit))


@pytest.mark.parametrize(("number", "name"), [(-5, "high"), (-1, "high"), (0, "normal"), (1, "low"), (10**12, "low")])
def test_lower_numbers_are_sooner(number: int, name: str) -> None:
    assert PriorityClass.of(number).value == name


def test_classes_first_then_the_shortest() -> None:
    line = line_of(
        Ticket("a", priority=PriorityClass.LOW, own_s=0.1), Ticket("b", own_s=3.0), Ticket("c", own_s=2.0),
        Ticket("d", priority=PriorityClass.HIGH, own_s=9.0),
    )  # fmt: skip
    assert order(line) == "dcba"
    assert [line.depth(rank) for rank in PriorityClass] == [1, 2, 1]


def test_waiting_makes_up_for_length() -> None:
    line = line_of(
        Ticket("a", own_s=1.0), Ticket("b", arrived_at=5.0, own_s=0.6), Ticket("c", arrived_at=5.0, own_s=0.4)
    )
    assert AGEING * 5.0 == 0.5
    assert order(line) == "cab"


def test_a_look_may_change_a_place() -> None:
    first, second = Ticket("a", own_s=1.0), Ticket("b", own_s=2.0)
    line = line_of(first, second)
    line.resize(second, 0.5)
    assert order(line) == "ba"
    assert line.held_s == pytest.approx(1.5)
    line.resize(Ticket("c"), 9.0)
    assert line.held_s == pytest.approx(1.5)


def test_tenants_get_the_same_tokens_whatever_they_ask_for() -> None:
    small = [Ticket("s", "small", own_s=0.1) for _ in range(40)]
    large = [Ticket("L", "large", own_s=4.0) for _ in range(40)]
    line = line_of(*small, *large)
    tokens = {"small": 100, "large": 1000}
    served = {"small": 0, "large": 0}
    for _ in range(40):
        ticket = next(line.in_order(1))
        line.served(ticket, tokens[ticket.tenant], 1.0)
        served[ticket.tenant] += tokens[ticket.tenant]
        assert abs(served["small"] - served["large"]) <= 1100


def test_a_late_tenant_starts_where_the_others_stand() -> None:
    line = line_of(*(Ticket("a", "first") for _ in range(30)))
    for _ in range(20):
        line.served(next(line.in_order(1)), 100, 1.0)
    for _ in range(10):
        line.add(Ticket("b", "late"), 1.0)
    got = ""
    for _ in range(10):
        ticket = next(line.in_order(1))
        got += ticket.name
        line.served(ticket, 100, 1.0)
    assert got.count("b") in (5, 6)


def test_leaving_does_not_pay_off_what_was_served() -> None:
    line = line_of(Ticket("a", "greedy"), *(Ticket("b", "patient") for _ in range(20)))
    line.served(next(t for t in line.in_order(9) if t.tenant == "greedy"), 1000, 1.0)
    line.add(Ticket("a", "greedy"), 1.0)
    got = ""
    while line:
        ticket = next(line.in_order(1))
        got += ticket.name
        line.served(ticket, 100, 1.0)
    assert 9 <= got.index("a") <= 11


def test_one_tenant_does_not_hide_the_others_from_a_short_look() -> None:
    line = line_of(*(Ticket("a", "many") for _ in range(50)), Ticket("b", "few"))
    assert "b" in order(line, 8)
    assert len(order(line, 8)) <= 8


def test_a_full_line_makes_room_by_class_and_by_tenant() -> None:
    low = Ticket("l", priority=PriorityClass.LOW)
    many = [Ticket(str(number), "many", own_s=float(number)) for number in range(5)]
    line = line_of(low, *many)
    assert line.rival(Ticket("n", "few")) is low
    line.remove(low)
    assert line.rival(Ticket("n", "few")) is many[-1]
    assert line.rival(Ticket("n", "many")) is None
    assert line.rival(Ticket("n", priority=PriorityClass.LOW)) is None
    assert line.rival(Ticket("n", "many", PriorityClass.HIGH)) is many[-1]


def test_nobody_is_left_when_everybody_has_gone() -> None:
    tickets = [Ticket("a", "x"), Ticket("b", "y", PriorityClass.LOW)]
    line = line_of(*tickets)
    for ticket in tickets:
        line.remove(ticket)
        line.remove(ticket)
    assert (len(line), line.held_s, line.tenants(), order(line)) == (0, 0.0, {}, "")


def test_the_time_to_drain_is_that_of_late() -> None:
    line = line_of(*(Ticket("a", own_s=2.0) for _ in range(200)), size=200)
    assert line.drain_s(0.0, workers=4) == pytest.approx(100.0)  # nothing seen yet: a second's work a second each
    for step in range(1, 51):
        line.served(next(line.in_order(1)), 10, 0.4 * step)
    # 5 own seconds a second have left; 150 requests of 2 s are there.
    assert line.drain_s(20.0, workers=4) == pytest.approx(60.0, rel=0.05)
