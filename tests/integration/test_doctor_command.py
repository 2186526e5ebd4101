"""The command `kvgate doctor`: exit codes, JSON, progress, and a running gateway asked for what it has seen."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.pool import WorkerState
from gateway.sim.server import Fault, FaultKind
from tests.integration.lying import lying
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until

DEMO = Path(__file__).parents[2] / "gateway" / "sim" / "model"


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def report(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.out)
        return answer

    def codes(self) -> set[str]:
        return {found["code"] for found in self.report()["findings"]}


async def doctor(*args: str) -> Ended:
    """Run it as a user would, while the engines of the test go on."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "doctor", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(3 * PATIENCE_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode(), err.decode())


# --------------------------------------------------------------------------- exit codes and forms


async def test_one_line_a_finding_and_the_worst_decides_the_exit_code() -> None:
    async with lying() as good, lying(events=False) as bad:
        ended = await doctor("--worker", good.url, "--worker", bad.url, "--tokenizer", str(DEMO))
    assert ended.code == 1
    (line,) = [line for line in ended.out.splitlines() if "events_off" in line]
    assert line.startswith("warning  w2")
    assert "fix: start vLLM with --kv-events-config" in line
    assert "2 workers checked: 0 error, 1 warning, 0 info" in ended.out
    assert sorted(ended.err.splitlines())[0].startswith("checked w")
    assert "(2 of 2)" in ended.err


async def test_an_error_is_2_also_as_json() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    ended = await doctor("--worker", nobody, "--json")
    assert ended.code == 2
    report = ended.report()
    assert report["worst"] == "error"
    assert report["workers"] == [
        {"worker": "w1", "url": nobody, "engine": None, "version": None, "models": [], "block_size": None, "events": []}
    ]
    (found,) = report["findings"]
    assert set(found) == {"worker", "severity", "code", "message", "fix"}
    assert (found["worker"], found["code"]) == ("w1", "unreachable")


async def test_nothing_found_is_0() -> None:
    async with lying() as worker:
        ended = await doctor("--worker", worker.url, "--no-probe", "--json", "--tokenizer", str(DEMO))
        assert worker.engine.received == 0
    assert (ended.code, ended.report()["worst"], ended.report()["findings"]) == (0, None, [])


async def test_workers_of_a_configuration_have_their_names_and_keys(tmp_path: Path) -> None:
    config = tmp_path / "kvgate.yaml"
    async with lying({"/v1/models": lambda said: (401, {})}) as locked:
        config.write_text(f"workers: [{{url: '{locked.url}', name: blue, api_key: secret}}]\n")
        ended = await doctor("--config", str(config), "--json")
    assert ended.code == 2
    assert [(found["worker"], found["code"]) for found in ended.report()["findings"]] == [("blue", "needs_key")]
    assert "secret" not in ended.out + ended.err


async def test_nothing_to_check_is_wrong_usage() -> None:
    ended = await doctor()
    assert (ended.code, ended.out) == (2, "")
    assert "--worker URL" in ended.err


# --------------------------------------------------------------------------- a running gateway


async def complete(r: Rig, prompt: list[int]) -> None:
    answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


async def test_a_healthy_gateway() -> None:
    async with rig(2) as r:
        for _ in range(3):
            await complete(r, list(range(100, 200)))
        ended = await doctor("--admin", r.ports.admin_url, "--json")
    assert {worker["worker"] for worker in ended.report()["workers"]} == {"w1", "w2"}
    assert ended.codes() == set()


async def test_zero_matches_with_known_blocks() -> None:
    """The gateway has another tokenizer: the engine has hits, the gateway predicts them by what it sent only."""
    other = Path(__file__).parents[1] / "golden" / "prefix" / "tiny-qwen2"
    async with rig(1, settings={"models": [{"name": "demo", "tokenizer": str(other)}]}) as r:
        text = "The doctor asks the same thing again and again, until somebody answers. " * 8
        for _ in range(25):
            body = {"model": "demo", "prompt": text, "max_tokens": 1}
            assert (await r.http.post("/v1/completions", json=body)).status_code == 200
            # Before its first event a worker is taken to hold what it was sent.
            await until(lambda: r.quiet() and r.announced > 0)
        worker = next(iter(r.gateway.fleet.workers.values()))
        await until(lambda: any(found.code == "tokenizer_differs" for found in worker.facts.findings))
        ended = await doctor("--admin", r.ports.admin_url, "--no-probe", "--json")
    assert ended.code == 2
    assert {"zero_matches", "tokenizer_differs"} <= ended.codes()


async def test_route_misses_are_told_with_their_cause() -> None:
    """The engine loses its cache again and again and does not say so."""
    async with rig(1) as r:
        for number in range(30):
            prompt = [100 + number * 100 + i for i in range(100)]
            await complete(r, prompt)
            r.engine("w1").fault(Fault(kind=FaultKind.CLEAR, silent=True))
            await complete(r, prompt)
        ended = await doctor("--admin", r.ports.admin_url, "--no-probe", "--json")
    (found,) = [found for found in ended.report()["findings"] if found["code"] == "route_misses"]
    assert (found["worker"], found["severity"]) == ("w1", "warning")


async def test_a_worker_that_went_away() -> None:
    async with rig(2, engine=fast()) as r:
        away = next(worker for worker in r.gateway.fleet.workers.values() if worker.id == "w2")
        await r.engine("w2").stop()
        r.gateway.membership.look(away.id)
        await until(lambda: away.state is WorkerState.GONE)
        ended = await doctor("--admin", r.ports.admin_url, "--no-probe", "--json")
    rows = [(found["worker"], found["code"]) for found in ended.report()["findings"]]
    assert ended.code == 2
    assert rows == [("w2", "not_ready"), ("w2", "unreachable")] or rows == [("w2", "unreachable"), ("w2", "not_ready")]


async def test_a_worker_that_has_not_joined() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with rig(1, settings={"workers": [{"url": nobody, "name": "late"}]}, wait=False) as r:
        ended = await doctor("--admin", r.ports.admin_url, "--no-probe", "--json")
    assert [(found["worker"], found["code"]) for found in ended.report()["findings"]] == [("late", "not_joined")]


@pytest.mark.parametrize("token", [None, "wrong", "right"])
async def test_the_admin_token(token: str | None) -> None:
    async with rig(1, settings={"auth": {"admin_token": "right"}}) as r:
        args = ["--token", token] if token is not None else []
        ended = await doctor("--admin", r.ports.admin_url, *args, "--no-probe", "--json")
    if token == "right":
        assert ended.code == 0
        return
    assert ended.code == 2
    assert [(found["worker"], found["code"]) for found in ended.report()["findings"]] == [
        ("gateway", "gateway_unreachable")
    ]
