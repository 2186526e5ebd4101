"""Control traffic: small requests to workers, for probes and load polls. Inference never goes this way.

Rules:
1. One call has one deadline over everything (connect, wait, read), so a worker that trickles bytes costs no more
   than one that is silent.
2. An answer is read up to `max_bytes`; a worker that sends more is at fault.
3. Each worker has its own connections without a shared limit, so a hanging worker delays nobody else.
4. A worker that may not be there is knocked at first: that finds nobody at a tenth of what a request costs.
5. Every failure is a `ProbeFailed` whose message names the address and the likely fix.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from gateway.errors import GatewayError

MAX_ANSWER_BYTES = 8 * 1024 * 1024
"""Largest known answers: `/metrics` of SGLang with 92 KB a scheduler, `/server_info` with 37 KB."""


GATEWAYS_HEADER = "x-kvgate-gateways"
"""In answers of a gateway: its own name for this run, then those of the gateways that its workers are, and theirs. A
gateway that finds itself there would send requests round in a circle."""


MOST_GATEWAYS = 64
"""Names that are read from that header, and sent in it."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A gateway's name; others are none: what a worker says there goes on to whoever asks this gateway."""


class ProbeFailed(GatewayError):
    """A worker could not be asked. For operators: the message holds the address and what to do about it."""

    status = 502
    type = "upstream_error"
    code = "probe_failed"

    def __init__(self, message: str, *, away: bool = False) -> None:
        """`away`: nobody listens at the worker's address."""
        super().__init__(message)
        self.away = away


class LoopsBack(ProbeFailed):
    """Requests to this worker would come back to this gateway, directly or over `gateways`."""

    status = 422
    type = "invalid_request_error"
    code = "worker_is_this_gateway"

    def __init__(self, message: str, gateways: tuple[str, ...]) -> None:
        super().__init__(message)
        self.param = "url"
        self.gateways = gateways


class Answer(NamedTuple):
    """Status and whole body of an answer, whatever the status is; `date` is its header of that name, `gateways` those
    behind the address (`GATEWAYS_HEADER`)."""

    status: int
    body: bytes
    date: str | None = None
    gateways: tuple[str, ...] = ()


class ControlClient:
    """Requests over one httpx client; made by `open_control_client`, shared by all probes and polls."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        *,
        timeout_s: float = 5.0,
        max_bytes: int = MAX_ANSWER_BYTES,
        tls: ssl.SSLContext | None = None,
        connect: Callable[[str, int], Awaitable[None]] | None = None,
        own: str | None = None,
    ) -> None:
        """`tls` is for those who keep a connection of their own (`poll_line`); `connect` connects to a host and port
        and hangs up, None where `http` does not use the network; `own` is the name of the gateway that asks."""
        self.tls = tls
        self.own = own
        self._connect = connect
        self._http = http
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes

    async def knock(self, url: str) -> None:
        """Connect and hang up. Raises ProbeFailed when nobody listens there (`away`), or not within the deadline."""
        if self._connect is None:
            return
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._connect(parts.hostname or "", port)
        except TimeoutError as error:
            raise _no_answer(url, self._timeout_s) from error
        except (OSError, UnicodeError) as error:  # the second: a name that cannot be one
            raise _no_connection(url, error) from error

    async def get(self, url: str, *, api_key: str | None = None, timeout_s: float | None = None) -> Answer:
        """Any answer is returned, also 4xx and 5xx. Raises ProbeFailed: no connection (`away`), deadline, too large."""
        return await self._ask("GET", url, None, api_key, timeout_s, {})

    async def post(
        self,
        url: str,
        body: bytes,
        *,
        api_key: str | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """The same with a JSON body; `headers` are sent too."""
        return await self._ask("POST", url, body, api_key, timeout_s, headers or {})

    async def _ask(
        self,
        method: str,
        url: str,
        body: bytes | None,
        api_key: str | None,
        timeout_s: float | None,
        more: Mapping[str, str],
    ) -> Answer:
        # Identity: compressing 65 KB of metrics costs the worker more than sending them.
        headers = {"accept-encoding": "identity", **more}
        if body is not None:
            headers["content-type"] = "application/json"
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with (
                asyncio.timeout(limit_s),
                self._http.stream(method, url, headers=headers, content=body) as response,
            ):
                body, said = await self._body(response, url), response.headers
                return Answer(response.status_code, body, said.get("date"), _names(said.get(GATEWAYS_HEADER, "")))
        except TimeoutError as error:
            raise _no_answer(url, limit_s) from error
        except httpx.InvalidURL as error:
            raise ProbeFailed(f"{url} is no usable address ({error}); write it as http://host:port") from error
        except httpx.UnsupportedProtocol as error:
            raise ProbeFailed(f"{url} does not start with http:// or https://") from error
        except httpx.ConnectError as error:
            raise _no_connection(url, error) from error
        except httpx.HTTPError as error:
            raise ProbeFailed(
                f"{url} broke off the answer ({type(error).__name__}: {error}); is this an HTTP server?"
            ) from error

    async def _body(self, response: httpx.Response, url: str) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_bytes():
            size += len(part)
            if size > self._max_bytes:
                raise ProbeFailed(f"{url} answered more than {self._max_bytes} bytes; is this an inference worker?")
            parts.append(part)
        return b"".join(parts)


class Turnstile:
    """Lets few begin at a time, so that a thousand that begin at once do not take the event loop for themselves. Who is
    inside for longer than `young_s` does not count any more: those that wait for an answer keep nobody out."""

    def __init__(self, places: int, *, young_s: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._young_s = young_s

    @contextlib.asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Waits for a place."""
        await self._places.acquire()
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._young_s, leave)
        try:
            yield
        finally:
            timer.cancel()
            leave()


def _names(header: str) -> tuple[str, ...]:
    return tuple(name for part in header.split(",")[:MOST_GATEWAYS] if _NAME.fullmatch(name := part.strip()))


async def _connect(host: str, port: int) -> None:
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)
    transport.close()


def _no_answer(url: str, limit_s: float) -> ProbeFailed:
    return ProbeFailed(f"{url} did not answer within {limit_s:g} s; is the worker overloaded or stuck?")


def _no_connection(url: str, error: Exception) -> ProbeFailed:
    return ProbeFailed(
        f"no connection to {url} ({error}); is the worker running, and are host, port and TLS right?", away=True
    )


@contextlib.asynccontextmanager
async def open_control_client(
    *,
    timeout_s: float = 5.0,
    max_bytes: int = MAX_ANSWER_BYTES,
    tls: ssl.SSLContext | bool = True,
    own: str | None = None,
) -> AsyncIterator[ControlClient]:
    """The client for the life of the process. Proxies and netrc of the environment are not used: only the
    configuration decides where traffic goes. `tls` is httpx's `verify`."""
    # None is kept: engines close an idle connection after 5 s, sooner than it is wanted again, and the client's pool
    # looks at all kept ones for each request, once for each of them.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(
        limits=limits, timeout=None, verify=tls, trust_env=False, follow_redirects=False
    ) as http:
        context = tls if isinstance(tls, ssl.SSLContext) else None
        yield ControlClient(http, timeout_s=timeout_s, max_bytes=max_bytes, tls=context, connect=_connect, own=own)
