"""A Kubernetes API server to find workers at, for tests and benchmarks: lists in parts and watches of pods and
EndpointSlices, over real HTTP.

It keeps objects and a history of what happened to them, as the real one does: a watch begins at a version, sends what
happened since, one JSON object a line in chunks, and bookmarks. It can forget its history (410 Gone, as an answer or as
an event), cut watches between or within lines, refuse, hang and want a token.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]

PODS = "/api/v1/namespaces/llm/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices"


@dataclass
class Kube:
    """`objects` by path and name. `gone_as_event`: 410 comes as an event in a watch; `refuse`: status of each answer
    instead; `hang`: no answer at all; `part`: objects in one part of a list; `compactions`: so many lists are too old
    at once; `bookmarks`: sent behind each event."""

    url: str = ""
    objects: dict[str, dict[str, Json]] = field(default_factory=lambda: {PODS: {}, SLICES: {}})
    version: int = 100
    oldest: int = 0
    gone_as_event: bool = False
    refuse: int | None = None
    hang: bool = False
    token: str | None = None
    part: int = 500
    compactions: int = 0
    bookmarks: bool = False
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    _history: list[tuple[int, str, str, Json]] = field(default_factory=list)
    _watches: dict[asyncio.StreamWriter, tuple[str, str]] = field(default_factory=dict)
    _snapshots: dict[str, tuple[list[Json], int]] = field(default_factory=dict)

    # ------------------------------------------------------------------ what happens in the cluster

    def apply(self, path: str, thing: Json) -> None:
        """Add or change an object."""
        name = thing["metadata"]["name"]
        known = name in self.objects[path]
        self._happened(path, "MODIFIED" if known else "ADDED", thing)
        self.objects[path][name] = thing

    def delete(self, path: str, name: str, *, silently: bool = False) -> None:
        """It is gone; `silently`: no watch hears of it."""
        thing = self.objects[path].pop(name)
        self._happened(path, "DELETED", thing, silently=silently)

    def forget(self) -> None:
        """The history is compacted: an older version is too old from here on."""
        self.version += 1
        self.oldest = self.version
        self._history.clear()

    def cut(self, *, within: str | None = None) -> int:
        """End all watches without a last chunk; `within`: in the middle of a line of that kind."""
        count = len(self._watches)
        for writer in list(self._watches):
            if within is not None:
                line = json.dumps({"type": within, "object": {"metadata": {"name": "x" * 500}}}).encode()
                _chunk(writer, line[: len(line) // 2])
            self._end(writer)
        return count

    def end(self) -> None:
        """End all watches as after their time."""
        for writer in list(self._watches):
            writer.write(b"0\r\n\r\n")
            self._watches.pop(writer)

    def error(self, code: int, message: str) -> None:
        """An error event on every watch, which then ends."""
        for writer in list(self._watches):
            self._line(writer, {"type": "ERROR", "object": _status(code, message)})
        self.end()

    @property
    def watches(self) -> int:
        """Watches that are open."""
        return len(self._watches)

    @property
    def lists(self) -> int:
        """Lists that were begun."""
        return sum("watch" not in query and "continue" not in query for _, query in self.asked)

    # ------------------------------------------------------------------ the server

    def _happened(self, path: str, what: str, thing: Json, *, silently: bool = False) -> None:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        event = {"type": what, "object": copy.deepcopy(thing)}
        self._history.append((self.version, path, what, event))
        for writer, (watched, selector) in list(self._watches.items()):
            if watched == path and not silently and _fits(thing, selector):
                self._line(writer, event)
                if self.bookmarks:
                    self._line(writer, self._bookmark())

    def _bookmark(self) -> Json:
        return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(self.version)}}}

    def _line(self, writer: asyncio.StreamWriter, event: Json) -> None:
        # Two chunks a line: nothing says that a line comes in one piece.
        line = json.dumps(event).encode() + b"\n"
        _chunk(writer, line[:20])
        _chunk(writer, line[20:])

    def _end(self, writer: asyncio.StreamWriter) -> None:
        self._watches.pop(writer, None)
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(head, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._end(writer)

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = urlsplit(head.split(" ", 2)[1])
        query = {key: values[0] for key, values in parse_qs(target.query).items()}
        self.asked.append((target.path, query))
        if self.hang:
            await reader.read()
        elif self.token is not None and f"authorization: bearer {self.token}" not in head.lower():
            _whole(writer, 401, _status(401, "Unauthorized"))
        elif self.refuse is not None:
            _whole(writer, self.refuse, _status(self.refuse, "no"))
        elif target.path not in self.objects:
            _whole(writer, 404, _status(404, "not found"))
        elif "watch" in query:
            self._watch(target.path, query, writer)
        else:
            self._list(target.path, query, writer)

    def _list(self, path: str, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        key, _, start_text = query.get("continue", "").partition("-")
        if key and (key not in self._snapshots or int(key) < self.oldest):
            _whole(writer, 410, _status(410, "The provided continue parameter is too old"))
            return
        if not key:
            key = str(self.version)
            fitting = [thing for thing in self.objects[path].values() if _fits(thing, query.get("labelSelector", ""))]
            self._snapshots[key] = (copy.deepcopy(fitting), self.version)
        things, version = self._snapshots[key]
        start = int(start_text or 0)
        size = min(self.part, int(query.get("limit", "500")))
        rest = f"{key}-{start + size}" if start + size < len(things) else ""
        meta = {"resourceVersion": str(version)} | ({"continue": rest} if rest else {})
        if self.compactions and not rest:
            self.compactions -= 1
            self.forget()
        _whole(writer, 200, {"kind": "List", "metadata": meta, "items": things[start : start + size] or None})

    def _watch(self, path: str, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        since, selector = int(query["resourceVersion"]), query.get("labelSelector", "")
        gone = since < self.oldest
        if gone and not self.gone_as_event:
            _whole(writer, 410, _status(410, f"too old resource version: {since} ({self.oldest})"))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
        if gone:
            self._line(writer, {"type": "ERROR", "object": _status(410, f"too old resource version: {since}")})
            writer.write(b"0\r\n\r\n")
            return
        for version, watched, _, event in self._history:
            if version > since and watched == path and _fits(event["object"], selector):
                self._line(writer, event)
        self._watches[writer] = (path, selector)


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _whole(writer: asyncio.StreamWriter, status: int, body: Json) -> None:
    raw = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(raw), raw))


def _status(code: int, message: str) -> Json:
    return {"kind": "Status", "status": "Failure", "message": message, "reason": "Expired", "code": code}


def _fits(thing: Json, selector: str) -> bool:
    labels = thing["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, _, value in (part.partition("=") for part in selector.split(",")))


def pod(name: str, ip: str | None, *, listens: int = 8000, ready: bool = True, **annotations: str) -> Json:
    """A running pod with the label `app=vllm`."""
    return {
        "metadata": {
            "name": name,
            "labels": {"app": "vllm"},
            "annotations": {f"kvgate.io/{key.replace('_', '-')}": value for key, value in annotations.items()},
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "http", "containerPort": listens}]}]},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            **({} if ip is None else {"podIP": ip}),
        },
    }


def terminating(thing: Json) -> Json:
    """The same pod, about to end: it is still ready at first."""
    ending = copy.deepcopy(thing)
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return ending


def endpoint(name: str, ip: str, *, ready: bool | None = True, terminating: bool | None = None) -> Json:
    """One entry of a slice."""
    conditions = {"ready": ready, "serving": ready, "terminating": terminating}
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


def endpoint_slice(name: str, endpoints: list[Json] | None, *, family: str = "IPv4", port: int = 8000) -> Json:
    """A slice of the Service `vllm`, which has a label for kvgate."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": "vllm", "kvgate.io/pool": "gold"}},
        "addressType": family,
        "endpoints": endpoints,
        "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": port}],
    }


@asynccontextmanager
async def kube() -> AsyncIterator[Kube]:
    """Serves until the context ends."""
    api = Kube()
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0)
    api.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield api
    finally:
        api.cut()
        server.close()
        await server.wait_closed()
