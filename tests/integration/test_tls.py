"""TLS on both sides: the same bytes, the same ends, and nobody who cannot prove who it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli.admin_port import AdminError, AdminPort, port_of
from gateway.config import ConfigError
from gateway.credentials import ServerTls, WorkerTls
from gateway.edge import EdgeLimits
from gateway.errors import WorkerUnreachable
from gateway.records import Result, WorkerId, WorkerSpec
from gateway.runtime import Gateway
from gateway.runtime.tls import Certificate, server_context, worker_context
from gateway.settings import Settings
from gateway.upstream.connections import Timeouts, WorkerConnections
from gateway.upstream.deadlines import Deadlines
from tests.integration.certificates import Authority, Signed, authority
from tests.integration.relay_rig import (
    PATIENCE_S,
    RawClient,
    Tls,
    answers,
    ask,
    both_loops,
    post,
    relay,
    silent,
    streams,
    until,
)
from tests.integration.rig import rig
from tests.integration.test_gateway import cached, chat

OK = b'{"usage":{"prompt_tokens":10,"completion_tokens":2}}'


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def server(ours: Authority) -> Signed:
    return ours.sign("server")


@pytest.fixture
def tls(ours: Authority, server: Signed) -> Tls:
    gateway = server_context(ServerTls(cert=server.cert, key=server.key), [], section="server.tls")
    assert gateway is not None
    return Tls(gateway, ours.client(), ours.server(server), worker_context(WorkerTls(ca=ours.ca), []))


# --------------------------------------------------------------------------- the relay over it


@both_loops
async def test_large_bodies_pass_unchanged_and_connections_are_kept(tls: Tls) -> None:
    async with relay(answers(OK + b" " * 5_000_000), tls=tls) as r:
        client = await r.client()
        body = ask(more=b',"x":"%b"' % (b"y" * 5_000_000))
        for _ in range(3):
            client.send(post(body))
            assert (await client.answer()).body == OK + b" " * 5_000_000
        assert [call.body == body for call in r.workers[0].calls] == [True] * 3
        assert r.workers[0].accepted == 1
        await until(r.quiet)


@both_loops
async def test_a_stream_comes_event_by_event(tls: Tls) -> None:
    async with relay(silent, tls=tls) as r:
        client, call = await r.streaming()
        for number in range(20):
            event = b'data: {"n":%d}\n\n' % number
            call.events(event)
            if not number:
                await client.head()
            assert await client.chunk() == event
        call.events(b"data: [DONE]\n\n")
        call.end_stream()
        assert await client.chunk() == b"data: [DONE]\n\n"
        assert (await r.outcome()).result is Result.COMPLETED


@both_loops
async def test_back_pressure(tls: Tls) -> None:
    """A client that does not read stops the worker, within bounded buffers, and gets everything in the end."""
    async with relay(silent, tls=tls) as r:
        client = await r.client(limit=1 << 16)
        client.send(post(ask(stream=True)))
        call = await r.workers[0].call()
        call.begin_stream()
        piece, count = b"data: " + b"x" * 65_000 + b"\n\n", 400
        for _ in range(count):
            call.events(piece)
        (exchange,) = r.edge.exchanges
        held: Any = exchange._client
        await until(lambda: held.write_paused)
        await asyncio.sleep(0.3)
        # What a TLS transport of the worker still holds cannot be asked; what the gateway holds can.
        assert held.transport.get_write_buffer_size() < 2_000_000
        call.events(b"data: [DONE]\n\n")
        call.end_stream()
        await client.head()
        got = 0
        while data := await client.chunk():
            got += len(data)
        assert got == len(piece) * count + len(b"data: [DONE]\n\n")


@both_loops
async def test_a_client_that_leaves_takes_its_worker_along(tls: Tls) -> None:
    async with relay(silent, tls=tls) as r:
        for begun in (False, True):
            client = await r.client()
            client.send(post(ask(stream=True)))
            call = await r.workers[0].call(int(begun))
            if begun:
                call.begin_stream(b"data: {}\n\n")
                await client.head()
            client.abort()
            async with asyncio.timeout(PATIENCE_S):
                await call.gone.wait()
        await until(lambda: [o.result for o in r.outcomes] == [Result.CLIENT_GONE] * 2)
        assert r.quiet()


@both_loops
async def test_a_worker_that_breaks_is_told(tls: Tls) -> None:
    async with relay(silent, tls=tls) as r:
        client, call = await r.streaming(b'data: {"choices":[]}\n\n')
        await client.head()
        call.abort()
        assert b"worker_broken" in await client.rest()
        await until(r.quiet)


@both_loops
async def test_a_refused_upload_sees_why(tls: Tls) -> None:
    limits = EdgeLimits(max_body_bytes=1_000_000, linger_s=0.5)
    async with relay(answers(OK), tls=tls, limits=limits) as r:
        client = await r.client()
        client.send(post(b"x" * 20_000_000))
        assert (await client.answer()).status == 413
        await client.rest()
        client = await r.client()
        client.send(b"NONSENSE\r\n\r\n")
        assert (await client.answer()).status == 400
        await client.rest()
        await until(r.quiet)


@both_loops
async def test_asgi_paths_are_served_too(tls: Tls) -> None:
    async with relay(streams(b"data: {}\n\n"), tls=tls) as r:
        answer = await r.ask(b"GET /v1/models HTTP/1.1\r\nhost: t\r\n\r\n")
        assert json.loads(answer.body)["data"][0]["id"] == "m"


# --------------------------------------------------------------------------- who is who


@both_loops
async def test_a_client_without_the_right_certificate_gets_nothing(
    ours: Authority, others: Authority, server: Signed, tls: Tls
) -> None:
    gateway = server_context(ServerTls(cert=server.cert, key=server.key, client_ca=ours.ca), [], section="server.tls")
    assert gateway is not None
    known, stranger = ours.client(ours.sign("known")), ours.client(others.sign("stranger"))
    async with relay(answers(OK), tls=tls._replace(gateway=gateway, clients=known)) as r:
        assert (await r.ask(post(ask()))).status == 200
        for context in (ours.client(), stranger, None):
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                client = await RawClient.connect(r.port, tls=context)
                client.send(post(ask()))
                assert await client.rest() == b""
                client.abort()
        assert len(r.workers[0].calls) == 1


@both_loops
@pytest.mark.parametrize("wrong", ["authority", "name", "certificate missing", "plain"])
async def test_a_worker_that_cannot_prove_who_it_is_gets_no_request(
    wrong: str, ours: Authority, others: Authority, server: Signed
) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            seen.append(await reader.read(1000))
        writer.close()

    workers: dict[str, ssl.SSLContext | None] = {
        "authority": others.server(others.sign("impostor")),
        "name": ours.server(ours.sign("elsewhere", address="127.0.0.2")),
        "certificate missing": ours.server(server),
        "plain": None,
    }
    context = workers[wrong]
    if wrong == "certificate missing":
        assert context is not None
        context.load_verify_locations(ours.ca)
        context.verify_mode = ssl.CERT_REQUIRED
        context.maximum_version = ssl.TLSVersion.TLSv1_2  # in 1.3 the client learns it with its first read
    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        clock = asyncio.get_running_loop().time
        connections = WorkerConnections(
            WorkerSpec(WorkerId("w"), f"https://127.0.0.1:{port}", api_key="sk-secret"),
            timeouts=Timeouts(connect_s=5),
            clock=clock,
            deadlines=Deadlines(clock),
            tls=worker_context(WorkerTls(ca=ours.ca), []),
            max_idle=1,
            open_connections=set(),
        )
        with pytest.raises(WorkerUnreachable):
            await connections.connect()
        assert b"sk-secret" not in b"".join(seen)


@both_loops
async def test_without_a_context_https_is_no_plain_connection() -> None:
    clock = asyncio.get_running_loop().time
    connections = WorkerConnections(
        WorkerSpec(WorkerId("w"), "https://127.0.0.1:1"),
        timeouts=Timeouts(),
        clock=clock,
        deadlines=Deadlines(clock),
        tls=None,
        max_idle=1,
        open_connections=set(),
    )
    assert connections.encrypted


# --------------------------------------------------------------------------- a whole gateway


@contextlib.asynccontextmanager
async def wrapped(url: str, context: ssl.SSLContext) -> AsyncIterator[str]:
    """A TLS end in front of a plain server, as a side-car would be."""
    host, port = url.removeprefix("http://").split(":")

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pipe(reader, inner_writer), pipe(inner_reader, writer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


async def test_an_https_worker_joins_and_serves_and_clients_come_by_https(ours: Authority, server: Signed) -> None:
    """Probes, polls and requests all go the encrypted way, with the client certificate that the worker wants."""
    ident = ours.sign("gateway")
    context = ours.server(server)
    context.load_verify_locations(ours.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    settings: dict[str, Any] = {
        "server": {"tls": {"cert": str(server.cert), "key": str(server.key)}},
        "worker_tls": {"ca": str(ours.ca), "cert": str(ident.cert), "key": str(ident.key)},
    }
    async with rig(1) as plain, wrapped(plain.engines[0].url, context) as url:
        source = plain.gateway.fleet.workers[WorkerId("w1")].facts.events[0]
        worker = {"url": url, "name": "w1", "kv_events": source.endpoint, "kv_replay": source.replay_endpoint or "off"}
        async with rig(0, settings={**settings, "workers": [worker]}) as r:
            assert r.ports.url.startswith("https://")
            async with httpx.AsyncClient(base_url=r.ports.url, verify=ours.client(), timeout=PATIENCE_S) as http:
                spoken = Rigged(r.gateway, http)
                await spoken.ask()
                await until(lambda: r.announced > 0)
                _, predicted, delivered = await spoken.ask()
                assert predicted == delivered > 0


class Rigged:
    """A client of a gateway, in the form `cached` wants."""

    def __init__(self, gateway: Gateway, http: httpx.AsyncClient) -> None:
        self.gateway = gateway
        self.http = http

    async def ask(self) -> tuple[str, int, int]:
        return await cached(self, chat("hi"))  # type: ignore[arg-type]


async def test_a_client_that_never_says_hello_is_cut(server: Signed) -> None:
    tls = {"cert": str(server.cert), "key": str(server.key)}
    async with rig(0, settings={"server": {"tls": tls, "header_timeout_s": 0.2}}, wait=False) as r:
        port = int(r.ports.url.rsplit(":", 1)[1])
        for said in (b"", post(ask())):
            client = await RawClient.connect(port)
            client.send(said)
            assert b"HTTP/" not in await client.rest()
            await client.close()


# --------------------------------------------------------------------------- files


def test_files_that_cannot_be_used_stop_the_start(ours: Authority, others: Authority, server: Signed) -> None:
    other = others.sign("another")
    none = Path("/nowhere.pem")
    for tls, said in (
        (ServerTls(cert=none), "server.tls.cert, server.tls.key: cannot be used: No such file"),
        (ServerTls(cert=server.cert, key=other.key), "KEY_VALUES_MISMATCH"),
        (ServerTls(cert=server.cert, key=server.key, client_ca=none), "server.tls.client_ca: cannot be used: No such"),
        (ServerTls(cert=server.cert, key=server.key, client_ca=server.key), "server.tls.client_ca: cannot be used"),
    ):
        with pytest.raises(ConfigError, match=said):
            server_context(tls, [], section="server.tls")
    with pytest.raises(ConfigError, match=r"worker_tls\.ca"):
        worker_context(WorkerTls(ca=none), [])
    with pytest.raises(ConfigError, match=r"worker_tls\.cert"):
        worker_context(WorkerTls(cert=none), [])
    with pytest.raises(ConfigError, match=r"worker_tls\.ca"):
        Gateway(Settings(worker_tls=WorkerTls(ca=none)))


async def test_the_admin_port_speaks_https_with_a_certificate_of_its_own(
    ours: Authority, server: Signed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    admin_tls = {"cert": str(server.cert), "key": str(server.key)}
    async with rig(1, settings={"server": {"admin_tls": admin_tls}, "auth": {"admin_token": "hush"}}) as r:
        port = AdminPort(r.ports.admin_url, "hush")
        assert r.ports.admin_url.startswith("https://")
        assert (await r.http.get("/v1/models")).status_code == 200, "the client port stays as it was"
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(AdminError, match="certificate verify failed"):
            await asyncio.to_thread(port.get, "/admin/workers")
        monkeypatch.setenv("SSL_CERT_FILE", str(ours.ca))
        assert '"w1"' in await asyncio.to_thread(port.get, "/admin/workers")
        plain = AdminPort(r.ports.admin_url.replace("https:", "http:"), "hush")
        with pytest.raises(AdminError):
            await asyncio.to_thread(plain.get, "/admin/workers")
    settings = Settings(server={"admin_tls": admin_tls, "admin_port": 9})
    assert port_of(settings).address == "https://127.0.0.1:9"


async def test_a_renewed_certificate_is_used_from_the_next_handshake_on(ours: Authority, tmp_path: Path) -> None:
    made = authority(tmp_path, "mine")
    first = made.sign("renewed")
    certificates: list[Certificate] = []
    context = server_context(ServerTls(cert=first.cert, key=first.key), certificates, section="server.tls")
    listener = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with listener:
        port = listener.sockets[0].getsockname()[1]

        async def shown() -> Any:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=made.client())
            serial = writer.get_extra_info("peercert")["serialNumber"]
            writer.close()
            return serial

        before = await shown()
        made.sign("renewed")
        certificates[0].load()
        after = await shown()
        assert after != before
        first.key.write_text("no key")
        with pytest.raises(ConfigError):
            certificates[0].load()
        assert await shown() == after
        assert await shown() == after
