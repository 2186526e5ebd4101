"""The demo's workload and figures against simulated engines, with a stand-in for the gateway."""

from __future__ import annotations

import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from rich.console import Console

from gateway.sim.demo import DemoGatewayConfig, DemoSettings, GatewayCounters, run_demo
from gateway.sim.demo_view import print_summary, showing
from gateway.sim.server import EngineSettings, Fault, FaultKind, SimulatedWorker, Speech
from gateway.sim.speech import DEMO_MODEL
from gateway.sim.workload import ChatDriver, TurnResult, WorkloadSettings, plan

SPEECH = Speech.load(DEMO_MODEL)
SMALL = WorkloadSettings(
    duration_s=0.4, sessions_per_s=10, applications=2, system_words=(40, 60), turns=(2, 3), think_s=(0.0, 0.05)
)


class Passage:
    """Stands where the gateway would: the first worker itself."""

    admin_url = None

    def __init__(self, url: str) -> None:
        self.url = url

    def counters(self) -> GatewayCounters:
        return GatewayCounters(predictions=10, misses=1)


@asynccontextmanager
async def first_worker(config: DemoGatewayConfig) -> AsyncIterator[Passage]:
    assert (config.tokenizer / "tokenizer.json").is_file()
    async with httpx.AsyncClient(trust_env=False) as client:
        for worker in config.workers:
            assert (await client.get(f"{worker.url}/health")).status_code == 200
    yield Passage(config.workers[0].url)


async def drive(worker: SimulatedWorker) -> list[TurnResult]:
    results: list[TurnResult] = []
    driver = ChatDriver(worker.url, model="demo", clock=time.monotonic, on_result=results.append)
    await driver.run(plan(SMALL))
    assert driver.open_requests == 0
    return results


async def test_a_plan_is_driven_to_its_end_and_measured() -> None:
    worker = SimulatedWorker(EngineSettings(speed=20.0), wall_clock=time.time, speech=SPEECH)
    await worker.start()
    results = await drive(worker)
    await worker.stop()
    sessions = plan(SMALL)
    assert {(result.session, result.turn) for result in results} == {
        (session.name, number) for session in sessions for number in range(len(session.turns))
    }
    assert all(result.error is None for result in results)
    for result in results:
        assert result.ttft_s is not None
        assert 0 < result.ttft_s <= result.total_s
        assert result.completion_tokens == sessions[int(result.session[1:])].turns[result.turn].answer_tokens
    # A later turn finds its own history, answer included.
    later = [result for result in results if result.turn > 0]
    assert all(result.prompt_tokens - (result.cached_tokens or 0) < 120 for result in later)


@pytest.mark.parametrize(
    ("kind", "after", "error"),
    [(FaultKind.STATUS, 0, "status_500"), (FaultKind.RESET, 0, "connection"), (FaultKind.GARBLE, 2, "malformed")],
)
async def test_failures_are_results_and_end_their_session(kind: FaultKind, after: int, error: str) -> None:
    worker = SimulatedWorker(EngineSettings(speed=20.0), wall_clock=time.time, speech=SPEECH)
    await worker.start()
    worker.fault(Fault(kind, after=after))
    results = await drive(worker)
    await worker.stop()
    assert {result.error for result in results} == {error}
    assert {result.turn for result in results} == {0}


async def test_the_demo_runs_every_policy_and_shows_it() -> None:
    console = Console(file=io.StringIO(), width=120)
    settings = DemoSettings(duration_s=1.5, engines=2, warm_up_share=0.0, report_every_s=0.2)
    with showing(console, duration_s=settings.duration_s, line_every_s=0.5) as show:
        result = await run_demo(
            settings, start_gateway=first_worker, clock=time.monotonic, wall_clock=time.time, show=show
        )
    print_summary(console, result, warm_up_share=0.3)
    figures = json.loads(json.dumps(result.summary()))
    assert list(figures) == ["seconds", "round_robin"]
    for score in figures.values():
        assert score["requests"] > 0
        assert score["errors"] == 0
        assert score["route_miss_rate"] == 0.1
        assert score["ttft_p50_s"] <= score["ttft_p99_s"]
    assert not result.failed
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "hit rate" in shown
    assert "time to first token, median" in shown
