"""What `kvgate explain` makes of a body before it asks."""

from __future__ import annotations

import pytest

from gateway.cli.explain import path_for


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b'{"model": "m", "prompt": "hi"}', "/v1/completions"),
        (b'{"model": "m", "messages": [], "prompt": "hi"}', "/v1/chat/completions"),
        (b'{"model": "m", "messages": []}', "/v1/chat/completions"),
        (b"[1]", "/v1/chat/completions"),
        (b"no JSON", "/v1/chat/completions"),
    ],
)
def test_the_path_follows_from_the_body(body: bytes, path: str) -> None:
    assert path_for(body) == path
