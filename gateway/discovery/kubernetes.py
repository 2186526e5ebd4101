"""Workers that run in Kubernetes: a list of the objects, then a watch from there, for as long as it runs.

Rules:
1. Whatever ends a watch (its time, a cut, 410 Gone as an answer or as an event, a line that cannot be read), the next
   step is a new list: what is gone meanwhile is missing there. So each watch's time, `resync_s`, is also the period of
   a full resync.
2. A list is asked for without a version, so that no server answers from an old cache; it comes in parts, and counts
   when the last part is there.
3. A list that fails is told and tried again, ever later, up to `_LONGEST_PAUSE_S`. A watch that ended is told when the
   list behind it fails too: API servers end watches all the time.
4. A connection that dies in silence is found by TCP's own probes.
5. Events of a watch are told together, `_TOGETHER_S` after the first: a rollout of hundreds of pods is thousands of
   events, and each list is compared as a whole.
6. The token is read again for each request: it changes every hour.

API: https://kubernetes.io/docs/reference/using-api/api-concepts/ (lists in parts, efficient detection of changes).
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import structlog

from gateway.discovery.kube_objects import MOST_OBJECTS, Happened, Kind, KubeTraits, KubeView
from gateway.discovery.source import Publish
from gateway.errors import UNREADABLE

_PART = 500
"""Objects asked for at a time, as kubectl does."""
_MOST_BYTES = 16 * 1024 * 1024
"""Longest part of a list or line of a watch; a single object has at most 1.5 MB there."""
_ANSWER_S = 30.0
_CONNECT_S = 5.0
_SPARE_S = 15.0
"""A watch ends by itself after the time asked for; this much later it is cut."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_LONGEST_BLIND_S = 2.0
"""Longest pause behind a list that could be read: nothing is seen between a watch and the next list."""
_CALM_S = 5.0
"""A watch that held this long makes the next pause the first one again."""
_TOGETHER_S = 0.05
_GONE = 410
_TOKEN = re.compile(rb"[\x21-\x7e]+")
_KEEP_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, option), value)
        for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if option in socket.__all__  # not on every system
    ),
)
"""Half a minute of silence on the wire and the connection is lost."""


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Where the API server is and who we are: `token_file` holds a bearer token, `ca_file` the authorities (PEM) it is
    believed by, None for the system's."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None


@dataclass(frozen=True, slots=True)
class KubeQuery:
    """Which objects: `kind` in `namespace` with labels that fit `selector`."""

    kind: Kind
    namespace: str
    selector: str
    traits: KubeTraits
    resync_s: float = 300.0


class _Refused(Exception):
    """The API server answered something else than objects."""


class _Expired(Exception):
    """What was asked for is too old for the API server (410)."""


class KubernetesSource:
    """One namespace's workers."""

    name = "kubernetes"

    def __init__(self, server: ApiServer, query: KubeQuery, *, rng: Random) -> None:
        self._server = server
        self._query = query
        self._rng = rng
        self._view = KubeView(query.traits)
        self._problems: list[str] = []
        self._pause_s = _FIRST_PAUSE_S
        self._log = structlog.get_logger("kvgate.kubernetes")
        self.lists = 0
        """Lists read to their end."""

    @property
    def looks_for(self) -> tuple[ApiServer, KubeQuery]:
        """Whom it asks, and what for."""
        return self._server, self._query

    async def run(self, publish: Publish) -> None:
        """Never returns."""
        while True:
            try:
                http = await self._client()
            except OSError as error:  # the file of the authorities; ssl.SSLError is one
                publish.failed(f"{self._server.ca_file} cannot be used: {error.strerror or error}")
                await self._pause()
                continue
            async with http:
                while True:
                    await self._list_and_watch(http, publish)
                    await self._pause()

    async def _pause(self) -> None:
        await asyncio.sleep(self._pause_s * self._rng.uniform(0.5, 1.5))
        self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)

    async def _list_and_watch(self, http: httpx.AsyncClient, publish: Publish) -> None:
        """Until something ends it."""
        try:
            version = await self._list(http, publish)
        except (httpx.HTTPError, OSError, TimeoutError, *UNREADABLE, _Refused, _Expired) as error:
            publish.failed(f"{self._server.url}: {str(error) or type(error).__name__}")
            return
        began = asyncio.get_running_loop().time()
        try:
            await self._watch(http, version, publish)
        except (httpx.HTTPError, OSError, TimeoutError, *UNREADABLE, _Refused, _Expired) as error:
            self._log.info("watch ended", reason=str(error) or type(error).__name__)
        calm = asyncio.get_running_loop().time() - began >= _CALM_S
        self._pause_s = _FIRST_PAUSE_S if calm else min(self._pause_s, _LONGEST_BLIND_S)

    async def _list(self, http: httpx.AsyncClient, publish: Publish) -> str:
        """Read all objects; the version to watch from."""
        query, objects = self._query, []
        params = {"labelSelector": query.selector, "limit": str(_PART)}
        while True:
            async with asyncio.timeout(_ANSWER_S), self._stream(http, params) as response:
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > _MOST_BYTES:
                        raise _Refused(f"a list of more than {_MOST_BYTES} bytes")
            page = query.kind.page(bytes(body))
            objects += page.objects
            if len(objects) > MOST_OBJECTS:
                raise _Refused(f"more than {MOST_OBJECTS} {query.kind.resource} have these labels; name more labels")
            if not page.rest:
                break
            params["continue"] = page.rest
        self._view.replace(objects)
        self.lists += 1
        self._publish(publish)
        return page.version

    async def _watch(self, http: httpx.AsyncClient, version: str, publish: Publish) -> None:
        query = self._query
        for_s = query.resync_s * self._rng.uniform(0.9, 1.1)
        params = {
            "labelSelector": query.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(for_s))),
        }
        due: asyncio.TimerHandle | None = None

        def tell() -> None:
            nonlocal due
            due = None
            self._publish(publish)

        try:
            async with asyncio.timeout(for_s + _SPARE_S), self._stream(http, params) as response:
                async for line in _lines(response):
                    event = query.kind.event(line)
                    if event.status is not None:
                        raise _said(event)
                    if self._view.happened(event) and due is None:
                        due = asyncio.get_running_loop().call_later(_TOGETHER_S, tell)
        finally:
            if due is not None:
                due.cancel()
                tell()

    def _publish(self, publish: Publish) -> None:
        found, problems = self._view.found()
        publish.present(found)
        if problems != self._problems:
            self._problems = problems
            if problems:
                self._log.warning("annotations that cannot be read", problems=problems[:10], count=len(problems))

    def _stream(self, http: httpx.AsyncClient, params: dict[str, str]) -> _Stream:
        return _Stream(http, self._server, self._query, params)

    async def _client(self) -> httpx.AsyncClient:
        ca = self._server.ca_file
        verify = await asyncio.to_thread(ssl.create_default_context, cafile=ca) if ca is not None else True
        transport = httpx.AsyncHTTPTransport(verify=verify, trust_env=False, socket_options=_KEEP_ALIVE)
        # Nothing is read for a long time while nothing happens; every use has a limit of its own.
        timeout = httpx.Timeout(None, connect=_CONNECT_S)
        return httpx.AsyncClient(transport=transport, trust_env=False, timeout=timeout, follow_redirects=False)


class _Stream:
    """One request, and its answer when it is 200."""

    def __init__(self, http: httpx.AsyncClient, server: ApiServer, query: KubeQuery, params: dict[str, str]) -> None:
        self._http, self._server, self._query, self._params = http, server, query, params
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        server, query = self._server, self._query
        headers = {"accept": "application/json"}
        if server.token_file is not None:
            token = (await asyncio.to_thread(server.token_file.read_bytes)).strip()
            if _TOKEN.fullmatch(token) is None:
                # Not sent: what refuses such a header repeats it in its error.
                raise _Refused(f"{server.token_file} does not hold a token: one line of plain letters")
            headers["authorization"] = f"Bearer {token.decode()}"
        url = server.url + query.kind.path(query.namespace)
        request = self._http.build_request("GET", url, params=self._params, headers=headers)
        async with asyncio.timeout(_ANSWER_S):
            self._response = response = await self._http.send(request, stream=True)
        if response.status_code != 200:
            await response.aclose()
            raise _refusal(response.status_code, query)
        return response

    async def __aexit__(self, *_: object) -> None:
        if self._response is not None:
            await self._response.aclose()


def _refusal(status: int, query: KubeQuery) -> Exception:
    what = f"{query.kind.resource} of namespace {query.namespace}"
    match status:
        case 410:
            return _Expired("410 Gone")
        case 401:
            return _Refused("401: the token is not accepted; is it of this cluster, and does its file still exist?")
        case 403:
            return _Refused(f"403: may not list and watch {what}; give the service account a Role for that")
        case 404:
            return _Refused(f"404: knows no {what}; is this the API server?")
        case _:
            return _Refused(f"answered {status} when asked for {what}")


def _said(event: Happened) -> Exception:
    status = event.status
    assert status is not None
    if status.code == _GONE:
        return _Expired(status.message or "410 Gone")
    return _Refused(f"error {status.code} in a watch: {status.message[:200]}")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Whole lines only: what a cut leaves behind is no event."""
    rest = bytearray()
    async for part in response.aiter_bytes():
        rest += part
        if b"\n" not in part:
            if len(rest) > _MOST_BYTES:
                raise _Refused(f"a line of more than {_MOST_BYTES} bytes")
            continue
        *lines, last = bytes(rest).split(b"\n")
        rest = bytearray(last)
        for line in lines:
            if line.strip():
                yield line
