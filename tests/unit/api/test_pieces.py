"""A long body means what a short one means: its fields are read one by one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api import parse_request
from gateway.errors import BadRequest
from gateway.records import Endpoint, InferenceRequest

PADDING = "x" * ((1 << 20) + 1)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "caf\u00e9 \U0001f600"},
    {"role": "user", "content": [{"type": "text", "text": "12345678901234567890123"}], "n": 12345678901234567890123},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [1.0, None]}}}]


def both(body: bytes, endpoint: Endpoint = Endpoint.CHAT) -> list[InferenceRequest | BadRequest]:
    """What is made of a body, and of the same with a long field nobody reads."""
    padded = body.rstrip()[:-1] + b',"padding":"%b"}' % PADDING.encode()
    found: list[InferenceRequest | BadRequest] = []
    for raw in (body, padded):
        try:
            request = parse_request(endpoint, raw, request_id="r", affinity_field="user")
        except BadRequest as error:
            found.append(error)
        else:
            assert request.body_bytes == len(raw)
            found.append(replace(request, body_bytes=0))
    return found


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("endpoint", list(Endpoint), ids=str)
def test_every_field_is_read_as_in_a_short_body(endpoint: Endpoint, ascii_only: bool) -> None:
    body = {
        "model": "m", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "auto", "prompt": [[1, 2], [3]], "text": "t",
        "input": "i", "instructions": "be brief", "system": "s", "stream": True, "priority": -2, "user": "alice",
        "stream_options": {"include_usage": True, "x": 1}, "cache_salt": "salt", "extra_key": "k", "n": 2,
        "max_tokens": 7, "max_completion_tokens": 8, "max_output_tokens": 9,
        "sampling_params": {"n": 3, "max_new_tokens": 4},
        "lora_path": ["a"], "session_id": "s", "chat_template_kwargs": {"a": 1}, "documents": [{"d": 1}],
        "reasoning_effort": "low", "add_generation_prompt": False, "continue_final_message": True,
    }  # fmt: skip
    short, long = both(json.dumps(body, ensure_ascii=ascii_only).encode(), endpoint)
    assert isinstance(short, InferenceRequest)
    assert short == long


@pytest.mark.parametrize(
    "fragment",
    [
        b'"messages":[{"role":"user","content":"a"}],"messages":[{"role":"user","content":"b"}]',
        b'"mess\\u0061ges":[{"role":"user","content":"a"}]',
        b'"messages": [ {"role":"user","content":"a","v":1e999} ] ,"x":1e999',
        b'"messages":[{"role":"user","content":"\\ud800"}]',
        b'"messages":[{"role":"user","content":"a"}],"x":NaN',
        b'"messages":{}',
        b'"messages":[]',
        b'"messages":["a"]',
        b'"messages":null',
        b'"messages":[{"role":"user","content":"a"}],"x":[1,]',
        b'"messages":[{"role":"user","content":"\xff"}]',
        b'"messages":[{"role":"user","content":"a"}],"x":"\xff"',
        b'"messages":[{"role":"user","content":"a"}],"n":' + b"1" * 5000,
        b'"messages":[{"role":"user","content":"a"}],"x":' + b"[" * 100_000 + b"]" * 100_000,
        b'"messages":[{"role":"user","content":"a"}],"stream":"yes"',
    ],
    ids=lambda fragment: repr(fragment[:60]),
)
def test_odd_bodies_are_taken_or_refused_alike(fragment: bytes) -> None:
    short, long = both(b'{"model":"m",' + fragment + b"}")
    if isinstance(short, BadRequest):
        assert isinstance(long, BadRequest)
        assert (short.code, short.param) == (long.code, long.param)
    else:
        assert short == long


@pytest.mark.parametrize("body", [b"[", b'["', b'"'])
def test_long_bodies_that_are_no_objects(body: bytes) -> None:
    end = {b"[": b"1]", b'["': b'"]', b'"': b'"'}[body]
    with pytest.raises(BadRequest):
        parse_request(Endpoint.CHAT, body + PADDING.replace("x", " ").encode() + end, request_id="r")
