"""Names of gateways in answers: this gateway sends them on, whoever wrote them."""

from __future__ import annotations

import httpx
import pytest

from gateway.upstream.control import GATEWAYS_HEADER, MOST_GATEWAYS, ControlClient


@pytest.mark.parametrize(
    ("said", "names"),
    [
        (None, ()),
        ("", ()),
        ("0123456789abcdef, fedcba9876543210", ("0123456789abcdef", "fedcba9876543210")),
        ("a,,b", ("a", "b")),
        (f"{'x' * 10_000},a", ("a",)),
        ("a b,<c>,d", ("d",)),
        (",".join(map(str, range(200))), tuple(map(str, range(MOST_GATEWAYS)))),
    ],
)
async def test_only_short_plain_words_are_names(said: str | None, names: tuple[str, ...]) -> None:
    headers = {} if said is None else {GATEWAYS_HEADER: said}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers))
    async with httpx.AsyncClient(transport=transport) as http:
        assert (await ControlClient(http).get("http://h:1/v1/models")).gateways == names
