"""A name server to look workers up at, for tests and benchmarks: A, AAAA and SRV records from a table, over UDP, and
over TCP where an answer does not fit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

_UDP_BYTES = 512
"""What an answer may have for a client that does not say more (RFC 1035, 4.2.1)."""


@dataclass
class NameServer:
    """`records` maps (name, kind) to record texts; `rcode` makes every answer that failure, `silent` makes none.
    `additional`: addresses of the targets come with SRV records, as from the name server of a Kubernetes cluster, but
    for names it `leaves_out`.
    `asked` counts questions."""

    records: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    rcode: dns.rcode.Rcode | None = None
    silent: bool = False
    additional: bool = False
    leaves_out: frozenset[str] = frozenset()
    asked: int = 0
    port: int = 0

    @property
    def address(self) -> str:
        """Where it answers, host and port."""
        return f"127.0.0.1:{self.port}"

    def answer(self, question: bytes, *, limit: int | None) -> bytes | None:
        """The answer in at most `limit` bytes, cut short with a mark where it does not fit; None: there is none."""
        self.asked += 1
        query = dns.message.from_wire(question)
        if self.silent:
            return None
        reply = dns.message.make_response(query)
        asked = query.question[0]
        name = asked.name.to_text(omit_final_dot=True)
        if self.rcode is not None:
            reply.set_rcode(self.rcode)
        elif not any(known == name for known, _ in self.records):
            reply.set_rcode(dns.rcode.NXDOMAIN)
        else:
            kind = dns.rdatatype.to_text(asked.rdtype)
            texts = self.records.get((name, kind), [])
            if texts:
                reply.answer.append(dns.rrset.from_text(asked.name, 1, "IN", kind, *texts))
            if self.additional and kind == "SRV":
                reply.additional += self._addresses(text.split()[-1] for text in texts)
        wire = reply.to_wire()
        if limit is not None and len(wire) > limit:
            reply.answer.clear()
            reply.additional.clear()
            reply.flags |= dns.flags.TC
            wire = reply.to_wire()
        return wire

    def _addresses(self, targets: Iterable[str]) -> list[dns.rrset.RRset]:
        return [
            dns.rrset.from_text(target, 1, "IN", kind, *texts)
            for target in sorted(set(targets))
            if target.rstrip(".") not in self.leaves_out
            for kind in ("A", "AAAA")
            if (texts := self.records.get((target.rstrip("."), kind)))
        ]


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        wire = self._server.answer(data, limit=_UDP_BYTES)
        if wire is not None:
            self._transport.sendto(wire, address)


@asynccontextmanager
async def name_server() -> AsyncIterator[NameServer]:
    """Serves until the context ends."""
    server = NameServer()
    loop = asyncio.get_running_loop()

    async def tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = int.from_bytes(await reader.readexactly(2), "big")
        wire = server.answer(await reader.readexactly(size), limit=None)
        if wire is not None:
            writer.write(len(wire).to_bytes(2, "big") + wire)
        writer.close()

    listener = await asyncio.start_server(tcp, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(server), local_addr=("127.0.0.1", server.port))
    try:
        yield server
    finally:
        transport.close()
        listener.close()
        await listener.wait_closed()
