"""The pump of the queue: called when something has changed, and again after it has failed."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from structlog.testing import capture_logs

from gateway.admission import AdmissionSettings
from gateway.edge import turns
from gateway.edge.turns import Turns
from gateway.kv import KvIndex
from gateway.policy import make_policy
from gateway.pool import Fleet
from gateway.router import Router


@pytest.mark.source_only
async def test_a_pump_that_fails_is_logged_and_pumps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AGAIN_S", 0.01)
    rng = Random(1)
    router = Router(Fleet(), KvIndex(), make_policy("seconds", rng=rng), rng=rng)
    made = Turns(router, asyncio.get_running_loop().time, AdmissionSettings())
    calls, pumped = 0, asyncio.Event()

    def fails_twice(now: float) -> float | None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise RuntimeError("boom")
        pumped.set()
        return None

    monkeypatch.setattr(made.admission, "pump", fails_twice)
    with capture_logs() as lines:
        made._wake()
        async with asyncio.timeout(30):
            await pumped.wait()
    told = [line for line in lines if line["event"] == "the queue could not be advanced"]
    assert [line["log_level"] for line in told] == ["error", "error"]
    assert calls == 3
