"""Who should be in the fleet: what several sources see, made into one list.

Rules:
1. A source that cannot look keeps what it saw last: no fleet is emptied because a name server or an API server is away.
2. One address is one worker, however many sources name it. The source that comes first in `PRECEDENCE` gives it its
   name and every field it states; fields at their default are filled in from the others, in the same order. It drains
   when any of them says so.
3. Two addresses that want one name: the first source's, and within a source the lower address's, keeps it; the other
   is called by the name and a short hash of its address.
4. The list follows from what the sources see now and from nothing before, so that replicas call a worker the same.
5. An address that an operator took out stays out until no source names it any more. When the operator adds it again,
   only that word of it counts.
6. There are at most `most` workers; those of the last sources are left out first, and counted.

It does no I/O and takes no clock; `now` is in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from operator import attrgetter
from typing import NamedTuple
from urllib.parse import urlsplit

from gateway.discovery.source import Found
from gateway.pool import MAX_WORKERS
from gateway.records import WorkerId, WorkerSpec

CONFIG, ADMIN = "config", "admin"
PRECEDENCE = (CONFIG, ADMIN, "kubernetes", "registry", "dns")
"""By kind. A person's word comes first; a name server knows addresses only."""

LONGEST_NAME = 64

_PLAIN = re.compile(r"https?://[a-z0-9.-]*[a-z0-9]:[1-9][0-9]*")
"""URLs that are their own address."""

_FILLED = tuple(f for f in fields(WorkerSpec) if f.name not in ("name", "url", "rank"))


class Entry(NamedTuple):
    """One worker of the list, and the sources that name it."""

    spec: WorkerSpec
    draining: str | None
    sources: tuple[str, ...]


class Plan(NamedTuple):
    """What brings a fleet to the list, in this order."""

    leave: tuple[WorkerId, ...]
    change: tuple[Entry, ...]
    """They are there, at the same address."""
    join: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class SourceState:
    """What a source said last. `listed_at` is None before its first list; `error` says why it cannot look now, since
    `failed_at`. `left_out` of its workers had no room (rule 6)."""

    name: str
    workers: int
    left_out: int
    listed_at: float | None
    error: str | None
    failed_at: float | None


@dataclass(slots=True)
class _Listing:
    found: dict[str, Found] = field(default_factory=dict)
    """By address."""
    left_out: int = 0
    listed_at: float | None = None
    error: str | None = None
    failed_at: float | None = None


class Roster:
    """The sources' lists and the one made of them."""

    def __init__(self, *, most: int = MAX_WORKERS) -> None:
        self._most = most
        self._listings: dict[str, _Listing] = {}
        self._excluded: set[str] = set()
        self._entries: Mapping[WorkerId, Entry] | None = None
        self.left_out = 0
        """Workers without room in the list as a whole."""

    def expect(self, source: str) -> None:
        """There is such a source; it has not said anything yet."""
        self._listings.setdefault(source, _Listing())

    def listed(self, source: str, found: Iterable[Found], now: float) -> None:
        """All that `source` sees now. An address it names twice counts once, the first time."""
        by_address: dict[str, Found] = {}
        left_out = 0
        for one in found:
            address = address_of(one.spec)
            if address in by_address:
                continue
            if len(by_address) < self._most:
                by_address[address] = one
            else:
                left_out += 1
        self._listings[source] = _Listing(by_address, left_out, listed_at=now)
        self._excluded &= {
            address for name, listing in self._listings.items() if name != ADMIN for address in listing.found
        }
        self._entries = None

    def failed(self, source: str, reason: str, now: float) -> None:
        """`source` cannot look now (rule 1)."""
        listing = self._listings.setdefault(source, _Listing())
        if listing.error is None:
            listing.failed_at = now
        listing.error = reason

    def forget(self, source: str) -> None:
        """There is no such source any more, nor what it saw."""
        if self._listings.pop(source, None) is not None:
            self._entries = None

    def add(self, spec: WorkerSpec, now: float) -> None:
        """An operator adds a worker."""
        self.listed(ADMIN, (*self._of_admin(but=spec), Found(spec)), now)

    def withdraw(self, spec: WorkerSpec, now: float, *, out: bool) -> None:
        """An operator adds it no more; `out`: takes it out, whoever else names it (rule 5)."""
        if out:
            self._excluded.add(address_of(spec))
        self.listed(ADMIN, self._of_admin(but=spec), now)

    def entries(self) -> Mapping[WorkerId, Entry]:
        """The list, by name."""
        if self._entries is None:
            self._entries = self._merged()
        return self._entries

    def plan(self, present: Mapping[WorkerId, Entry]) -> Plan:
        """What has to be done where `present` are the workers there are. One that drains already does not join."""
        entries = self.entries()
        leave, change = [], []
        for name, there in present.items():
            wanted = entries.get(name)
            if wanted is None or wanted.spec.url != there.spec.url:
                leave.append(name)
            elif wanted[:2] != there[:2]:
                change.append(wanted)
        stay = present.keys() - leave
        join = tuple(e for name, e in entries.items() if name not in stay and e.draining is None)
        return Plan(tuple(leave), tuple(change), join)

    def sources(self) -> list[SourceState]:
        """Every source, in the order of precedence."""
        return [self.source(name) for name in sorted(self._listings, key=_rank)]

    def source(self, name: str) -> SourceState:
        """One source; one that nobody knows has said nothing."""
        it = self._listings.get(name) or _Listing()
        return SourceState(name, len(it.found), it.left_out, it.listed_at, it.error, it.failed_at)

    def _of_admin(self, *, but: WorkerSpec) -> list[Found]:
        known = self._listings.get(ADMIN)
        address = address_of(but)
        return [] if known is None else [found for other, found in known.found.items() if other != address]

    def _merged(self) -> dict[WorkerId, Entry]:
        by_address: dict[str, Entry] = {}
        for source in sorted(self._listings, key=_rank):
            found_here = self._listings[source].found
            for address in sorted(found_here):
                found = found_here[address]
                if address in self._excluded and source != ADMIN:
                    continue
                first = by_address.get(address)
                by_address[address] = (
                    Entry(found.spec, found.draining, (source,))
                    if first is None
                    else Entry(
                        _filled(first.spec, found.spec), first.draining or found.draining, (*first.sources, source)
                    )
                )
        entries: dict[WorkerId, Entry] = {}
        for address, entry in by_address.items():
            name = entry.spec.name
            if name in entries:
                name = _longer(name, address)
                entry = entry._replace(spec=replace(entry.spec, name=name))
            if name not in entries and len(entries) < self._most:
                entries[name] = entry
        self.left_out = len(by_address) - len(entries)
        return entries


def address_of(spec: WorkerSpec) -> str:
    """What tells whether two URLs are one worker: scheme, host and port."""
    if _PLAIN.fullmatch(spec.url):  # nearly always, and a list of hundreds is compared whenever one changes
        return spec.url
    parts = urlsplit(spec.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{(parts.hostname or '').rstrip('.')}:{port}"


def fitting_name(name: str) -> WorkerId:
    """A name of any length as a worker's name; a long one ends in its hash."""
    return WorkerId(name) if len(name) <= LONGEST_NAME else _longer(WorkerId(name), name)


def short_hash(address: str, size: int = 4) -> str:
    """Stays with an address and does not show it: `2 * size` letters of 0-9a-f."""
    return blake2b(address.encode(), digest_size=size).hexdigest()


def _rank(source: str) -> tuple[int, str]:
    kind = source.partition(":")[0]
    return (PRECEDENCE.index(kind) if kind in PRECEDENCE else len(PRECEDENCE), source)


def _filled(first: WorkerSpec, other: WorkerSpec) -> WorkerSpec:
    more = {
        f.name: value
        for f in _FILLED
        if attrgetter(f.name)(first) == f.default and (value := attrgetter(f.name)(other)) != f.default
    }
    return replace(first, **more) if more else first


def _longer(name: WorkerId, address: str) -> WorkerId:
    ending = "-" + short_hash(address, 6)
    return WorkerId(f"{name[: LONGEST_NAME - len(ending)]}{ending}")
