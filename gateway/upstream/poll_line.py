"""A kept connection for what is asked of a worker every second.

The general client costs 5 to 7 ms of CPU for such a GET in a process that does other things in between, this one half a
millisecond; at 64 workers that is a third of a core.

Rules:
1. One call at a time, with one deadline over everything; an answer is read up to `MAX_ANSWER_BYTES`.
2. A kept connection that turns out to be closed is opened anew, once, within the same call.
3. After any failure the connection is closed: the next call begins afresh.
"""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

import httptools

from gateway.upstream.control import MAX_ANSWER_BYTES, Answer, ProbeFailed

_READ_BYTES = 262_144


class _Collected:
    """Callbacks of the parser for one answer."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.whole = False
        self.status = 0
        self.keep_alive = False
        self.on_body = self._take
        self.parser = httptools.HttpResponseParser(self)

    def _take(self, data: bytes) -> None:
        self.parts.append(data)
        self.size += len(data)

    def on_message_complete(self) -> None:
        self.whole = True
        # Asked here: behind a chunked answer the parser has moved on to the next message.
        self.status = self.parser.get_status_code()
        self.keep_alive = self.parser.should_keep_alive()


class PollLine:
    """Asks one worker over one connection. `url` is its base URL; an `api_key` is sent as a bearer token; `tls` is for
    an https URL."""

    def __init__(self, url: str, *, api_key: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        encrypted = parts.scheme == "https"
        self._port = parts.port or (443 if encrypted else 80)
        # Never in the clear to a worker whose URL says https.
        self._tls = (tls or ssl.create_default_context()) if encrypted else None
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f" HTTP/1.1\r\nhost: {parts.netloc}\r\naccept-encoding: identity\r\n{key}\r\n"
        self._open: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, target: str, *, timeout_s: float) -> Answer:
        """Any answer is returned, whatever its status. Raises ProbeFailed: no connection (`away`), deadline, too large,
        no HTTP."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ask(f"GET {target}{self._head}".encode())
        except TimeoutError as error:
            self.close()
            raise ProbeFailed(
                f"{self._url}{target} did not answer within {timeout_s:g} s; is the worker overloaded or stuck?"
            ) from error
        except (OSError, EOFError, httptools.HttpParserError) as error:
            self.close()
            raise ProbeFailed(f"{self._url}{target} broke off the answer ({error}); is this an HTTP server?") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection; the next call opens one."""
        opened, self._open = self._open, None
        if opened is not None:
            opened[1].close()

    async def _ask(self, request: bytes) -> Answer:
        if self._open is not None:
            try:
                return await self._exchange(*self._open, request)
            except (OSError, EOFError):  # closed meanwhile, as servers do with idle connections
                self.close()
        try:
            self._open = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ProbeFailed(
                f"no connection to {self._url} ({error}); is the worker running, and are host, port and TLS right?",
                away=True,
            ) from error
        return await self._exchange(*self._open, request)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Answer:
        writer.write(request)
        answer = _Collected()
        while not answer.whole:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise EOFError("the connection ended")
            answer.parser.feed_data(data)
            if answer.size > MAX_ANSWER_BYTES:
                raise ProbeFailed(f"{self._url} answered more than {MAX_ANSWER_BYTES} bytes; is this a worker?")
        if not answer.keep_alive:
            self.close()
        return Answer(answer.status, b"".join(answer.parts))
