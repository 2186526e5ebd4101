"""The operating commands against a running gateway: every one is used once, and every way to be told no."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest
import structlog
from typer.testing import CliRunner

from gateway.cli.app import app
from gateway.records import WorkerId
from gateway.sim.server import SimulatedWorker, Speech
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    def rows(self) -> dict[str, list[str]]:
        """Lines of a table by their first word; columns are two spaces apart."""
        lines = [re.split(r"\s{2,}", line.strip()) for line in self.out.splitlines()]
        return {cells[0].split()[0]: cells for cells in lines if cells[0]}


async def kvgate(*args: str, environ: dict[str, str] | None = None) -> Ended:
    """Run a command in this process, while gateway and engines go on."""
    unset = dict.fromkeys((name for name in os.environ if name.startswith("KVGATE_")), None)
    result = await asyncio.to_thread(CliRunner().invoke, app, list(args), env={**unset, **(environ or {})})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return Ended(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(autouse=True)
def _logs_apart() -> Iterator[None]:
    """The gateway of a test runs in the process whose standard output a command's is read from."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))
    yield
    structlog.reset_defaults()


@pytest.fixture
async def r() -> AsyncIterator[Rig]:
    async with rig(2) as running:
        yield running


async def asked(r: Rig, *, session: str | None = None, number: int = 1) -> list[str]:
    """Requests that share a prefix, ended; their ids."""
    ids = []
    for one in range(number):
        body = {"model": "demo", "prompt": [7] * 160 + [one] * 16, "max_tokens": 4}
        headers = {} if session is None else {"x-session-id": session}
        answer = await r.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200
        ids.append(answer.headers["x-request-id"])
        await until(lambda: r.announced > 0)
    await until(r.quiet)
    return ids


# --------------------------------------------------------------------------- looking


async def test_workers_pools_sessions_and_decisions_as_tables(r: Rig) -> None:
    at = ("--admin", r.ports.admin_url)
    first, second = await asked(r, session="chat-1", number=2)
    workers = await kvgate("workers", *at)
    assert (workers.code, set(workers.rows())) == (0, {"worker", "w1", "w2"})
    assert workers.rows()["w1"][1] == "ready"
    home = r.gateway.router.sessions.find("chat-1", r.gateway.clock())
    assert home is not None

    shown = await kvgate("workers", "show", home, *at)
    lines = dict(line.split(maxsplit=1) for line in shown.out.splitlines() if line[:1].strip())
    assert lines["address"].strip() == r.engine(home).url
    assert "10 gpu blocks" in lines["index"] or "11 gpu blocks" in lines["index"] or "12 gpu blocks" in lines["index"]
    assert "prefill tokens/s" in lines["rates"]

    pools = await kvgate("pools", *at)
    assert pools.rows()["demo"][2] == "2/2"
    sessions = await kvgate("sessions", *at)
    assert (sessions.rows()[home][1], sessions.rows()["all"][1]) == ("1", "1")
    assert "chat-1" not in sessions.out

    decisions = await kvgate("decisions", *at)
    lines_by_id = [line for line in decisions.out.splitlines() if first in line or second in line]
    assert len(lines_by_id) == 2
    assert second in lines_by_id[0]  # the newest first
    one = await kvgate("decisions", second, *at)
    assert f"-> {home}" in one.out
    assert "ended: completed with 200, delivered hit 160" in one.out
    filtered = await kvgate("decisions", "--worker", home, "--hit", "--status", "200", "--since", "600", *at)
    assert filtered.out.count("200 completed") == 2
    assert "200 completed" not in (await kvgate("decisions", "--missed", "--limit", "5", *at)).out


async def test_prefixes_and_where_they_are_held(r: Rig) -> None:
    await asked(r, number=4)
    ended = await kvgate("prefixes", "--admin", r.ports.admin_url)
    assert ended.code == 0
    seen = await r.admin("/admin/prefixes")
    (application,) = seen["applications"]
    assert ended.rows()[application["head"]][1:3] == ["demo", "4"]
    hot = seen["prefixes"][0]
    assert hot["tokens"] == 160
    assert ended.rows()[hot["key"]][3:] == ["160", "3", "480", ", ".join(hot["workers"])]
    text = (await r.http.get(r.ports.admin_url + "/metrics")).text
    assert 'kvgate_prefix_prompts_total{model="demo"} 4' in text
    assert 'kvgate_prefix_shared_tokens_total{model="demo"} 480' in text


async def test_json_is_the_answer_of_the_gateway(r: Rig) -> None:
    at = ("--json", "--admin", r.ports.admin_url)
    for args, path in (
        (("workers",), "/admin/workers"),
        (("workers", "show", "w1"), "/admin/workers/w1"),
        (("pools",), "/admin/pools"),
        (("sessions",), "/admin/sessions"),
        (("decisions",), "/admin/decisions"),
        (("prefixes",), "/admin/prefixes"),
    ):
        ended = await kvgate(*args, *at)
        assert ended.code == 0
        assert set(json.loads(ended.out)) == set(await r.admin(path))


async def test_watching_goes_on_until_it_is_interrupted(r: Rig) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "workers", "--watch", "--every", "0.1", "--admin", r.ports.admin_url),
        stdout=asyncio.subprocess.PIPE,
        env={**environment, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    heads = 0
    async with asyncio.timeout(3 * PATIENCE_S):
        while heads < 3:
            heads += (await process.stdout.readline()).startswith(b"worker ")
        process.send_signal(signal.SIGINT)
        await process.communicate()
    assert process.returncode == 0


async def test_an_answer_carries_its_decision_for_the_admin_token_only() -> None:
    async with rig(2, settings={"auth": {"admin_token": "right-one"}, "server": {"receipts": False}}) as r:
        body = {"model": "demo", "prompt": [7] * 64, "max_tokens": 2}
        for given in (None, "wrong"):
            headers = {} if given is None else {"x-kvgate-debug": given}
            answer = await r.http.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert "x-kvgate-decision" not in answer.headers
        for stream in (False, True):
            answer = await r.http.post(
                "/v1/completions", json={**body, "stream": stream}, headers={"x-kvgate-debug": "right-one"}
            )
            said = json.loads(answer.headers["x-kvgate-decision"])
            assert said["worker"] == answer.headers["x-kvgate-worker"]
            assert {one["worker"] for one in said["candidates"]} == {"w1", "w2"}
            assert said["prompt"] == 64


# --------------------------------------------------------------------------- acting


async def test_a_worker_is_drained_and_comes_back(r: Rig) -> None:
    at = ("--admin", r.ports.admin_url)
    drained = await kvgate("drain", "w1", "--wait", str(PATIENCE_S), *at)
    assert (drained.code, drained.out.strip()) == (0, "w1: draining, 0 requests open")
    assert "w1 draining" in (await kvgate("pools", *at)).out
    back = await kvgate("undrain", "w1", *at)
    assert (back.code, back.out.strip()) == (0, "w1: ready, 0 requests open")
    shown = await kvgate("workers", "show", "w1", *at)
    assert "draining -> ready" in shown.out
    assert (await kvgate("reset", "w1", "--json", *at)).code == 0


async def test_draining_waits_for_open_requests_and_says_when_they_stay() -> None:
    async with rig(1, engine=fast(speed=1.0)) as r:
        at = ("--admin", r.ports.admin_url)
        body = {"model": "demo", "prompt": [9] * 64, "max_tokens": 2000, "stream": True, "ignore_eos": True}
        async with r.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()  # kept: the answer is closed with it
            await anext(lines)
            ended = await kvgate("drain", "w1", "--wait", "0.2", *at)
            assert (ended.code, ended.out) == (1, "")
            assert "w1: 1 requests are still open" in ended.err
        assert (await kvgate("drain", "w1", "--wait", str(PATIENCE_S), *at)).code == 0


async def test_a_worker_is_added_and_removed(r: Rig) -> None:
    at = ("--admin", r.ports.admin_url)
    newcomer = SimulatedWorker(fast(name="w3"), wall_clock=time.time, speech=Speech.load(fast().tokenizer))
    await newcomer.start()
    try:
        added = await kvgate("workers", "add", newcomer.url, "--name", "w3", "--pool", "spare", *at)
        assert (added.code, added.out.strip()) == (0, "w3: ready, 0 requests open")
        assert r.gateway.fleet.workers[WorkerId("w3")].spec.pool == "spare"
        twice = await kvgate("workers", "add", newcomer.url, "--name", "w3", *at)
        assert twice.code == 1
        assert "a worker named 'w3' is in the fleet" in twice.err
        assert (await kvgate("workers", "remove", "w3", *at)).out == "w3: removed\n"
        assert set(r.gateway.fleet.workers) == {"w1", "w2"}
    finally:
        await newcomer.stop()


async def test_an_index_is_learned_anew(r: Rig) -> None:
    await asked(r)
    home = r.gateway.router.recent()[0].decision.worker
    before = r.announced
    ended = await kvgate("resync", home, "--admin", r.ports.admin_url)
    assert (ended.code, ended.out.strip()) == (0, f"{home}: its index is learned anew; ready, 0 requests open")
    feeds = (await r.admin(f"/admin/workers/{home}"))["feed"]
    await until(lambda: r.gateway.membership.member_of(home) is not None)
    async with asyncio.timeout(PATIENCE_S):
        while not feeds["purges"].get("resync"):
            feeds = (await r.admin(f"/admin/workers/{home}"))["feed"]
            await asyncio.sleep(0.02)
    await until(lambda: r.announced == before)  # the replay brings it all back


async def test_a_session_is_found_moved_and_forgotten(r: Rig) -> None:
    at = ("--admin", r.ports.admin_url)
    await asked(r, session="chat-1")
    home = r.gateway.router.sessions.find("chat-1", r.gateway.clock())
    other = "w2" if home == "w1" else "w1"
    found = await kvgate("sessions", "find", "chat-1", *at)
    assert found.out.startswith(f"chat-1: {home}, last request ")
    assert (await kvgate("sessions", "move", "chat-1", other, *at)).out == f"chat-1: {other}\n"
    assert r.gateway.router.sessions.find("chat-1", r.gateway.clock()) == other
    assert (await kvgate("sessions", "forget", "chat-1", *at)).code == 0
    gone = await kvgate("sessions", "find", "chat-1", *at)
    assert gone.code == 1
    assert "chat-1" in gone.err


# --------------------------------------------------------------------------- being told no


async def test_unknown_names_are_told_the_nearest(r: Rig) -> None:
    at = ("--admin", r.ports.admin_url)
    for args in (("drain", "w11"), ("workers", "show", "w11"), ("workers", "remove", "w11"), ("resync", "w11")):
        ended = await kvgate(*args, *at)
        assert ended.code == 1
        assert "did you mean 'w1'?" in ended.err
    assert (await kvgate("decisions", "nobody", *at)).code == 1
    assert (await kvgate("sessions", "move", "s", "w11", *at)).code == 1
    wrong = await kvgate("decisions", "--miss-cause", "weather", *at)
    assert wrong.code == 1
    assert "miss_cause" in wrong.err


async def test_the_admin_token_comes_from_the_option_or_the_environment() -> None:
    async with rig(1, settings={"auth": {"admin_token": "right-one"}}) as r:
        at = ("--admin", r.ports.admin_url)
        missing = await kvgate("pools", *at)
        assert (missing.code, "none was given" in missing.err) == (1, True)
        wrong = await kvgate("pools", "--token", "wrong", *at)
        assert (wrong.code, "the one given is wrong" in wrong.err) == (1, True)
        assert (await kvgate("pools", "--token", "right-one", *at)).code == 0
        assert (await kvgate("pools", *at, environ={"KVGATE_AUTH__ADMIN_TOKEN": "right-one"})).code == 0


async def test_ports_that_are_no_admin_port(r: Rig) -> None:
    clients = await kvgate("workers", "--admin", r.ports.url)
    assert clients.code == 1
    assert "--admin takes the address of the admin port" in clients.err
    engine = await kvgate("workers", "--admin", r.engines[0].url)
    assert engine.code == 1
    assert "is this the admin port of kvgate?" in engine.err
    nobody = await kvgate("workers", "--admin", "127.0.0.1:9")
    assert nobody.code == 1
    assert "Is `kvgate serve` running?" in nobody.err


async def test_options_before_a_subcommand_are_refused() -> None:
    ended = await kvgate("workers", "--admin", "127.0.0.1:9", "show", "w1")
    assert ended.code == 2
    assert "behind its name" in ended.err
