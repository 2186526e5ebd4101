"""Every way a store is reached: password, TLS, Sentinels that fail over, a Cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.discovery import Found
from gateway.records import WorkerId, WorkerSpec
from gateway.replicas import Announcer, Exchange, RegistrySource, Shelf
from gateway.runtime import Supervisor
from gateway.settings import RedisSettings
from gateway.store_address import StoreAddress
from tests.integration.certificates import Authority, authority
from tests.integration.redis_server import RedisServer, free_port, redis_server
from tests.integration.rig import until
from tests.unit.replicas.site import Site

FAILOVER_S = 60.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"))


def _address(url: str, **more: object) -> StoreAddress:
    settings = RedisSettings.model_validate({"url": url, "timeout_s": 1.0} | more)
    address = settings.address()
    assert address is not None
    return address


@asynccontextmanager
async def _two(address: StoreAddress, *, channel: str = "test:replicas") -> AsyncIterator[list[Exchange]]:
    """Two replicas that talk over this store, and hear each other at the end of the context too."""
    supervisor = Supervisor(time.monotonic)
    exchanges = []
    for number in (1, 2):
        site = Site(number)
        exchange = Exchange(
            address, site.journal, site.peers, channel=channel, clock=time.monotonic, rng=Random(number)
        )
        supervisor.start(f"listen {number}", exchange.listen)
        supervisor.start(f"speak {number}", exchange.speak)
        exchanges.append(exchange)
    try:
        await until(lambda: _talk(exchanges))
        yield exchanges
        await until(lambda: _talk(exchanges), within_s=FAILOVER_S)
        assert supervisor.restarts == 0
    finally:
        await supervisor.close()


def _talk(exchanges: list[Exchange]) -> bool:
    return all(exchange.up and len(exchange.peers.peers) == 1 for exchange in exchanges)


async def _heard(exchange: Exchange) -> None:
    """Until it hears something new of the other."""
    (peer,) = exchange.peers.peers.values()
    before = peer.messages
    await until(lambda: peer.messages > before)


async def test_a_password(tmp_path: Path) -> None:
    async with redis_server(tmp_path, password="a secret/with:signs@") as server:
        plain = f"redis://127.0.0.1:{server.port}"
        async with _two(_address(plain, password=SecretStr("a secret/with:signs@"))):
            pass
        async with _two(_address(f"redis://:a%20secret%2Fwith%3Asigns%40@127.0.0.1:{server.port}")):
            pass
        site, supervisor = Site(3), Supervisor(time.monotonic)
        refused = Exchange(
            _address(plain, password="wrong-password"),
            site.journal,
            site.peers,
            channel="test:replicas",
            clock=time.monotonic,
            rng=Random(3),
        )
        supervisor.start("listen", refused.listen)
        await until(lambda: refused.error is not None)
        await supervisor.close()
        assert not refused.up
        assert "wrong-password" not in (refused.error or "")


async def test_the_user_of_the_guide_may_do_all_that_is_done(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "guides" / "replicas.md"
    (line,) = [line for line in guide.read_text().splitlines() if line.startswith("ACL SETUSER")]
    async with redis_server(tmp_path) as server:
        async with server.client() as client:
            assert await _command(client, line) == b"OK"
        address = _address(f"redis://kvgate:secret@127.0.0.1:{server.port}")
        async with _two(address, channel="kvgate:replicas"):
            pass
        shelf = Shelf(address, prefix="kvgate", life_s=60.0)
        assert [await shelf.claim("a", 10.0), await shelf.claim("a", 10.0)] == [True, False]
        await shelf.put("a", b"value")
        assert await shelf.get("a") == b"value"
        with pytest.raises(RedisError):
            await Shelf(address, prefix="others", life_s=60.0).get("a")

        found: list[str] = []

        class Listed:
            workers = 0

            def present(self, all_found: Iterable[Found]) -> None:
                found[:] = [one.spec.url for one in all_found]

            def failed(self, reason: str) -> None:
                raise AssertionError(reason)

        async def answers() -> bool:
            return True

        announcer = Announcer(
            address, prefix="kvgate", url="http://w", worker=b"{}", heartbeat_s=1.0, alive=answers,
            on_change=lambda what: None,
        )  # fmt: skip
        source = RegistrySource(
            address, prefix="kvgate", refresh_s=0.1, read=lambda text: WorkerSpec(WorkerId("w"), "http://w"),
            clock=time.monotonic, rng=Random(1),
        )  # fmt: skip
        tasks = [asyncio.ensure_future(run) for run in (announcer.run(), source.run(Listed()))]
        await until(lambda: found == ["http://w"])
        tasks[0].cancel()
        await announcer.leave()
        await until(lambda: found == [])
        tasks[1].cancel()


async def test_tls_with_a_client_certificate(tmp_path: Path, ours: Authority) -> None:
    server, client = ours.sign("server"), ours.sign("client")
    port = free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-ca-cert-file", str(ours.ca)]
    options += ["--tls-cert-file", str(server.cert), "--tls-key-file", str(server.key)]
    async with redis_server(tmp_path, *options, plain=False, port=port):
        url = f"rediss://127.0.0.1:{port}"
        async with _two(_address(url, ca=ours.ca, cert=client.cert, key=client.key)):
            pass
        site, supervisor = Site(3), Supervisor(time.monotonic)
        strict = Exchange(
            _address(url),  # the system's authorities did not sign it
            site.journal,
            site.peers,
            channel="test:replicas",
            clock=time.monotonic,
            rng=Random(3),
        )
        supervisor.start("listen", strict.listen)
        await until(lambda: strict.error is not None and "certificate" in strict.error.lower())
        await supervisor.close()


async def test_sentinels_that_fail_over(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(redis_server(tmp_path, "--masterauth", "secret", password="secret"))
        second = await stack.enter_async_context(
            redis_server(
                tmp_path, "--masterauth", "secret", "--replicaof", f"127.0.0.1 {first.port}", password="secret"
            )
        )
        sentinels = []
        for number in range(3):
            port = free_port()
            configuration = tmp_path / f"sentinel{number}.conf"
            configuration.write_text(
                f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {first.port} 2\n"
                "sentinel auth-pass main secret\nsentinel down-after-milliseconds main 500\n"
                "sentinel failover-timeout main 2000\n"
            )
            sentinels.append(await stack.enter_async_context(_sentinel(configuration, port)))
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        await _replicated(first)
        async with _two(_address(f"redis+sentinel://:secret@{hosts}/main")) as exchanges:
            await first.kill()
            await until(lambda: not any(exchange.up for exchange in exchanges))
            await until(lambda: _talk(exchanges), within_s=FAILOVER_S)
            await _heard(exchanges[0])
            async with second.client() as client:
                assert (await client.role())[0] == b"master"


async def test_a_cluster(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        nodes, buses = [], [free_port() for _ in range(3)]
        for number, bus in enumerate(buses):
            directory = tmp_path / str(number)
            directory.mkdir()
            nodes.append(
                await stack.enter_async_context(
                    redis_server(directory, "--cluster-enabled", "yes", "--cluster-port", str(bus))
                )
            )
        await _join(nodes, buses)
        async with _two(_address(f"redis+cluster://127.0.0.1:{nodes[0].port},127.0.0.1:{nodes[1].port}")) as exchanges:
            await _heard(exchanges[0])
            await _heard(exchanges[1])


# --------------------------------------------------------------------------- servers


@asynccontextmanager
async def _sentinel(configuration: Path, port: int) -> AsyncIterator[RedisServer]:
    server = RedisServer(port, configuration.parent)
    server.process = await asyncio.create_subprocess_exec(
        "redis-server", str(configuration), "--sentinel", stdout=asyncio.subprocess.DEVNULL
    )
    try:
        await until_answers(server)
        yield server
    finally:
        await server.kill()


async def until_answers(server: RedisServer) -> None:
    """Until a connection is taken."""
    async with asyncio.timeout(20.0):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            writer.close()
            return


async def _replicated(first: RedisServer) -> None:
    """Until a second server follows the first."""
    async with asyncio.timeout(FAILOVER_S), first.client() as client:
        while (await client.info("replication")).get("slave0", {}).get("state") != "online":  # noqa: ASYNC110  another process
            await asyncio.sleep(0.05)


async def _join(nodes: list[RedisServer], buses: list[int]) -> None:
    """Make a Cluster of them, each with a third of the slots; `buses` are the ports they talk to each other on."""
    share = 16384 // len(nodes) + 1
    for number, node in enumerate(nodes):
        async with node.client() as client:
            last = min(16384, (number + 1) * share) - 1
            assert await _command(client, f"CLUSTER ADDSLOTSRANGE {number * share} {last}") == b"OK"
            meet = f"CLUSTER MEET 127.0.0.1 {nodes[0].port} {buses[0]}"
            assert number == 0 or await _command(client, meet) == b"OK"
    async with asyncio.timeout(FAILOVER_S):
        for node in nodes:
            async with node.client() as client:
                while b"cluster_state:ok" not in await _command(client, "CLUSTER INFO"):  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.05)


async def _command(client: Redis, line: str) -> bytes:
    """A command that the client makes no sense of."""
    answer: bytes = await client.execute_command(*line.split(), NEVER_DECODE=True)  # type: ignore[no-untyped-call]
    return answer
