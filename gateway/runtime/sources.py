"""The sources of workers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gateway.discovery import DnsName, DnsSource, Source
from gateway.settings import DiscoverySettings, DnsSettings, name_server


def sources_of(settings: DiscoverySettings, *, clock: Callable[[], float], rng: Random) -> list[Source]:
    """One for each entry; they do nothing until they run."""
    return [DnsSource(_dns_name(entry), clock=clock, rng=rng) for entry in settings.dns]


def _dns_name(entry: DnsSettings) -> DnsName:
    return DnsName(
        entry.name,
        like=entry.as_spec("", ""),
        srv=entry.type == "srv",
        port=entry.port,
        scheme=entry.scheme,
        refresh_s=entry.refresh_s,
        grace_s=entry.grace_s,
        server=None if entry.server is None else name_server(entry.server),
    )
