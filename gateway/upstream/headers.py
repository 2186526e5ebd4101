"""Header hygiene in both directions, as bytes.

Rules:
1. Hop-by-hop headers (RFC 9110 7.6.1) end here, both ways, and so do those that a `Connection` header names.
2. `x-kvgate-*` is ours: a client cannot send it to a worker, a worker cannot send it to a client. Nor can a worker say
   which web pages may read an answer (`access-control-*`): it does not know who asks.
3. Which data-parallel rank serves a request is the gateway's choice: a client's own header for it is dropped.
   Every other header passes byte for byte.
4. `accept-encoding` is not passed on: the usage is read from the plain body, and between gateway and worker
   compression costs more than it saves.
5. Credentials go to a worker only when the gateway has no API keys of its own: then they are the worker's. A worker's
   own key replaces them.
6. The length is stated anew: a request always goes out with `content-length`, an answer with the framing its client
   can read.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from http import HTTPStatus
from typing import NamedTuple

Headers = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
_CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Of OpenAI's, Anthropic's and Azure's clients."""

_NOT_TO_WORKER = (HOP_BY_HOP | _CREDENTIALS) | {
    b"accept-encoding",
    b"content-length",
    b"expect",
    b"host",
    b"x-data-parallel-rank",
    b"x-override-routed-dp-rank",
    b"x-request-id",
}
_NOT_TO_CLIENT = HOP_BY_HOP | {b"content-length"}
EVENT_STREAM = b"text/event-stream"
BODYLESS = frozenset((204, 304))
_OURS = b"x-kvgate-"
_NOT_A_WORKERS = (_OURS, b"access-control-")
_HARMLESS_TOKENS = frozenset((b"close", b"keep-alive", b""))


def _status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    return b"HTTP/1.1 %d %b\r\n" % (status, phrase.encode())


STATUS_LINES = {status: _status_line(status) for status in range(100, 1000)}


class RequestHead(NamedTuple):
    """What of a client's request head goes to a worker, whichever it will be.

    `target` is path and query, `fields` the header lines, `credentials` those the client identifies itself with.
    """

    target: bytes
    fields: bytes
    credentials: bytes

    def to_worker(self, host: bytes, credentials: bytes, body_length: int, *, rank: bytes = b"") -> bytes:
        """The request head for one worker: `credentials` (a whole header line) replace the client's when not empty,
        `rank` is the header line that names its data-parallel rank."""
        return b"POST %b HTTP/1.1\r\nhost: %b\r\n%b%b%bcontent-length: %d\r\n\r\n" % (
            self.target,
            host,
            self.fields,
            credentials or self.credentials,
            rank,
            body_length,
        )


def request_head(
    target: bytes,
    headers: Headers,
    *,
    request_id: bytes,
    credentials_end_here: bool = False,
    traceparent: bytes = b"",
) -> RequestHead:
    """Header names must be in lower case, as the edge collects them. `credentials_end_here`: they were meant for the
    gateway. `traceparent` takes the place of the client's, when not empty."""
    lines = [b"x-request-id: ", request_id, b"\r\n"]
    if traceparent:
        headers = [*(field for field in headers if field[0] != b"traceparent"), (b"traceparent", traceparent)]
    credentials: list[bytes] = []
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        if name in _NOT_TO_WORKER:
            if name in _CREDENTIALS:
                if not credentials_end_here:
                    credentials += (name, b": ", value, b"\r\n")
            elif name == b"connection":
                named |= _named(value)
        elif not name.startswith(_OURS):
            lines += (name, b": ", value, b"\r\n")
    if named:
        lines = lines[:3] + _without(lines[3:], named)
        credentials = _without(credentials, named)
    return RequestHead(target, b"".join(lines), b"".join(credentials))


class Framing(Enum):
    """How the end of a body is marked."""

    LENGTH = "content-length"
    CHUNKED = "chunked"
    CLOSE = "connection close"
    NONE = "no body"


class AnswerHead(NamedTuple):
    """Status and headers of a worker's answer, names as the worker wrote them."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def is_busy(self) -> bool:
        """The worker has no room now, which is no failure: 429, or 503 that says when to come again."""
        return self.status == 429 or (
            self.status == 503 and any(name.lower() == b"retry-after" for name, _ in self.headers)
        )


class AnswerFields(NamedTuple):
    """A worker's answer head, sorted: header lines for the client, and what decides how the body is relayed."""

    lines: bytes
    content_type: bytes
    content_length: bytes | None
    transfer_coding: bytes
    has_retry_after: bool


def answer_fields(headers: Headers, *, without_request_id: bool) -> AnswerFields:
    """Sort an answer's headers. `without_request_id` drops the worker's own, for when the gateway writes one."""
    lines: list[bytes] = []
    content_type = b""
    content_length: bytes | None = None
    coding = b""
    retry_after = False
    named: frozenset[bytes] = frozenset()
    for name, value in headers:
        lower = name.lower()
        if lower in _NOT_TO_CLIENT:
            if lower == b"content-length":
                content_length = value
            elif lower == b"transfer-encoding":
                coding = b", ".join(filter(None, (coding, value.strip().lower())))
            elif lower == b"connection":
                named |= _named(value)
            continue
        if lower.startswith(_NOT_A_WORKERS) or (without_request_id and lower == b"x-request-id"):
            continue
        if lower == b"content-type":
            content_type = value
        elif lower == b"retry-after":
            retry_after = True
        lines += (name, b": ", value, b"\r\n")
    if named:
        lines = _without(lines, named)
    return AnswerFields(b"".join(lines), content_type, content_length, coding, retry_after)


def is_event_stream(answer: AnswerHead) -> bool:
    """A successful answer whose body is a stream of events."""
    return 200 <= answer.status < 300 and any(
        name.lower() == b"content-type" and value.lower().startswith(EVENT_STREAM) for name, value in answer.headers
    )


def ends_with_connection(answer: AnswerHead) -> bool:
    """The answer's body has neither a length nor chunks: it ends where the connection does (RFC 9112 6.3)."""
    names = {name.lower() for name, _ in answer.headers}
    return answer.status not in BODYLESS and not names & {b"content-length", b"transfer-encoding"}


def _named(value: bytes) -> frozenset[bytes]:
    """Header names that the value of a `Connection` header declares hop-by-hop."""
    if value.lower() in _HARMLESS_TOKENS:
        return frozenset()
    return frozenset(token.strip().lower() for token in value.split(b",")) - _HARMLESS_TOKENS


def _without(lines: list[bytes], named: frozenset[bytes]) -> list[bytes]:
    """Header lines (name, colon, value, end) without those of the given names."""
    return [part for at in range(0, len(lines), 4) if lines[at].lower() not in named for part in lines[at : at + 4]]
