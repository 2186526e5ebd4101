"""The configuration changes under a running gateway: real ports, real engines, open streams."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.credentials import key_hash
from gateway.records import WorkerId
from gateway.runtime.reload import Result
from gateway.sim.faults import Fault, FaultKind
from gateway.sim.kube_api import PODS, kube, pod
from gateway.sim.name_server import name_server
from tests.integration.rig import Rig, fast, rig, until, write_yaml

CHAT = "/v1/chat/completions"
STREAM = {"model": "demo", "max_tokens": 40, "stream": True, "messages": [{"role": "user", "content": "hello"}]}
PLAIN = {**STREAM, "max_tokens": 1, "stream": False}
FIRST, SECOND = "kvg-first-key-0123456789", "kvg-second-key-0123456789"
NO_SERVER = {"host": "127.0.0.1", "port": 0, "admin_port": 0}


class File:
    """The configuration file of a rig."""

    def __init__(self, r: Rig, path: Path) -> None:
        self.r = r
        self.path = path
        self.tree: dict[str, Any] = yaml.safe_load(path.read_text())

    async def says(self, **sections: Any) -> None:
        """Sections as they are from now on; None: no longer there. Read at once."""
        self.tree |= sections
        write_yaml(self.path, {name: section for name, section in self.tree.items() if section is not None})
        await self.r.gateway.reload()

    def text(self) -> str:
        return self.path.read_text()

    async def holds(self, text: str) -> None:
        """Something else. Read at once."""
        self.path.write_text(text)
        await self.r.gateway.reload()

    def worker(self, name: str, **keys: Any) -> dict[str, Any]:
        return {"url": self.r.engine(name).url, "name": name, **keys}


class Streams:
    """Answers under way, one on each engine at least; the engines stand still until `finish`."""

    def __init__(self, r: Rig) -> None:
        self.r = r
        self._stack = AsyncExitStack()
        self._answers: list[tuple[httpx.Response, Any, list[str]]] = []

    async def __aenter__(self) -> Streams:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self, count: int, **headers: str) -> None:
        for engine in self.r.engines:
            engine.fault(Fault(FaultKind.SLOW, factor=1e-3))
        for _ in range(count):
            request = self.r.http.stream("POST", CHAT, json=STREAM, headers=headers)
            answer = await self._stack.enter_async_context(request)
            assert answer.status_code == 200
            self._answers.append((answer, answer.aiter_lines(), []))

    async def finish(self) -> None:
        assert self.r.gateway.edge.open_exchanges >= len(self._answers), "still open"
        for engine in self.r.engines:
            engine.fault(Fault(FaultKind.SLOW, factor=1))
        for _, lines, _ in self._answers:
            events = [line async for line in lines if line.startswith("data: ")]
            assert events[-1] == "data: [DONE]"
            assert sum('"content":"' in event.replace(" ", "") for event in events) >= 40 - 1


def names(r: Rig) -> set[str]:
    return {str(name) for name in r.gateway.membership.members}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvgate.yaml"


async def test_workers_come_go_and_change_while_streams_run(path: Path) -> None:
    keys = {"policy": "round_robin"}
    async with rig(4, engine=fast(), settings={"routing": keys}, file=path) as r, Streams(r) as streams:
        file, engines = File(r, path), r.gateway.router.fleet.workers
        four = [file.worker(f"w{n}") for n in (1, 2, 3, 4)]
        await file.says(workers=four[:3])
        await until(lambda: names(r) == {"w1", "w2", "w3"})
        await streams.open(3)
        assert {name: worker.inflight_requests for name, worker in engines.items()} == {"w1": 1, "w2": 1, "w3": 1}
        before = engines[WorkerId("w2")]
        await file.says(workers=[four[1] | {"weight": 5, "api_key": "k", "pool": "blue"}, four[2], four[3]])
        await until(lambda: {str(name) for name in engines} == {"w2", "w3", "w4"})
        assert engines[WorkerId("w2")] is before, "its load, its index and its history stay"
        assert (before.weight, before.spec.pool, before.spec.api_key, before.inflight_requests) == (5, "blue", "k", 1)
        await streams.finish()
        await until(r.quiet)
        seen = [(await r.http.post(CHAT, json=PLAIN)).headers["x-kvgate-worker"] for _ in range(6)]
        assert set(seen) == {"w2", "w3", "w4"}
        await file.says(workers=[{"url": r.engine("w1").url, "name": "w2"}])
        await until(lambda: [w.spec.url for w in engines.values()] == [r.engine("w1").url])
        assert (await r.http.post(CHAT, json=PLAIN)).headers["x-kvgate-worker"] == "w2"


async def test_a_broken_file_changes_nothing_and_a_good_one_heals(path: Path) -> None:
    async with rig(2, engine=fast(), file=path) as r, Streams(r) as streams:
        file = File(r, path)
        await streams.open(4)
        good = file.text()
        for text, said in (
            ("routing: {polcy: p2c}", "routing.polcy: unknown key; did you mean `policy`?"),
            ("workers: [{url: ftp://a}]", "workers.0.url: 'ftp://a' is no worker URL"),
            ("models: [{name: demo, tokenizer: /nowhere}]", "models.demo: /nowhere"),
            ("auth: {keys_file: /nowhere}", "/nowhere: cannot be read"),
            ("", "kvgate.yaml: is empty"),
            (good[: len(good) // 2] + "\n  x: [", "no valid YAML"),
        ):
            await file.holds(text)
            shown = await r.admin("/admin/config")
            assert said in shown["problems"][0]
            assert names(r) == {"w1", "w2"}
            assert shown["settings"]["routing"]["policy"] == "seconds"
        page = (await r.http.get(r.ports.admin_url + "/metrics")).text
        refused = r.gateway.reload.results[Result.REFUSED]
        assert refused >= 6, "the watch of the file may have looked too"
        assert f'kvgate_config_reloads_total{{result="refused"}} {refused}\n' in page
        assert "kvgate_config_stale 1\n" in page
        await streams.finish()
        await file.says(routing={"policy": "p2c"}, server=NO_SERVER | {"port": 1, "receipts": False})
        shown = await r.admin("/admin/config")
        assert (shown["problems"], shown["needs_restart"]) == ([], ["server.port"])
        assert shown["origins"]["routing.policy"] == "kvgate.yaml"
        page = (await r.http.get(r.ports.admin_url + "/metrics")).text
        assert "kvgate_config_stale 0\n" in page
        assert "kvgate_config_needs_restart 1\n" in page
        assert "x-kvgate-worker" not in (await r.http.post(CHAT, json=PLAIN)).headers


async def test_the_file_is_noticed_by_itself_as_kubernetes_swaps_it(tmp_path: Path) -> None:
    for name in ("..1", "..2"):
        (tmp_path / name).mkdir()
    (tmp_path / "..data").symlink_to("..1")
    link = tmp_path / "kvgate.yaml"
    link.symlink_to("..data/kvgate.yaml")
    async with rig(1, file=link) as r:
        write_yaml(tmp_path / "..2" / "kvgate.yaml", File(r, link).tree | {"routing": {"policy": "random"}})
        (tmp_path / "..tmp").symlink_to("..2")
        os.replace(tmp_path / "..tmp", tmp_path / "..data")
        await until(lambda: r.gateway.router.policy.name == "random")


async def test_keys_and_the_admin_token_change_under_open_streams(path: Path) -> None:
    auth = {"keys": [{"key": FIRST, "tenant": "a"}], "admin_token": "old-token"}
    async with rig(1, engine=fast(), settings={"auth": auth}, file=path) as r, Streams(r) as streams:
        file = File(r, path)

        async def status(key: str) -> int:
            return (await r.http.post(CHAT, json=PLAIN, headers={"authorization": f"Bearer {key}"})).status_code

        async def admin(token: str) -> int:
            headers = {"authorization": f"Bearer {token}"}
            return (await r.http.get(r.ports.admin_url + "/admin/pools", headers=headers)).status_code

        await streams.open(1, authorization=f"Bearer {FIRST}")
        limited = {"hash": key_hash(SECOND), "tenant": "b", "models": ["other"]}
        await file.says(auth={"keys": [limited], "admin_token": "new-token"})
        assert (await status(FIRST), await status(SECOND)) == (401, 404)
        assert (await admin("old-token"), await admin("new-token")) == (401, 200)
        await streams.finish()
        await file.says(auth=None)
        assert await status("none") == 200, "no keys are asked for"
        assert await admin("none") == 200
        await file.says(auth={"keys": [{"key": FIRST, "tenant": "a"}]})
        assert (await status(FIRST), await status(SECOND)) == (200, 401)


async def test_limits_timeouts_policy_and_pages_obey(path: Path) -> None:
    async with rig(2, file=path) as r:
        file = File(r, path)
        long = {**PLAIN, "messages": [{"role": "user", "content": "x" * 5000}]}
        assert (await r.http.post(CHAT, json=long)).status_code == 200
        page = {"origin": "https://chat.example.com"}
        assert "access-control-allow-origin" not in (await r.http.get("/v1/models", headers=page)).headers
        await file.says(
            server=NO_SERVER | {"max_body_bytes": 2000, "cors_origins": ["https://chat.example.com"]},
            timeouts={"first_byte_s": 0.2, "models": {"demo": {"total_s": 0.9}}},
            retries={"max": 0},
            routing={"policy": "round_robin"},
        )
        assert (await r.http.post(CHAT, json=long)).status_code == 413
        answers = [await r.http.post(CHAT, json=PLAIN, headers=page) for _ in range(4)]
        assert {answer.headers["x-kvgate-worker"] for answer in answers} == {"w1", "w2"}
        assert {answer.headers["access-control-allow-origin"] for answer in answers} == {page["origin"]}
        models = await r.http.get("/v1/models", headers=page)
        assert models.headers["access-control-allow-origin"] == page["origin"]
        for engine in r.engines:
            engine.fault(Fault(FaultKind.FREEZE))
        slow = await r.http.post(CHAT, json=PLAIN)
        assert (slow.status_code, slow.headers["x-kvgate-retries"]) == (504, "0")


async def test_a_model_gets_and_loses_an_entry(path: Path) -> None:
    async with rig(1, file=path) as r:
        file, demo = File(r, path), r.engines[0].settings.tokenizer
        pool = r.gateway.fleet.pools["demo"]
        assert pool.block_size == 16
        entry = {"name": "demo", "aliases": ["small"], "tokenizer": str(demo), "block_size": 8}
        await file.says(models=[entry])
        assert r.gateway.tokenizers.find("demo") is r.gateway.tokenizers.find("small")
        assert r.gateway.fleet.pools["demo"].block_size == 8
        member = r.gateway.membership.members[WorkerId("w1")]
        await until(lambda: all(seat.block_size == 8 for seat in member.seats.values()))
        assert (await r.http.post(CHAT, json=PLAIN)).status_code == 200
        hasher = r.gateway.tokenizers.find("demo")
        await file.says(models=[entry | {"block_size": 16}])
        assert r.gateway.tokenizers.find("demo") is not None
        await file.says(models=None)
        await until(lambda: r.gateway.tokenizers.find("demo") not in (None, hasher))
        assert (await r.http.post(CHAT, json=PLAIN)).status_code == 200


async def test_only_a_source_that_was_changed_begins_anew_and_nobody_is_probed_for_it(path: Path) -> None:
    async with AsyncExitStack() as stack:
        names, api = await stack.enter_async_context(name_server()), await stack.enter_async_context(kube())
        cluster = {"api_server": api.url, "namespace": "llm", "selector": "app=vllm"}
        dns = [
            {"name": name, "type": "srv", "server": names.address, "refresh_s": 3600} for name in ("a.test", "b.test")
        ]
        settings = {
            "discovery": {"dns": dns, "kubernetes": cluster},
            "workers": [],
            "health": {"probe_s": 3600},
            "load": {"poll_s": 3600},
        }
        r = await stack.enter_async_context(rig(3, settings=settings, file=path, wait=False))
        file, gateway = File(r, path), r.gateway
        ports = [int(engine.url.rpartition(":")[2]) for engine in r.engines]
        api.apply(PODS, pod("in-the-cluster", "127.0.0.1", listens=ports[2]))
        await until(lambda: WorkerId("in-the-cluster") in gateway.fleet.workers and names.asked >= 2)
        probed = gateway.membership.members[WorkerId("in-the-cluster")].probed

        def looked() -> tuple[int, int, int]:
            return names.asked, api.lists, api.watches

        before = looked()
        await file.says(routing={"policy": "round_robin"}, timeouts={"total_s": 99})
        for number, port in enumerate(ports[:2]):
            names.records[f"{'ab'[number]}.test", "SRV"] = [f"0 0 {port} host.test."]
        names.records["host.test", "A"] = ["127.0.0.1"]
        await file.says(discovery={"dns": [dns[0] | {"refresh_s": 3000}, dns[1]], "kubernetes": cluster})
        await until(lambda: len(gateway.fleet.workers) == 2)
        assert looked() == (before[0] + 2, *before[1:]), "a.test was asked, and nothing else"
        await file.says(discovery={"dns": dns[1:], "kubernetes": cluster | {"resync_s": 200}})
        await until(lambda: len(gateway.fleet.workers) == 1 and api.lists == before[1] + 1)
        assert names.asked == before[0] + 2
        assert gateway.membership.members[WorkerId("in-the-cluster")].probed is probed


KEPT = 8
"""Connections to one engine: four clients, a poll, probes. Fifty that are left open are more."""


async def test_fifty_reloads_under_load_leave_nothing_behind(path: Path) -> None:
    async with rig(3, engine=fast(), file=path) as r:
        file, gateway = File(r, path), r.gateway
        two = [file.worker("w1"), file.worker("w2")]
        three = [*two, file.worker("w3")]
        statuses: list[int] = []
        changes = _changes(two, three)

        async def ask(until_set: asyncio.Event) -> None:
            while not until_set.is_set():
                async with r.http.stream("POST", CHAT, json=STREAM) as answer:
                    last = [line async for line in answer.aiter_lines() if line][-1]
                    statuses.append(answer.status_code if last == "data: [DONE]" else 0)

        async def reloads(count: int) -> None:
            """Returns when nothing is going on any more."""
            done = asyncio.Event()
            clients = [asyncio.create_task(ask(done)) for _ in range(4)]
            for number in range(count):
                change = next(changes)
                await file.says(**change)
                if number % 5 == 0:
                    wanted = len(change["workers"])
                    await until(lambda wanted=wanted: len(gateway.fleet.workers) == wanted)  # type: ignore[misc]
            await file.says(workers=three, routing=None, health=None, timeouts=None)
            done.set()
            await asyncio.gather(*clients)
            await until(lambda: r.quiet() and len(gateway.fleet.workers) == 3)
            await until(lambda: all(member.caught_up for member in gateway.membership.members.values()))
            gc.collect()

        await reloads(5)
        names_before, tasks, files = gateway.supervisor.names, len(asyncio.all_tasks()), _open_files(r)
        settings = gateway.settings
        await reloads(50)
        assert gateway.settings == settings
        assert len(gateway.fleet.pools) == 1
        await until(lambda: gateway.supervisor.names == names_before)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await until(lambda: _open_files(r) <= files)
        await until(lambda: all(engine.connections <= KEPT for engine in r.engines))
        assert set(statuses) == {200}
        assert len(statuses) > 8
        assert (gateway.reload.results[Result.APPLIED], gateway.reload.results[Result.REFUSED]) == (57, 0)
        page = (await r.http.get(r.ports.admin_url + "/metrics")).text
        for name in ("w1", "w2", "w3"):
            assert f'kvgate_worker_inflight_requests{{worker="{name}"}} 0\n' in page
            assert f'kvgate_accounting_drift{{worker="{name}"}} 0\n' in page


def _open_files(r: Rig) -> int:
    """Without the connections to engines, of which both ends are here: how many there are is a matter of the moment."""
    return len(os.listdir("/proc/self/fd")) - 2 * sum(engine.connections for engine in r.engines)


def _changes(two: list[dict[str, Any]], three: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        number += 1
        yield {
            "workers": three if number % 2 else [two[0], two[1] | {"weight": number}],
            "routing": {"policy": ("seconds", "p2c", "round_robin")[number % 3], "alpha": number},
            "health": {"failures": number + 1, "probe_s": 10 + number},
            "timeouts": {"total_s": 100 + number},
        }
