"""A simulated engine stops at once, whatever its connections are in the middle of."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gateway.sim.http_server import HttpRequest, HttpServer, Reply


def answer(request: HttpRequest, reply: Reply) -> None:
    reply.send(200, b"{}")


@pytest.mark.parametrize("turns", range(6))
async def test_stops_beside_a_connection_accepted_in_the_same_moment(turns: int) -> None:
    """`turns` of the event loop lie between the client's connect and the stop; the client never hangs up."""
    server = HttpServer(answer)
    port = await server.start("127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)):
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(server.stop(), 20)
        assert server.connections == 0
        for _ in range(6):
            await asyncio.sleep(0)
            assert server.connections == 0, "nothing comes after the end"
