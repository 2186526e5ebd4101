"""What Kubernetes objects say of workers: pods and EndpointSlices, as the API server sends them in JSON.

Rules:
1. A pod (an endpoint) with an address is a worker. Not ready or about to end, it gets no new requests and keeps what is
   known of it: one that is ready again has its cache still.
2. Without an address, finished, or annotated `kvgate.io/ignore`, it is none.
3. A worker has the name of its pod. A pod that is in slices of both address families is one worker, by IPv4.
4. `kvgate.io/...` is read from annotations, and from labels where there is no such annotation: an EndpointSlice has the
   labels of its Service, not its annotations. A value that cannot be read is left out and told.

Formats: core/v1 Pod, discovery.k8s.io/v1 EndpointSlice, meta/v1 WatchEvent and Status. It does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from gateway.discovery.roster import fitting_name, short_hash
from gateway.discovery.source import Found
from gateway.pool import MAX_WORKERS
from gateway.records import EngineKind, RankChoice, Role, WorkerSpec

PREFIX = "kvgate.io/"

NOT_READY, TERMINATING = "not_ready", "terminating"
_USUAL_PORT_NAME = "http"
_USUAL_PORT = 8000

MOST_OBJECTS = 16 * MAX_WORKERS
"""A selector that fits more is a mistake."""


@dataclass(frozen=True, slots=True)
class KubeTraits:
    """What all workers have in common: `port` is a number or the name of a port, None: the one named `http`, else the
    first, else 8000. `like` has the rest."""

    like: WorkerSpec
    port: int | str | None = None
    scheme: str = "http"


class Seen(NamedTuple):
    """One address of an object. `said` is what it says of itself, by key without the prefix."""

    name: str
    host: str
    ports: Sequence[tuple[str, int]]
    draining: str | None
    said: Mapping[str, str]


class Page(NamedTuple):
    """A part of a list: what each object says, by the object's name; `version` to watch from; `rest` names the next
    part."""

    objects: list[tuple[str, list[Seen]]]
    version: str
    rest: str


class Happened(NamedTuple):
    """One event of a watch. `seen` is None when the object is gone or the event is about none; `version` is where the
    watch is now; `status` is that of an error."""

    name: str | None = None
    seen: list[Seen] | None = None
    version: str | None = None
    status: Status | None = None


class Kind(Protocol):
    """Which objects are looked at, and how they are read."""

    @property
    def resource(self) -> str:
        """As paths and roles call it."""
        ...

    def path(self, namespace: str) -> str:
        """Where they are."""
        ...

    def page(self, body: bytes) -> Page:
        """A list. Raises what `UNREADABLE` names."""
        ...

    def event(self, line: bytes) -> Happened:
        """A line of a watch. Raises what `UNREADABLE` names."""
        ...


# --------------------------------------------------------------------------- formats


class Status(msgspec.Struct):
    """Why something failed."""

    message: str = ""
    reason: str = ""
    code: int = 0


class _Meta(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None

    def said(self) -> dict[str, str]:
        return {
            key.removeprefix(PREFIX): value
            for source in (self.labels, self.annotations)
            for key, value in (source or {}).items()
            if key.startswith(PREFIX)
        }


class _ListMeta(msgspec.Struct, rename={"version": "resourceVersion", "rest": "continue"}):
    version: str = ""
    rest: str | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Named(msgspec.Struct):
    metadata: _Meta


class _Port(msgspec.Struct, rename="camel"):
    """Of a container or of a slice."""

    name: str | None = None
    container_port: int | None = None
    port: int | None = None


class _Container(msgspec.Struct):
    ports: list[_Port] | None = None


class _PodSpec(msgspec.Struct):
    containers: list[_Container] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct):
    phase: str = ""
    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[_Condition] | None = None


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _PodList(msgspec.Struct):
    metadata: _ListMeta
    items: list[_Pod] | None = None


class _EndpointConditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _TargetRef(msgspec.Struct):
    name: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str] | None = None
    conditions: _EndpointConditions | None = None
    target_ref: _TargetRef | None = None


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Meta
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct):
    metadata: _ListMeta
    items: list[_Slice] | None = None


_T = TypeVar("_T")


def _event(line: bytes, shape: type[_T], seen: Callable[[_T], list[Seen]]) -> Happened:
    event = msgspec.json.decode(line, type=_Event)
    if event.type == "ERROR":
        return Happened(status=msgspec.json.decode(event.object, type=Status))
    meta = msgspec.json.decode(event.object, type=_Named).metadata
    match event.type:
        case "ADDED" | "MODIFIED":
            there = seen(msgspec.json.decode(event.object, type=shape))
            return Happened(meta.name, there, meta.resource_version)
        case "DELETED":
            return Happened(meta.name, None, meta.resource_version)
        case _:  # a bookmark
            return Happened(version=meta.resource_version)


@dataclass(frozen=True, slots=True)
class Pods:
    """Each pod is a worker."""

    resource = "pods"

    def path(self, namespace: str) -> str:
        return f"/api/v1/namespaces/{namespace}/pods"

    def page(self, body: bytes) -> Page:
        pods = msgspec.json.decode(body, type=_PodList)
        objects = [(pod.metadata.name, _seen_pod(pod)) for pod in pods.items or ()]
        return Page(objects, pods.metadata.version, pods.metadata.rest or "")

    def event(self, line: bytes) -> Happened:
        return _event(line, _Pod, _seen_pod)


@dataclass(frozen=True, slots=True)
class Slices:
    """Each endpoint of the slices is a worker."""

    resource = "endpointslices"

    def path(self, namespace: str) -> str:
        return f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def page(self, body: bytes) -> Page:
        slices = msgspec.json.decode(body, type=_SliceList)
        objects = [(each.metadata.name, _seen_slice(each)) for each in slices.items or ()]
        return Page(objects, slices.metadata.version, slices.metadata.rest or "")

    def event(self, line: bytes) -> Happened:
        return _event(line, _Slice, _seen_slice)


def _seen_pod(pod: _Pod) -> list[Seen]:
    status = pod.status
    if not status.pod_ip or status.phase in ("Succeeded", "Failed"):
        return []
    ready = any(one.type == "Ready" and one.status == "True" for one in status.conditions or ())
    draining = TERMINATING if pod.metadata.deletion_timestamp else (None if ready else NOT_READY)
    ports = [
        (port.name or "", port.container_port)
        for container in pod.spec.containers or ()
        for port in container.ports or ()
        if port.container_port is not None
    ]
    return [Seen(pod.metadata.name, status.pod_ip, ports, draining, pod.metadata.said())]


def _seen_slice(each: _Slice) -> list[Seen]:
    said = each.metadata.said()
    ports = [(port.name or "", port.port) for port in each.ports or () if port.port is not None]
    seen = []
    for endpoint in each.endpoints or ():
        if not endpoint.addresses or not endpoint.addresses[0]:
            continue
        host = endpoint.addresses[0]
        conditions = endpoint.conditions or _EndpointConditions()
        # Not said means ready.
        draining = TERMINATING if conditions.terminating else (NOT_READY if conditions.ready is False else None)
        name = endpoint.target_ref.name if endpoint.target_ref is not None else ""
        seen.append(Seen(name or f"w-{short_hash(host)}", host, ports, draining, said))
    return seen


# --------------------------------------------------------------------------- the view


@dataclass(slots=True)
class KubeView:
    """The workers of all objects known now."""

    traits: KubeTraits
    objects: dict[str, list[Seen]] = field(default_factory=dict)
    _made: dict[str, tuple[Seen, Found, list[str]]] = field(default_factory=dict)
    """What became of each worker's `Seen` the last time, with its problems: of hundreds one changes at a time."""

    def replace(self, objects: Iterable[tuple[str, list[Seen]]]) -> None:
        """A whole list has been read: what is not in it is gone."""
        self.objects = dict(objects)

    def happened(self, event: Happened) -> bool:
        """One object has changed; False when that changes nothing here, or there is no room for another one."""
        if event.name is None:
            return False
        before = self.objects.get(event.name)
        if before is None and len(self.objects) >= MOST_OBJECTS:
            return False
        if event.seen is None:
            self.objects.pop(event.name, None)
        else:
            self.objects[event.name] = event.seen
        return before != event.seen

    def found(self) -> tuple[list[Found], list[str]]:
        """The workers in the order of their names, and what could not be read of what they say."""
        by_name: dict[str, Seen] = {}
        for each in self.objects.values():
            for seen in each:
                if seen.said.get("ignore", "").lower() != "true":
                    other = by_name.get(seen.name)
                    by_name[seen.name] = seen if other is None else min(seen, other, key=_preference)
        made = {}
        for name, seen in by_name.items():
            known = self._made.get(name)
            made[name] = known if known is not None and known[0] is seen else (seen, *_found(seen, self.traits))
        self._made = made
        in_order = [made[name] for name in sorted(made)]
        return [found for _, found, _ in in_order], [problem for _, _, told in in_order for problem in told]


def _preference(seen: Seen) -> tuple[bool, bool, str]:
    return (seen.draining is not None, ":" in seen.host, seen.host)


def _found(seen: Seen, traits: KubeTraits) -> tuple[Found, list[str]]:
    """The worker, and what could not be read."""
    problems = []
    port = _port(seen, traits)
    scheme = traits.scheme
    changes: dict[str, Any] = {}
    for key, value in sorted(seen.said.items()):
        try:
            if key == "port":
                port = _number(value)
            elif key == "scheme":
                scheme = _word("http", "https")(value)
            elif key in SAID:
                name, read = SAID[key]
                changes[name] = read(value)
        except ValueError:
            problems.append(f"{seen.name}: {PREFIX}{key} is {value[:64]!r}")
    host = f"[{seen.host}]" if ":" in seen.host else seen.host
    spec = replace(traits.like, name=fitting_name(seen.name), url=f"{scheme}://{host}:{port}", **changes)
    return Found(spec, seen.draining), problems


def _port(seen: Seen, traits: KubeTraits) -> int:
    if isinstance(traits.port, int):
        return traits.port
    wanted = traits.port or _USUAL_PORT_NAME
    named = [number for name, number in seen.ports if name == wanted]
    return next(iter([*named, *(number for _, number in seen.ports)]), _USUAL_PORT)


def _number(value: str) -> int:
    number = int(value)
    if number < 1:
        raise ValueError(value)
    return number


def _weight(value: str) -> float:
    weight = float(value)
    if not 0 < weight <= 1000:
        raise ValueError(value)
    return weight


def _word(*words: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        if value not in words:
            raise ValueError(value)
        return value

    return read


def _endpoint(value: str) -> str:
    if value == "off":
        return ""
    if not value.startswith("tcp://"):
        raise ValueError(value)
    return value


def _models(value: str) -> tuple[str, ...]:
    return tuple(name for part in value.split(",") if (name := part.strip()))


SAID: Mapping[str, tuple[str, Callable[[str], object]]] = {
    "engine": ("engine", EngineKind),
    "pool": ("pool", str),
    "role": ("role", Role),
    "models": ("models", _models),
    "weight": ("weight", _weight),
    "block-size": ("block_size", _number),
    "kv-blocks": ("kv_blocks", _number),
    "kv-events": ("kv_events", _endpoint),
    "kv-replay": ("kv_replay", _endpoint),
    "data-parallel-size": ("data_parallel_size", _number),
    "ranks": ("ranks", RankChoice),
}
"""Field of `WorkerSpec` by key; `port`, `scheme` and `ignore` are the others."""
