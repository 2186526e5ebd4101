"""Bodies of any bytes: `parse_request` refuses or reads them, and reads them as the engines' own decoder does."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.api import ask_for_usage, parse_request
from gateway.errors import BadRequest
from gateway.records import Endpoint, InferenceRequest

FIELDS = (
    "model", "messages", "prompt", "text", "input", "input_ids", "stream", "stream_options", "max_tokens", "n",
    "tools", "documents", "chat_template_kwargs", "cache_salt", "priority", "sampling_params", "reasoning_effort",
    "truncate_prompt_tokens", "add_special_tokens", "session_id",
)  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**40), max_value=10**40)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["m", "user", "system", "none", "include_usage"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["role", "content", "include_usage"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=8)
endpoints = st.sampled_from(list(Endpoint))


def read(endpoint: Endpoint, body: bytes) -> InferenceRequest | BadRequest:
    try:
        return parse_request(endpoint, body, request_id="r", affinity_field="session_id")
    except BadRequest as error:
        return error


@given(endpoints, st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(endpoint: Endpoint, body: bytes) -> None:
    result = read(endpoint, body)
    if isinstance(result, BadRequest):
        assert result.status == 400
        assert result.message


@given(endpoints, bodies, st.booleans())
def test_any_object_is_read_or_refused_with_a_field(endpoint: Endpoint, fields: dict[str, Any], ascii: bool) -> None:
    result = read(endpoint, json.dumps(fields, ensure_ascii=ascii).encode("utf-8", "surrogatepass"))
    if isinstance(result, BadRequest) and result.code != "invalid_json":
        assert result.param is not None


@given(values)
@example(123456789012345678901234567890)
@example([1e22, -0.0, 5e-324, 1.7976931348623157e308])
def test_values_are_those_of_the_engines_decoder(value: object) -> None:
    """Also through the fast decoder: what a template shows of tools must be what the engine shows."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"value": value}]})
    result = read(Endpoint.CHAT, body.encode())
    assert isinstance(result, InferenceRequest)
    assert repr(result.prompt.tools) == repr(json.loads(body)["tools"])  # type: ignore[union-attr]


@given(
    st.dictionaries(st.text(max_size=4).filter(lambda name: name not in FIELDS), values, max_size=4),
    st.none() | st.dictionaries(st.text(max_size=4), values, max_size=3),
    st.none() | st.booleans(),
    st.text(alphabet=" \t\r\n", max_size=4),
    st.booleans(),
)
def test_asking_for_usage_keeps_every_other_byte(
    extra: dict[str, Any], options: dict[str, Any] | None, include: bool | None, blanks: str, ascii: bool
) -> None:
    if options is not None and include is not None:
        options["include_usage"] = include
    fields = {**extra, "model": "m", "messages": [{"role": "user", "content": "}"}], "stream": True}
    if options is not None:
        fields["stream_options"] = options
    body = (json.dumps(fields, ensure_ascii=ascii) + blanks).encode("utf-8", "surrogatepass")
    request = read(Endpoint.CHAT, body)
    if isinstance(request, BadRequest):  # a lone surrogate that is not escaped
        assert request.code == "invalid_json"
        return
    changed = ask_for_usage(body, request)
    if request.usage_asked:
        assert changed is body
        return
    # One piece was put in before the last brace.
    end = body.rindex(b"}")
    assert changed.startswith(body[:end])
    assert changed.endswith(body[end:])
    again = json.loads(changed)
    assert repr(again) == repr({**fields, "stream_options": {**(options or {}), "include_usage": True}})
    assert parse_request(Endpoint.CHAT, changed, request_id="r").usage_asked
