"""Bodies of Messages and Responses -> chats, by hand after vLLM's conversion."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api import parse_request
from gateway.prefix.text import text_blocks
from gateway.records import ChatPrompt, Endpoint, EngineKind, NoPrompt, Prompt

VLLM = frozenset({EngineKind.VLLM})
MARK = {"cache_control": {"type": "ephemeral"}}


def prompt(endpoint: Endpoint, **fields: Any) -> Prompt:
    return parse_request(endpoint, json.dumps({"model": "m"} | fields).encode(), request_id="r").prompt


def chat(endpoint: Endpoint, **fields: Any) -> ChatPrompt:
    found = prompt(endpoint, **fields)
    assert isinstance(found, ChatPrompt)
    return found


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def test_an_agents_messages() -> None:
    schema = {"properties": {"path": {"type": "string"}}}
    found = chat(
        Endpoint.MESSAGES,
        max_tokens=5,
        system=[text("You code."), text(" Be brief.", **MARK)],
        tools=[
            {"name": "read", "input_schema": schema, **MARK},
            {"name": "ls", "description": "d", "input_schema": {"type": "object"}},
        ],
        tool_choice={"type": "auto"},
        chat_template_kwargs={"a": 1},
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("I look."),
                    {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a", "n": 1}},
                    {"type": "tool_use", "id": "c2", "name": "ls", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [text("one"), text("two")]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "three", "is_error": True, **MARK},
                    text(""),
                    text("go"),
                    text("on", **MARK),
                ],
            },
            {"role": "user", "content": [text("now")]},
        ],
    )
    call = {"type": "function"}
    assert found == ChatPrompt(
        messages=[
            {"role": "system", "content": "You code. Be brief."},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "reasoning": "hm",
                "content": "I look.",
                "tool_calls": [
                    call | {"id": "c1", "function": {"name": "read", "arguments": {"path": "a", "n": 1}}},
                    call | {"id": "c2", "function": {"name": "ls", "arguments": {}}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "one\ntwo"},
            {"role": "tool", "tool_call_id": "c2", "content": "three"},
            {"role": "user", "content": [text("go"), text("on")]},
            {"role": "user", "content": "now"},
        ],
        tools=[
            call | {"function": {"name": "read", "description": None, "parameters": schema | {"type": "object"}}},
            call | {"function": {"name": "ls", "description": "d", "parameters": {"type": "object"}}},
        ],
        template_kwargs={"a": 1},
        exact_for=VLLM,
    )


def test_results_alone_are_no_turn_of_the_user() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": None}
    assert chat(Endpoint.MESSAGES, messages=[{"role": "user", "content": [result]}]).messages == [
        {"role": "tool", "tool_call_id": "c", "content": ""}
    ]


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [HI, {"role": "assistant", "content": "go on with"}]},
        {"messages": [HI, {"role": "system", "content": "in the middle"}, HI]},
        {"messages": [{"role": "ctx", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": []}, HI]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": {}}]}, HI]},
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{}]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [HI], "thinking": {"type": "enabled", "budget_tokens": 9}},
        {"messages": [HI], "output_config": {"effort": "low"}},
        {"messages": [HI], "system": [text("x-anthropic-billing-header: a"), text("You code.")]},
        {"messages": [HI], "system": "x-anthropic-billing-header: a\nYou code."},
        {"messages": [HI], "tools": [{"name": "x", "input_schema": {}, "strict": True}]},
        {"messages": [HI], "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    ],
    ids=str,
)
def test_messages_that_releases_convert_in_other_ways_are_exact_for_nobody(fields: dict[str, Any]) -> None:
    assert chat(Endpoint.MESSAGES, **fields).exact_for == frozenset()


def test_input_and_instructions() -> None:
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}
    assert chat(
        Endpoint.RESPONSES, instructions="Be brief.", input="hi", truncation="disabled", tools=[]
    ) == ChatPrompt(messages=[system, user], exact_for=VLLM)
    said = [{"type": "output_text", "text": "yes", "annotations": []}]
    parts = [{"type": "input_text", "text": "and?"}]
    items = [
        {"type": "message", "role": "developer", "content": "d"},
        user,
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": said},
        {"role": "user", "content": parts},
    ]
    assert chat(Endpoint.RESPONSES, instructions="", input=items).messages == [
        {"role": "developer", "content": "d"},
        user,
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": parts},
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        {"input": [HI, {"role": "assistant", "content": "go", "status": "incomplete"}]},
        {"input": [HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"input": "x", "tools": [{"type": "function", "name": "f"}]},
        {"input": "x", "reasoning": {"effort": "low"}},
        {"input": "x", "truncation": "auto"},
    ],
    ids=str,
)
def test_responses_that_releases_convert_in_other_ways_are_exact_for_nobody(fields: dict[str, Any]) -> None:
    assert chat(Endpoint.RESPONSES, **fields).exact_for == frozenset()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"input": "x", "previous_response_id": "r"}, "session"),
        ({"input": "x", "conversation": {"id": "c"}}, "session"),
        ({"prompt": {"id": "p"}}, "session"),
        ({"input": []}, "malformed"),
        ({}, "malformed"),
        ({"input": ["x"]}, "malformed"),
        ({"input": "x", "instructions": ["y"]}, "malformed"),
    ],
    ids=str,
)
def test_responses_without_a_prompt(fields: dict[str, Any], reason: str) -> None:
    assert prompt(Endpoint.RESPONSES, **fields) == NoPrompt(reason)


def test_a_mark_that_wanders_through_the_turns_changes_no_text() -> None:
    def keys(mark: dict[str, Any], *more: dict[str, Any]) -> list[int]:
        result = {"type": "tool_result", "tool_use_id": "c", "content": "x" * 2000}
        turns = [{"role": "system", "content": "in place"}, {"role": "user", "content": [result | mark]}, *more]
        found = chat(Endpoint.MESSAGES, messages=turns)
        (chain,) = text_blocks(found, adapter=None, salt=None, bytes_a_token=4.0, reason="converted").chains
        return list(chain.keys)

    first, second = keys(MARK), keys({}, {"role": "user", "content": "y" * 2000})
    assert len(first) >= 7
    assert second[: len(first)] == first


NAMES = st.sampled_from(["type", "role", "content", "text", "id", "name", "input"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from([Endpoint.MESSAGES, Endpoint.RESPONSES]),
    st.dictionaries(st.sampled_from(["messages", "system", "tools", "input", "instructions"]), JSON, max_size=5),
)
def test_no_body_raises(endpoint: Endpoint, fields: dict[str, Any]) -> None:
    assert isinstance(prompt(endpoint, **fields), ChatPrompt | NoPrompt)
