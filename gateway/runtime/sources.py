"""The sources of workers that the configuration names."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from gateway.config import ConfigError
from gateway.discovery import (
    ApiServer,
    DnsName,
    DnsSource,
    KubeQuery,
    KubernetesSource,
    KubeTraits,
    Pods,
    Slices,
    Source,
)
from gateway.discovery.roster import short_hash
from gateway.records import WorkerSpec
from gateway.replicas import RegistrySource
from gateway.settings import DnsSettings, KubernetesSettings, Settings, WorkerSettings, name_server


def sources_of(settings: Settings, *, clock: Callable[[], float], rng: Random) -> list[Source]:
    """One for each entry; they do nothing until they run. Raises ConfigError for a cluster that nobody names."""
    sources: list[Source] = [DnsSource(_dns_name(entry), clock=clock, rng=rng) for entry in settings.discovery.dns]
    if settings.discovery.kubernetes is not None:
        sources.append(_kubernetes(settings.discovery.kubernetes, rng))
    registry, store = settings.discovery.registry, settings.redis.address()
    if registry is not None and store is not None:
        prefix = settings.redis.prefix
        sources.append(
            RegistrySource(store, prefix=prefix, refresh_s=registry.refresh_s, read=_registered, clock=clock, rng=rng)
        )
    return sources


def _registered(text: bytes) -> WorkerSpec:
    """A worker that announced itself. Raises ValueError for what is no entry of `workers`."""
    worker = WorkerSettings.model_validate_json(text)
    return worker.as_spec(worker.name or f"w-{short_hash(worker.url)}", worker.url)


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


def _kubernetes(entry: KubernetesSettings, rng: Random) -> KubernetesSource:
    if entry.api_server is None or entry.namespace is None:
        key = "api_server" if entry.api_server is None else "namespace"
        raise ConfigError([f"discovery.kubernetes.{key}: is missing; outside a cluster it has to be given"])
    query = KubeQuery(
        Pods() if entry.kind == "pods" else Slices(),
        entry.namespace,
        entry.selector,
        KubeTraits(entry.as_spec("", ""), entry.port, entry.scheme),
        resync_s=entry.resync_s,
    )
    return KubernetesSource(ApiServer(entry.api_server, entry.token_file, entry.ca_file), query, rng=rng)
