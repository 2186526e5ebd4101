"""Faults that lie in wait for requests."""

from __future__ import annotations

from gateway.sim.faults import Fault, FaultKind, FaultQueue


def test_faults_are_met_in_order_and_used_up() -> None:
    queue = FaultQueue()
    queue.add(Fault(FaultKind.STATUS, times=2, code=503))
    queue.add(Fault(FaultKind.CUT, times=1, after=3))
    met = [queue.meet() for _ in range(4)]
    assert [fault and fault.kind for fault in met] == [FaultKind.STATUS, FaultKind.STATUS, FaultKind.CUT, None]


def test_a_fault_without_a_count_stays_until_healed() -> None:
    queue = FaultQueue()
    queue.add(Fault(FaultKind.FREEZE))
    assert queue.meet() == queue.meet() == Fault(FaultKind.FREEZE)
    queue.heal()
    assert queue.meet() is None
