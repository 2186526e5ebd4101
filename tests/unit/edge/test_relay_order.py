"""What a client waits for comes first."""

from __future__ import annotations

from gateway.edge.relay import Relay
from gateway.errors import GatewayError
from gateway.records import Endpoint
from gateway.upstream.headers import AnswerHead


class Owner:
    """Writes down what it hears."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def first_byte(self, now: float) -> None:
        self._heard.append("first byte")

    def answered(self, now: float) -> None:
        self._heard.append("answered")

    def broken(self, error: GatewayError, *, told: bool, now: float) -> None:
        raise AssertionError(error)

    def reader_stalled(self, now: float) -> None:
        raise AssertionError("nobody stalls")


def test_the_first_bytes_are_sent_before_what_follows_from_them() -> None:
    heard: list[str] = []
    relay = Relay(
        Owner(heard),
        lambda data: heard.append("sent"),
        AnswerHead(200, [(b"content-type", b"application/json"), (b"content-length", b"4")]),
        endpoint=Endpoint.CHAT,
        receipts=b"",
        hide_usage=False,
        http_1_0=False,
        keep_alive=True,
    )
    relay.on_first(b"null", 1, 1.0)
    relay.on_end(2.0)
    assert heard == ["sent", "first byte", "answered"]
    assert relay.first_byte_at == 1.0
