"""Workers behind DNS names, asked of a real name server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from random import Random
from typing import Any

import dns.rcode
import pytest
import pytest_asyncio

from gateway.discovery import DnsName, DnsSource, Found
from gateway.records import EngineKind, WorkerId, WorkerSpec
from gateway.sim.name_server import NameServer, name_server
from tests.integration.rig import rig, until

LIKE = WorkerSpec(WorkerId(""), "", engine=EngineKind.VLLM, pool="gpu")
NAME = "vllm.test"


class Said:
    """What a source said, newest last."""

    def __init__(self) -> None:
        self.lists: list[list[Found]] = []
        self.errors: list[str] = []

    @property
    def workers(self) -> int:
        return len(self.lists[-1]) if self.lists else 0

    def present(self, found: Iterable[Found]) -> None:
        self.lists.append(list(found))

    def failed(self, reason: str) -> None:
        self.errors.append(reason)

    @property
    def urls(self) -> list[str]:
        return [found.spec.url for found in self.lists[-1]]


@pytest_asyncio.fixture
async def server() -> AsyncIterator[NameServer]:
    async with name_server() as running:
        yield running


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def source(server: NameServer, clock: Clock | None = None, **keys: Any) -> DnsSource:
    keys = {"refresh_s": 0.5, **keys}
    query = DnsName(keys.pop("name", NAME), LIKE, server=("127.0.0.1", server.port), **keys)
    return DnsSource(query, clock=clock or Clock(), rng=Random(1))


async def test_addresses_are_workers_with_names_that_stay_and_hide_them(server: NameServer) -> None:
    server.records[NAME, "A"] = ["10.0.0.2", "10.0.0.1"]
    said, looking = Said(), source(server, port=8080)
    await looking.look(said)
    server.records[NAME, "A"] = ["10.0.0.3", "10.0.0.1"]
    await looking.look(said)
    first, second = ({found.spec.url: found.spec for found in listing} for listing in said.lists)
    assert list(first) == ["http://10.0.0.1:8080", "http://10.0.0.2:8080"]
    assert list(second) == ["http://10.0.0.1:8080", "http://10.0.0.3:8080"]
    assert first["http://10.0.0.1:8080"] == second["http://10.0.0.1:8080"]
    assert all("10" not in spec.name.partition("-")[0] and spec.name.startswith("w-") for spec in first.values())
    assert {(spec.engine, spec.pool) for spec in first.values()} == {(EngineKind.VLLM, "gpu")}
    assert looking.name == "dns:vllm.test:8080"


async def test_a_host_with_two_kinds_of_addresses_is_one_worker(server: NameServer) -> None:
    server.records |= {(NAME, "A"): ["10.0.0.1"], (NAME, "AAAA"): ["fd00::1"], ("six.test", "AAAA"): ["fd00::2"]}
    said = Said()
    await source(server).look(said)
    assert said.urls == ["http://10.0.0.1:8000"]
    await source(server, name="six.test").look(said)
    assert said.urls == ["http://[fd00::2]:8000"]


async def test_more_addresses_than_a_datagram_holds(server: NameServer) -> None:
    server.records[NAME, "A"] = [f"10.0.{n // 250}.{n % 250}" for n in range(300)]
    said = Said()
    await source(server).look(said)
    assert len(said.urls) == 300


async def test_srv_records_bring_their_ports(server: NameServer) -> None:
    """Only those of the best priority; the one for backup is not used beside them."""
    server.records |= {
        ("_http._tcp.vllm.test", "SRV"): ["0 50 8001 a.test.", "0 50 8002 b.test.", "9 100 8003 c.test."],
        ("a.test", "A"): ["10.0.0.1"],
        ("b.test", "A"): ["10.0.0.2"],
        ("c.test", "A"): ["10.0.0.3"],
    }
    said = Said()
    await source(server, name="_http._tcp.vllm.test", srv=True).look(said)
    assert said.urls == ["http://10.0.0.1:8001", "http://10.0.0.2:8002"]
    await source(server, name="_http._tcp.vllm.test", srv=True, scheme="https", port=443).look(said)
    assert said.urls == ["https://a.test:443", "https://b.test:443"]
    server.records["_http._tcp.vllm.test", "SRV"] = ["0 0 0 ."]
    said = Said()
    await source(server, name="_http._tcp.vllm.test", srv=True).look(said)
    assert said.urls == []


async def test_addresses_that_come_with_srv_records_are_not_asked_for(server: NameServer) -> None:
    """Three hundred targets, one question; those without an address in the answer are asked for alone."""
    name = "_http._tcp.vllm.test"
    server.records[name, "SRV"] = [f"0 0 8000 e{n}.vllm.test." for n in range(300)]
    for n in range(300):
        server.records[f"e{n}.vllm.test", "A" if n else "AAAA"] = [f"10.0.{n // 250}.{n % 250}" if n else "fd00::1"]
    plain, short = Said(), Said()
    await source(server, name=name, srv=True).look(plain)
    asked = server.asked
    assert asked >= 300
    server.additional = True
    await source(server, name=name, srv=True).look(short)
    assert server.asked <= asked + 2, "once over UDP, and over TCP as that was cut short"
    assert short.urls == plain.urls
    assert (len(short.urls), short.urls[-1]) == (300, "http://[fd00::1]:8000")
    server.records[name, "SRV"].append("0 0 8001 elsewhere.test.")
    server.records["elsewhere.test", "A"] = ["10.9.9.9"]
    server.leaves_out = frozenset(("elsewhere.test",))
    asked = server.asked
    await source(server, name=name, srv=True).look(short)
    assert "http://10.9.9.9:8001" in short.urls
    assert server.asked <= asked + 3


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, None], ids=["servfail", "refused", "silent"])
async def test_no_answer_says_nothing(server: NameServer, rcode: dns.rcode.Rcode | None) -> None:
    server.records[NAME, "A"] = ["10.0.0.1"]
    said, looking = Said(), source(server, timeout_s=5.0 if rcode else 0.5)
    async with asyncio.timeout(60):
        while not said.lists:
            await looking.look(said)
    said.errors.clear()
    server.rcode, server.silent = rcode, rcode is None
    await looking.look(said)
    assert (len(said.lists), len(said.errors)) == (1, 1)
    assert "vllm.test cannot be looked up" in said.errors[0]
    server.rcode, server.silent = None, False
    async with asyncio.timeout(60):
        while len(said.lists) < 2:
            await looking.look(said)


@pytest.mark.parametrize("records", [{}, {(NAME, "TXT"): ["x"]}], ids=["no such name", "no addresses"])
async def test_an_empty_answer_is_believed_after_a_while(
    server: NameServer, records: dict[tuple[str, str], list[str]]
) -> None:
    server.records[NAME, "A"] = ["10.0.0.1"]
    clock, said = Clock(), Said()
    looking = source(server, clock, grace_s=30.0)
    await looking.look(said)
    server.records = records
    for at in (100.0, 129.0):
        clock.now = at
        await looking.look(said)
    assert said.urls == ["http://10.0.0.1:8000"]
    assert said.errors[-1] == "vllm.test has no addresses; its workers stay for 30 s"
    clock.now = 131.0
    await looking.look(said)
    assert said.urls == []
    server.records = {(NAME, "A"): ["10.0.0.1"]}
    await looking.look(said)
    server.records = records
    await looking.look(said)
    assert said.urls == ["http://10.0.0.1:8000"]  # the time begins anew
    await source(server, clock, grace_s=30.0).look(said)
    assert said.urls == ["http://10.0.0.1:8000"], "also for a source that was started anew"


async def test_an_empty_answer_at_the_start_is_an_answer(server: NameServer) -> None:
    said = Said()
    await source(server).look(said)
    assert (said.urls, said.errors) == ([], [])


async def test_a_fleet_follows_its_name(server: NameServer) -> None:
    """Two engines found by SRV records; one of them is in the configuration too and keeps that name; then it leaves."""
    name = "_http._tcp.fleet.test"
    server.records["host.test", "A"] = ["127.0.0.1"]
    entry = {"name": name, "type": "srv", "server": server.address, "refresh_s": 0.1, "pool": "found"}
    async with rig(2, settings={"discovery": {"dns": [entry]}, "workers": []}, wait=False) as r:
        ports = [engine.url.rpartition(":")[2] for engine in r.engines]
        assert not r.gateway.readiness().ready
        (_, dns_source) = (await r.admin("/admin/workers"))["sources"]
        assert (dns_source["source"], dns_source["workers"]) == (f"dns:{name}", 0)
        server.records[name, "SRV"] = [f"0 0 {port} host.test." for port in ports]
        await until(lambda: len(r.gateway.fleet.workers) == 2)
        await r.gateway.enrolment.configured(
            [WorkerSpec(WorkerId("mine"), f"http://127.0.0.1:{ports[0]}", api_key="k")]
        )
        await until(lambda: "mine" in r.gateway.fleet.workers and len(r.gateway.fleet.workers) == 2)
        mine = r.gateway.fleet.workers[WorkerId("mine")]
        assert (mine.spec.pool, mine.spec.api_key) == ("found", "k")
        answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": 2})
        assert answer.headers["x-kvgate-worker"] in r.gateway.fleet.workers
        server.records[name, "SRV"] = [f"0 0 {ports[0]} host.test."]
        await until(lambda: set(r.gateway.fleet.workers) == {"mine"})
        server.silent = True
        await until(lambda: r.gateway.enrolment.roster.source(f"dns:{name}").error is not None)
        assert set(r.gateway.fleet.workers) == {"mine"}
        metrics = (await r.http.get(f"{r.ports.admin_url}/metrics")).text
        assert f'kvgate_discovery_up{{source="dns:{name}"}} 0' in metrics
        assert f'kvgate_discovery_workers{{source="dns:{name}"}} 1' in metrics
        assert 'kvgate_discovery_up{source="config"} 1' in metrics
