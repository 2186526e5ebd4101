from __future__ import annotations

import json

import pytest

from gateway.api import ask_for_usage, parse_request
from gateway.records import Endpoint

HEAD = b'{"model":"m","messages":[{"role":"user","content":"}{"}],"stream":true'


def asked(body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> bytes:
    return ask_for_usage(body, parse_request(endpoint, body, request_id="r"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (HEAD + b"}", HEAD + b',"stream_options":{"include_usage":true}}'),
        (HEAD + b" } \r\n\t", HEAD + b' ,"stream_options":{"include_usage":true}} \r\n\t'),
        (
            HEAD + b',"stream_options": null}',
            HEAD + b',"stream_options": null,"stream_options":{"include_usage":true}}',
        ),
        (
            HEAD + b',"stream_options": {}}',
            HEAD + b',"stream_options": {},"stream_options":{"include_usage":true}}',
        ),
        (
            HEAD + b',"stream_options":{"include_usage": false, "continuous_usage_stats": false}}',
            HEAD + b',"stream_options":{"include_usage": false, "continuous_usage_stats": false}'
            b',"stream_options":{"include_usage": true, "continuous_usage_stats": false}}',
        ),
        (
            HEAD + b',"stream_\\u006fptions":{"x": 123456789012345678901234567890, "y": NaN}}',
            HEAD + b',"stream_\\u006fptions":{"x": 123456789012345678901234567890, "y": NaN}'
            b',"stream_options":{"x": 123456789012345678901234567890, "y": NaN, "include_usage": true}}',
        ),
    ],
)
def test_the_option_is_added_and_every_other_byte_stays(body: bytes, expected: bytes) -> None:
    changed = asked(body)
    assert changed == expected
    assert json.loads(changed)["stream_options"]["include_usage"] is True
    assert parse_request(Endpoint.CHAT, changed, request_id="r").usage_asked


@pytest.mark.parametrize(
    "body",
    [
        HEAD + b',"stream_options":{"include_usage":true}}',
        HEAD + b',"stream":false}',
        b'{"model":"m","messages":[{"role":"user","content":"x"}]}',
    ],
)
def test_the_body_itself_comes_back_when_there_is_nothing_to_ask(body: bytes) -> None:
    assert asked(body) is body


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (Endpoint.RESPONSES, b'{"model":"m","input":"x","stream":true}'),
        (Endpoint.MESSAGES, b'{"model":"m","messages":[],"stream":true}'),
        (Endpoint.GENERATE, b'{"text":"x","stream":true}'),
    ],
)
def test_endpoints_that_report_usage_anyway_are_left_alone(endpoint: Endpoint, body: bytes) -> None:
    assert asked(body, endpoint) is body
