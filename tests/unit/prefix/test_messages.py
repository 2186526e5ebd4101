from __future__ import annotations

from typing import Any

import pytest

from gateway.prefix.messages import ContentFormat, Message, Unrenderable, conversation
from gateway.records import EngineKind


def convert(
    *messages: dict[str, Any],
    parts: bool = False,
    engine: EngineKind = EngineKind.VLLM,
    keeps_developer: bool = False,
) -> list[Message]:
    content_format = ContentFormat.OPENAI if parts else ContentFormat.STRING
    return conversation(messages, content_format, engine=engine, keeps_developer=keeps_developer)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


PARTS = [text("one"), text(""), "two", {"type": "refusal", "refusal": None}, {"type": "thinking", "thinking": "three"}]


@pytest.mark.parametrize(
    ("content", "as_string", "as_parts"),
    [
        ("hi", "hi", [text("hi")]),
        ("", "", [text("")]),
        (None, "", []),
        ([], "", []),
        (PARTS, "one\ntwo\nthree", [text("one"), text(""), text("two"), text("three")]),
    ],
)
def test_content(content: object, as_string: str, as_parts: list[object]) -> None:
    message = {"role": "user", "content": content, "unknown": 1}
    assert convert(message) == [{"role": "user", "content": as_string}]
    assert convert(message, parts=True) == [{"role": "user", "content": as_parts}]


def test_sglang_joins_parts_with_a_blank() -> None:
    assert convert({"role": "user", "content": PARTS}, engine=EngineKind.SGLANG)[0]["content"] == "one two three"


def test_only_known_members_are_kept() -> None:
    message = {"role": "user", "content": "x", "name": "Ann", "tool_calls": [], "reasoning": "no", "tool_call_id": "c"}
    assert convert(message) == [{"role": "user", "content": "x", "name": "Ann"}]
    assert convert({"role": "tool", "content": "x", "tool_call_id": "c", "name": 5}) == [
        {"role": "tool", "content": "x", "tool_call_id": "c"}
    ]


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"b": 1, "a": 123456789012345678901234567890}', {"b": 1, "a": 123456789012345678901234567890}),
        ("", {}),
        ("  ", {}),
        ("{broken", {}),
        ("[1]", [1]),
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ('{"a": 1e999}', {"a": float("inf")}),
        ('"\ud800"', "\ud800"),
        (None, {}),
        (7, {}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_tool_calls(arguments: object, parsed: object) -> None:
    call = {"type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}, "id": "c1"}
    message: dict[str, Any] = convert({"role": "assistant", "content": None, "tool_calls": [call]})[0]
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "function": {"arguments": parsed, "name": "f"}, "type": "function"}],
    }
    (shown,) = message["tool_calls"]
    assert list(shown) == ["id", "function", "type"]
    assert list(shown["function"]) == ["arguments", "name"]


def test_the_request_is_not_changed() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    convert({"role": "assistant", "content": "x", "tool_calls": [call]})
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}


def test_empty_tool_calls_are_removed() -> None:
    nothing: tuple[object, ...] = ([], None)
    for calls in nothing:
        assert "tool_calls" not in convert({"role": "assistant", "content": "x", "tool_calls": calls})[0]


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_both_names(field: str) -> None:
    assert convert({"role": "assistant", "content": "x", field: "why"}) == [
        {"role": "assistant", "content": "x", "reasoning": "why", "reasoning_content": "why"}
    ]


def test_tool_results_are_strings_even_where_the_template_wants_parts() -> None:
    for content, shown in (("a", "a"), ([text("a"), text("b")], "a\nb"), (None, "")):
        assert convert({"role": "tool", "content": content}, parts=True)[0]["content"] == shown


def test_developer_messages() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "developer", "content": "b", "tools": [{"x": 1}]},
        {"role": "user", "content": "c"},
        {"role": "developer", "content": "d"},
    ]
    assert convert(*messages) == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    assert convert(*messages, parts=True)[0]["content"] == [text("a"), text("\n\n"), text("b")]
    assert convert(*messages, keeps_developer=True)[1] == {"role": "developer", "content": "b", "tools": [{"x": 1}]}


@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "image_pil"])
def test_media_are_not_text(part: str) -> None:
    for content in ([{"type": part, part: {"url": "x"}}], [{part: "x"}], [text("a"), {"type": part}]):
        with pytest.raises(Unrenderable, match="multimodal"):
            convert({"role": "user", "content": content})


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"role": None},
        {"role": 3, "content": "x"},
        {"role": "user", "content": 3},
        {"role": "user", "content": {"type": "text", "text": "x"}},
        {"role": "user", "content": [None]},
        {"role": "user", "content": [[]]},
        {"role": "user", "content": [{"type": "text", "text": 3}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "u"}]},
        {"role": "user", "content": [{"type": "thinking"}]},
        {"role": "user", "content": [{"type": "new_kind", "text": "x"}]},
        {"role": "user", "content": [{"type": ["text"], "text": "x"}]},
        {"role": "assistant", "tool_calls": "f"},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"function": None}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "9" * 5_000}}]},
    ],
    ids=lambda message: str(message)[:60],
)
def test_what_the_engine_refuses_is_not_guessed(message: dict[str, Any]) -> None:
    with pytest.raises(Unrenderable, match="malformed"):
        convert(message)
