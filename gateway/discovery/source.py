"""The seam between what names workers and the roster: each source says, again and again, whom it sees now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from gateway.records import WorkerSpec


class Found(NamedTuple):
    """One worker as a source sees it. `draining`: why it is to get no new requests, in a word, though it is there."""

    spec: WorkerSpec
    draining: str | None = None


class Publish(Protocol):
    """Where one source says what it sees."""

    @property
    def workers(self) -> int:
        """How many it named last, also before it was started anew."""
        ...

    def present(self, found: Iterable[Found]) -> None:
        """These are all the workers it sees; those it named before and does not name now are gone."""
        ...

    def failed(self, reason: str) -> None:
        """It cannot look now: what it said last stays true."""
        ...


class Source(Protocol):
    """Looks for workers as long as it runs; a failure of what it asks is told, not raised."""

    @property
    def name(self) -> str:
        """Kind, and behind a colon what tells it from others of its kind: `config`, `dns:workers.example`."""
        ...

    @property
    def looks_for(self) -> object:
        """What it was made from: two of one name whose values are equal would see the same."""
        ...

    async def run(self, publish: Publish) -> None:
        """Never returns."""
        ...
