"""When load is polled: workers that joined together are not asked together.

On a loop whose time passes when all wait.
"""

from __future__ import annotations

import asyncio
import selectors
from itertools import pairwise
from random import Random
from typing import Any, cast

import pytest

from gateway.records import EngineKind
from gateway.upstream.control import ControlClient
from gateway.upstream.load import JITTER, LoadPoller
from tests.unit.upstream_probe.probing import spec

PERIOD_S = 1.0
POLLS = 200


class _Waiting(selectors.SelectSelector):
    """Nothing is waited for; what would have been waited is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waited_s += timeout or 0.0
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waiting = _Waiting()
        super().__init__(self._waiting)

    def time(self) -> float:
        return self._waiting.waited_s


class Keyless:
    """A client that nothing is asked of."""

    tls = None


async def _times(monkeypatch: pytest.MonkeyPatch, workers: int, random: Random) -> list[list[float]]:
    """When each worker is polled, of workers that join at the same moment."""
    loop = asyncio.get_running_loop()
    times: list[list[float]] = [[] for _ in range(workers)]
    tasks = []
    for at in times:
        poller = LoadPoller(
            spec(),
            EngineKind.VLLM,
            client=cast(ControlClient, Keyless()),
            on_sample=lambda *_: None,
            random=random,
            poll_s=PERIOD_S,
        )

        async def poll(at: list[float] = at) -> None:
            at.append(loop.time())

        monkeypatch.setattr(poller, "poll", poll)
        tasks.append(loop.create_task(poller.run()))
    await asyncio.sleep(POLLS * PERIOD_S * (1 + JITTER))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return times


def _run(test: Any) -> list[list[float]]:
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return cast(list[list[float]], runner.run(test))


def test_polls_of_workers_that_joined_together_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    times = _run(_times(monkeypatch, 32, Random(1)))
    first = sorted(at[0] for at in times)
    assert len(set(first)) == len(first)
    assert first[-1] <= PERIOD_S * JITTER  # nobody's load is unknown for longer than that
    # Later they are spread over the whole period: no tenth of it has more than thrice its share.
    last = [at[POLLS - 1] % PERIOD_S for at in times]
    tenths = [sum(tenth / 10 <= at / PERIOD_S < (tenth + 1) / 10 for at in last) for tenth in range(10)]
    assert max(tenths) <= 3 * len(times) / 10


def test_a_worker_is_polled_as_often_as_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    (at,) = _run(_times(monkeypatch, 1, Random(2)))
    pauses = [after - before for before, after in pairwise(at)]
    assert min(pauses) >= PERIOD_S * (1 - JITTER) - 1e-9
    assert max(pauses) <= PERIOD_S * (1 + JITTER) + 1e-9
    assert sum(pauses) / len(pauses) == pytest.approx(PERIOD_S, rel=0.02)
