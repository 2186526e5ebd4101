"""When a prefix on a slow worker is paid for, and by whom."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gateway.pool import charge, pay


@dataclass
class Account:
    """A worker whose wait is in the test's hand."""

    slowdown: float = 1.0
    wait: float = 0.0
    regret_s: float = 0.0

    def wait_s(self, now: float) -> float:
        return self.wait

    def owe(self, seconds: float) -> None:
        self.regret_s = max(0.0, self.regret_s + seconds)


def test_a_hit_on_a_slow_worker_costs_what_the_best_other_would_take_less() -> None:
    slow = Account(10.0, wait=0.2)
    charge(slow, [slow, Account(wait=0.1), Account(wait=0.5)], 0.04, 0.0)
    assert slow.regret_s == pytest.approx(0.2 + 0.4 - 0.1 - 0.04)


def test_nothing_is_lost_while_all_others_are_as_slow_or_as_busy() -> None:
    for other in (Account(10.0), Account(wait=1.0)):
        slow = Account(10.0)
        charge(slow, [slow, other], 0.04, 0.0)
        assert slow.regret_s == 0.0


def test_who_was_left_only_for_its_account_pays_what_that_costs() -> None:
    slow, fast = Account(10.0, regret_s=1.0), Account()
    pay([slow, fast], [1.4, 0.9], 1)
    assert slow.regret_s == pytest.approx(0.5)
    pay([slow, fast], [1.4, 0.9], 1)  # without its account, which is 0.5 now, it would cost as much
    assert slow.regret_s == pytest.approx(0.5)
    pay([slow, fast], [1.4, 1.5], 0)
    assert slow.regret_s == pytest.approx(0.5)


def test_of_two_only_the_better_one_pays() -> None:
    one, other = Account(10.0, regret_s=1.0), Account(10.0, regret_s=2.0)
    pay([one, other, Account()], [1.5, 2.4, 0.9], 2)
    assert one.regret_s == 1.0
    assert other.regret_s == pytest.approx(1.5)
