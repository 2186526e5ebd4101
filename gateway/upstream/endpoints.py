"""Where a worker publishes its KV events and its load, and answers replays, as the gateway can reach it.

Rules:
1. A wildcard host becomes the worker's own host, from its URL.
2. Data-parallel ranks publish at the port of rank 0 plus their number; so do their replay sockets.
3. An address the gateway could not connect to is left out and becomes a finding with the fix: a PUB socket that
   connects instead of binding, a loopback address on another machine, a transport without an address.
4. What is configured wins, rank by rank.
5. A load socket binds every address of its host, whatever the host of the events: it is looked for at the worker's own.

Wire formats: `GET /kv_event_sources` of vLLM (0.31 on), `kv_events` in SGLang's `GET /server_info` (0.5.13 on; with the
load socket from 0.5.19 on, where `--load-publish-endpoint` opens one).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from gateway import findings as table
from gateway.pool import MAX_WORKERS
from gateway.records import EngineKind, EventSource, Finding, LoadEndpoint, WorkerSpec

_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "[::]", "::"})
_LAST_PORT = 65_535

_Topic = Annotated[str, msgspec.Meta(max_length=1024)]
"""zmq keeps a subscription byte by byte and lets it go by recursion: a topic of 200 KB ends the process."""


class VllmSource(msgspec.Struct):
    """One rank of vLLM's `/kv_event_sources`."""

    endpoint: str = ""
    replay_endpoint: str | None = None
    topic: _Topic = ""
    publisher: str | None = "zmq"
    enable_kv_cache_events: bool = True


class SglangEvents(msgspec.Struct):
    """`kv_events` of SGLang's `/server_info` (0.5.13 on)."""

    endpoint_port_base: int
    endpoint_host: str = "*"
    topic: _Topic = ""
    block_size: int | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 1
    replay_endpoint_port_base: int | None = None
    load_endpoint_port_base: int | None = None
    load_topic: _Topic = "load"


def vllm_sources(
    said: Mapping[int, VllmSource] | None, host: str, findings: list[Finding], *, wanted: bool
) -> dict[int, EventSource]:
    """Sources by rank. `said` is None where the worker does not have the path, empty where events are off; `wanted`
    says that nothing is configured, so that absence is worth a finding."""
    if not said:
        if wanted:
            findings.append((table.EVENTS_OFF if said is not None else table.EVENTS_UNANNOUNCED).found())
        return {}
    # Addresses come with the rank's port already; should two ranks name the same one, it is the base address.
    same = len(said) > 1 and len({item.endpoint for item in said.values()}) == 1
    sources: dict[int, EventSource] = {}
    for rank, item in sorted(said.items()):
        shift = rank if same else 0
        events = _reachable(item.endpoint, host, shift)
        if not _binds(item.endpoint):
            findings.append(table.EVENTS_CONNECT.found(endpoint=item.endpoint))
        elif events is None:
            findings.append(table.EVENTS_LOCAL.found(endpoint=item.endpoint))
        else:
            replay = _replay(item.replay_endpoint, host, shift, findings)
            sources[rank] = EventSource(rank=rank, endpoint=events, replay_endpoint=replay, topic=item.topic)
    return sources


def _replay(endpoint: str | None, host: str, shift: int, findings: list[Finding]) -> str | None:
    if not endpoint:
        findings.append(table.NO_REPLAY.found())
        return None
    reachable = _reachable(endpoint, host, shift)
    if reachable is None:
        findings.append(table.REPLAY_LOCAL.found(endpoint=endpoint))
    return reachable


def sglang_sources(
    events: SglangEvents | None, host: str, findings: list[Finding], *, wanted: bool
) -> dict[int, EventSource]:
    """Sources by rank; `events` is None where nothing is announced or the release cannot tell."""
    if events is None:
        if wanted:
            findings.append(table.EVENTS_OFF.found(EngineKind.SGLANG))
        return {}
    base = _reachable(f"tcp://{_bracketed(events.endpoint_host)}:{events.endpoint_port_base}", host, 0)
    if base is None:
        findings.append(table.EVENTS_LOCAL.found(endpoint=events.endpoint_host))
        return {}
    replay = None
    if events.replay_endpoint_port_base is not None:  # the host of the replay socket is not told
        replay = f"tcp://{_bracketed(host)}:{events.replay_endpoint_port_base}"
    else:
        findings.append(table.NO_REPLAY.found())
    return {
        rank: EventSource(
            rank=rank,
            endpoint=_shifted(base, rank),
            replay_endpoint=_shifted(replay, rank) if replay is not None else None,
            topic=events.topic,
        )
        for rank in range(max(events.dp_size, 1))
    }


def sglang_loads(events: SglangEvents | None, host: str) -> tuple[LoadEndpoint, ...]:
    """Where each rank publishes its load; empty where nothing is announced, or ports that cannot be."""
    base = events.load_endpoint_port_base if events is not None else None
    if events is None or base is None or not 0 < base <= _LAST_PORT - events.dp_size + 1:
        return ()
    address = f"tcp://{_bracketed(host)}"
    return tuple(LoadEndpoint(rank, f"{address}:{base + rank}", events.load_topic) for rank in range(events.dp_size))


def configured_sources(
    spec: WorkerSpec, host: str, probed: Mapping[int, EventSource], ranks: Sequence[int]
) -> tuple[EventSource, ...]:
    """What the configuration says, laid over what the worker says. A configured address is that of the first of the
    `ranks` behind the URL; the others follow at one port each, as engines place them."""
    if spec.kv_events == "":
        return ()
    numbers = sorted(probed) if spec.kv_events is None else ranks
    sources: list[EventSource] = []
    for rank in numbers:
        known = probed.get(rank)
        endpoint = known.endpoint if known is not None else ""
        if spec.kv_events is not None:
            endpoint = _shifted(_with_host(spec.kv_events, host), rank - ranks[0])
        replay = known.replay_endpoint if known is not None else None
        if spec.kv_replay is not None:
            replay = _shifted(_with_host(spec.kv_replay, host), rank - ranks[0]) if spec.kv_replay else None
        topic = known.topic if known is not None else ""
        sources.append(EventSource(rank=rank, endpoint=endpoint, replay_endpoint=replay, topic=topic))
    return tuple(sources)


def _binds(endpoint: str) -> bool:
    """vLLM's rule for its PUB socket (`distributed/kv_events.py`); anything else makes it connect."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _reachable(endpoint: str, host: str, rank: int) -> str | None:
    """The address to connect to from here, or None where there is none."""
    if endpoint.startswith("ipc://"):
        return endpoint if _is_loopback(host) else None
    if not endpoint.startswith("tcp://"):
        return None
    there = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if _is_loopback(there.strip("[]")) and not _is_loopback(host):
        return None
    return _shifted(_with_host(endpoint, host), rank)


def _with_host(endpoint: str, host: str) -> str:
    """A wildcard host replaced by the worker's."""
    there, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if endpoint.startswith("tcp://") and there in _WILDCARD_HOSTS:
        return f"tcp://{_bracketed(host)}:{port}"
    return endpoint


def _shifted(endpoint: str, rank: int) -> str:
    front, _, port = endpoint.rpartition(":")
    return f"{front}:{int(port) + rank}" if rank and port.isdigit() else endpoint


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
