"""Workers behind a DNS name: address records (A, or AAAA where there are none), or SRV records with their ports.

Rules:
1. The name is asked every `refresh_s`, whatever its records' life time is: fleets change faster than zones say.
2. An address that is missing from an answer is gone at once. An answer without any address (no such name, no records)
   is believed when it has been given for `grace_s`: name servers that begin anew say so of everything.
3. A time-out or a server failure is no answer: the last list stays.
4. A host with both kinds of addresses is one worker: its IPv6 address counts where it has no other.
5. Of SRV records those with the lowest priority number are taken (RFC 2782); their weights are not, load is better
   known here. With `https` the target's name is kept, for the certificate; else its addresses are used: those that came
   with the records, as name servers of clusters send them, and those of other targets are asked for.
6. A worker's name comes from its address by a hash, so it stays while the address does and does not show it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver
from dns.rdatatype import AAAA, SRV, A, RdataType
from dns.rdtypes.IN.SRV import SRV as SrvRecord

from gateway.discovery.roster import short_hash
from gateway.discovery.source import Found, Publish
from gateway.records import WorkerId, WorkerSpec

_JITTER = 0.1
_AT_ONCE = 16
"""Targets of SRV records that are looked up at the same time."""


@dataclass(frozen=True, slots=True)
class DnsName:
    """What to look up. `port` is that of address records, or replaces that of SRV records; `server` is the address and
    port of the name server, None for the system's; `like` has what all workers behind the name have in common."""

    name: str
    like: WorkerSpec
    srv: bool = False
    port: int | None = None
    scheme: str = "http"
    refresh_s: float = 10.0
    grace_s: float = 30.0
    server: tuple[str, int] | None = None
    timeout_s: float = 5.0


class DnsSource:
    """One name, looked up again and again."""

    def __init__(self, query: DnsName, *, clock: Callable[[], float], rng: Random) -> None:
        self.name = f"dns:{query.name}" + (f":{query.port}" if query.port else "")
        self._query = query
        self._clock = clock
        self._rng = rng
        self._empty_since: float | None = None

    @property
    def looks_for(self) -> DnsName:
        """What it looks up, and how."""
        return self._query

    async def run(self, publish: Publish) -> None:
        """Never returns."""
        while True:
            await self.look(publish)
            await asyncio.sleep(self._query.refresh_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER))

    async def look(self, publish: Publish) -> None:
        """Look once, and say what was found."""
        query = self._query
        try:
            hosts = await _Lookup(query).hosts()
        except (dns.exception.DNSException, OSError) as error:
            publish.failed(f"{query.name} cannot be looked up: {_why(error, query)}")
            return
        now = self._clock()
        if hosts or not publish.workers:
            self._empty_since = None
        else:
            if self._empty_since is None:
                self._empty_since = now
            if now - self._empty_since < query.grace_s:
                publish.failed(f"{query.name} has no addresses; its workers stay for {query.grace_s:g} s")
                return
        publish.present(_found(query, hosts))


def _why(error: Exception, query: DnsName) -> str:
    """The same words each time: the library's own hold how long each server took."""
    match error:
        case dns.exception.Timeout():
            return f"no answer within {query.timeout_s:g} s"
        case dns.resolver.NoNameservers():
            return "its name servers refuse or fail"
        case _:
            return str(error) or type(error).__name__


def _found(query: DnsName, hosts: Iterable[tuple[str, int]]) -> list[Found]:
    urls = (f"{query.scheme}://{f'[{host}]' if ':' in host else host}:{port}" for host, port in hosts)
    return [Found(replace(query.like, name=WorkerId(f"w-{short_hash(url)}"), url=url)) for url in sorted(set(urls))]


class _Lookup:
    """One look; every question of it has the same resolver."""

    def __init__(self, query: DnsName) -> None:
        self._query = query
        # Made each time: the system's name servers may change while the process runs.
        self._resolver = dns.asyncresolver.Resolver(configure=query.server is None)
        if query.server is not None:
            address, port = query.server
            self._resolver.nameservers = [dns.nameserver.Do53Nameserver(address, port)]

    async def hosts(self) -> Sequence[tuple[str, int]]:
        """Host and port of each worker. Raises DNSException when there is no answer."""
        query = self._query
        if query.srv:
            return await self._targets()
        return [(address, query.port or 8000) for address in await self._addresses(query.name)]

    async def _targets(self) -> list[tuple[str, int]]:
        query = self._query
        answer = await self._ask(query.name, SRV)
        records = [record for record in answer or () if isinstance(record, SrvRecord)]
        first = min((record.priority for record in records), default=0)
        targets = {
            (record.target.to_text(omit_final_dot=True), query.port or record.port)
            for record in records
            if record.priority == first and len(record.target) > 1  # "." says: no such service
        }
        if query.scheme == "https":
            return sorted(targets)
        addresses = dict(_additional(answer))
        names = sorted({name for name, _ in targets if name not in addresses})
        for start in range(0, len(names), _AT_ONCE):
            batch = names[start : start + _AT_ONCE]
            found = await asyncio.gather(*(self._addresses(f"{name}.") for name in batch))
            addresses.update(zip(batch, found, strict=True))
        return [(address, port) for name, port in targets for address in addresses[name]]

    async def _addresses(self, name: str) -> Sequence[str]:
        for kind in (A, AAAA):
            answer = await self._ask(name, kind)
            if answer is not None and answer.rrset is not None:
                return [record.to_text() for record in answer]
        return ()

    async def _ask(self, name: str, kind: RdataType) -> dns.resolver.Answer | None:
        """None: there is no such name."""
        try:
            return await self._resolver.resolve(
                name, kind, search=True, raise_on_no_answer=False, lifetime=self._query.timeout_s
            )
        except dns.resolver.NXDOMAIN:
            return None


def _additional(answer: dns.resolver.Answer | None) -> Mapping[str, Sequence[str]]:
    """Addresses of names that came with an answer (rule 4); a set of records is never sent in part (RFC 2181, 5.2)."""
    found: dict[RdataType, dict[str, Sequence[str]]] = {A: {}, AAAA: {}}
    for records in answer.response.additional if answer is not None else ():
        if records.rdtype in found:
            found[records.rdtype][records.name.to_text(omit_final_dot=True)] = [one.to_text() for one in records]
    return found[AAAA] | found[A]
