"""The body of one request, from its first bytes until a worker's answer begins: then it is needed no more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.errors import GatewayError

if TYPE_CHECKING:
    # The edge holds the open exchanges, which hold their bodies.
    from gateway.edge.gate import Edge


class Body:
    """`whole`: it has come, or nothing more of it is wanted, because of `error`. What it holds is counted in
    `Edge.buffered_bytes`."""

    __slots__ = ("_edge", "_held_bytes", "_pieces", "_waiter", "error", "whole")

    def __init__(self, edge: Edge) -> None:
        self.whole = False
        self.error: GatewayError | None = None
        self._edge = edge
        self._held_bytes = 0
        self._pieces: list[bytes] = []
        self._waiter: asyncio.Future[None] | None = None

    def arrival(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[None]:
        """Done when it is whole; asked for once, while it is not."""
        self._waiter = loop.create_future()
        return self._waiter

    def add(self, data: bytes) -> None:
        """The next bytes."""
        self._pieces.append(data)
        self._held_bytes += len(data)
        self._edge.buffered_bytes += len(data)

    def complete(self, error: GatewayError | None) -> None:
        """Nothing more comes."""
        self.whole = True
        if error is not None:
            self.error = error
            self._pieces.clear()
            self.let_go()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> bytes:
        """All of it, once."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def let_go(self) -> None:
        """It is needed no more; later calls change nothing."""
        self._edge.buffered_bytes -= self._held_bytes
        self._held_bytes = 0
