"""Second copies of late requests through a whole gateway over simulated engines: what engines, index and gauges say."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import yaml

from gateway.pool import Kind
from gateway.pool.silence import SILENT_S
from gateway.records import Hedged, Tier
from gateway.sim.faults import Fault, FaultKind
from tests.integration.rig import Rig, fast, rig, until, write_yaml

COMPLETIONS = "/v1/completions"
ON = {"hedge_percentile": 0.9, "hedge_floor_s": 0.2}
SETTINGS = {"routing": {"policy": "round_robin"}, "health": {"probe_s": 3600, "open_s": 3600}, "retries": ON}


def ask(seed: int, **more: Any) -> dict[str, Any]:
    chance = Random(seed)
    return {"model": "demo", "prompt": [chance.randrange(300, 4000) for _ in range(160)], "max_tokens": 4, **more}


async def series(r: Rig, name: str) -> dict[str, float]:
    """Every series of a metric, by its labels."""
    lines = (await r.http.get(r.ports.admin_url + "/metrics")).text.splitlines()
    head = f"kvgate_{name}{{"
    return {line[len(head) : line.index("}")]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(head)}


async def seen(r: Rig, *, stream: bool, first: int = 1000) -> None:
    """The pool has answered enough to say what is late."""
    kind = Kind.STREAM if stream else Kind.TEXT
    for seed in range(first, first + 30):
        assert (await r.http.post(COMPLETIONS, json=ask(seed, stream=stream))).status_code == 200
    assert r.gateway.fleet.pools["demo"].hedging.due_s(kind, 1e-3, r.gateway.edge.settings.hedges._base) is not None  # type: ignore[union-attr]
    # Whatever the machine was doing meanwhile: what is late is more than the floor and not much more.
    hedging = r.gateway.fleet.pools["demo"].hedging
    for _ in range(1000):
        hedging.began(kind, 1.0, 1e-3)


def whole(answer: httpx.Response, *, stream: bool) -> bool:
    return answer.status_code == 200 and (
        answer.text.endswith("data: [DONE]\n\n") if stream else "choices" in answer.json()
    )


@pytest.mark.parametrize(
    ("fault", "stream"),
    [(FaultKind.FREEZE, False), (FaultKind.FREEZE, True), (FaultKind.STALL, True)],  # a head without a byte behind it
)
async def test_a_frozen_engine_costs_no_client_its_answer(fault: FaultKind, stream: bool) -> None:
    settings = SETTINGS | {
        "retries": ON | {"hedge_floor_s": SILENT_S + 0.05}
    }  # so that each request it meets is a failure
    async with rig(3, engine=fast(), settings=settings) as r:
        await seen(r, stream=stream)
        frozen = r.engine("w1")
        frozen.fault(Fault(fault, after=0))
        before, aborted = frozen.received, frozen.state()["aborted"]
        answers = [await r.http.post(COMPLETIONS, json=ask(seed, stream=stream, max_tokens=400)) for seed in range(18)]
        assert all(whole(answer, stream=stream) for answer in answers)
        assert "w1" not in {answer.headers["x-kvgate-worker"] for answer in answers}
        met = frozen.received - before
        # Then it is ejected; on a busy machine a late request of another engine may have been doubled there too.
        assert 5 <= met < 12
        hedges = await series(r, "hedges_total")
        assert hedges['pool="demo",outcome="won"'] >= 5
        assert sum(hedges.values()) >= met
        await until(r.quiet)
        await until(lambda: frozen.state()["aborted"] == aborted + met)  # type: ignore[operator]
        assert set((await series(r, "accounting_drift")).values()) == {0.0}
        shown = (await r.admin("/admin/decisions"))["decisions"]
        second = next(decision for decision in shown if decision["beside"] == "w1")
        assert (second["outcome"]["hedged"], second["outcome"]["result"]) == ("won", "completed")
        lost = next(d for d in shown if d["request_id"] == second["request_id"] and d["worker"] == "w1")
        assert (lost["outcome"]["result"], lost["outcome"]["delivered_tokens"]) == ("hedged", None)
        (pool,) = (await r.admin("/admin/pools"))["pools"]
        assert pool["hedges"]["won"] >= 5
        # It answers nobody at all: that opens its breaker. Each request was recorded once.
        assert r.gateway.fleet.workers[lost["worker"]].reason == "silent"
        assert sum((await series(r, "requests_total")).values()) == 30 + 18


async def test_the_index_keeps_what_the_loser_computed_and_nothing_that_was_only_promised() -> None:
    """One prompt is computed and told of, but its stream stalls; the other never begins."""
    async with rig(3, engine=fast(), settings=SETTINGS) as r:
        await seen(r, stream=True)
        r.engine("w1").fault(Fault(FaultKind.STALL, after=0, times=1))
        r.engine("w1").fault(Fault(FaultKind.FREEZE, times=1))
        for seed in range(6):
            assert whole(await r.http.post(COMPLETIONS, json=ask(seed, stream=True)), stream=True)
        await until(r.quiet)
        assert r.gateway.fleet.pools["demo"].hedging.results[Hedged.WON] == 2
        index, workers = r.gateway.index, r.gateway.fleet.workers

        def true() -> bool:
            return all(
                index.resident(workers[name].slot, Tier.GPU) == r.engine(str(name)).state()["resident_blocks"]
                for name in workers
            )

        await until(lambda: index.stats().speculative == 0 and true())


async def test_it_is_switched_on_and_off_while_requests_run(tmp_path: Path) -> None:
    path = tmp_path / "kvgate.yaml"
    off = SETTINGS | {"retries": {"max": 2}}
    async with rig(2, engine=fast(), settings=off, file=path) as r:
        tree = yaml.safe_load(path.read_text())
        for seed in range(40):
            await r.http.post(COMPLETIONS, json=ask(seed))
        assert r.gateway.edge.settings.hedges is None
        assert len(r.gateway.fleet.pools["demo"].hedging._ratios[Kind.TEXT]) == 0, "off costs nothing"
        write_yaml(path, tree | {"retries": {"models": {"demo": ON}}})
        await r.gateway.reload()
        await seen(r, stream=False)
        r.engine("w1").fault(Fault(FaultKind.FREEZE, times=1))
        answers = [await r.http.post(COMPLETIONS, json=ask(seed)) for seed in range(2)]
        assert all(whole(answer, stream=False) for answer in answers)
        assert (await series(r, "hedges_total"))['pool="demo",outcome="won"'] == 1
        write_yaml(path, tree)
        await r.gateway.reload()
        assert r.gateway.edge.settings.hedges is None
        await until(r.quiet)
