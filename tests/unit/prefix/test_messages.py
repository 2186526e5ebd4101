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


def test_further_keys_of_parts_are_kept_where_the_template_takes_parts() -> None:
    kept = {"cache_control": {"type": "ephemeral"}, "image": None}
    part = {"cache_control": kept["cache_control"], "text": "a", "image": None, "type": "text"}
    known = {"name": "n", "uuid": None, "image_url": None, "closed": True, "refusal": "r"}
    messages = ({"role": "user", "content": [part | known]}, {"role": "system", "content": [part]})
    for message in messages:
        (shown,) = convert(message, parts=True)
        assert shown["content"] == [{"type": "text", "text": "a", **kept}]
        assert list(shown["content"][0]) == ["type", "text", "cache_control", "image"]
        assert convert(message)[0]["content"] == "a"
        assert convert(message, parts=True, engine=EngineKind.SGLANG)[0]["content"] == [text("a")]


BILLING = "x-anthropic-billing-header: version=1; id=2af8;"


@pytest.mark.parametrize(
    ("content", "as_string", "as_parts"),
    [
        (BILLING, "", []),
        (BILLING + "\n", "", []),
        (BILLING + "\nYou\nare", "You\nare", [text("You\nare")]),
        ([text(BILLING), text("You")], "You", [text("You")]),
        ([text(BILLING + "\n\nare") | {"x": 1}], "\nare", [text("\nare") | {"x": 1}]),
        ([BILLING + "\nYou", BILLING], "You", [text("You")]),
        ("You\n" + BILLING, "You\n" + BILLING, [text("You\n" + BILLING)]),
    ],
)
def test_the_billing_line_is_taken_out_of_the_system_prompt(
    content: object, as_string: str, as_parts: list[object]
) -> None:
    message = {"role": "system", "content": content}
    assert convert(message) == [{"role": "system", "content": as_string}]
    assert convert(message, parts=True) == [{"role": "system", "content": as_parts}]


def test_the_billing_line_stays_in_other_roles_and_for_sglang() -> None:
    line = BILLING + "\nx"
    for role in ("user", "assistant", "tool"):
        assert convert({"role": role, "content": line})[0]["content"] == line
    assert convert({"role": "developer", "content": line})[0] == {"role": "system", "content": line}
    assert convert({"role": "system", "content": line}, engine=EngineKind.SGLANG)[0]["content"] == line


def test_only_known_members_are_kept() -> None:
    message = {"role": "user", "content": "x", "name": "Ann", "tool_calls": [], "reasoning": "no", "tool_call_id": "c"}
    assert convert(message) == [{"role": "user", "content": "x", "name": "Ann"}]
    assert convert(message | {"task": "t"}) == [{"role": "user", "content": "x", "name": "Ann", "task": "t"}]
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
        ("[1]", {}),
        ('"x"', {}),
        ("null", {}),
        ("true", {}),
        ("12", {}),
        ('{"a": "\\ud800"}', {"a": "\ud800"}),
        ('{"a": 1e999}', {"a": float("inf")}),
        ('"\ud800"', {}),
        ([1], {}),
        (None, {}),
        (7, {}),
        ({"x": 1}, {"x": 1}),
    ],
)
def test_tool_calls(arguments: object, parsed: object) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}, "id": "c1"}
    message: dict[str, Any] = convert({"role": "assistant", "content": None, "tool_calls": [call]})[0]
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "function": {"arguments": parsed, "name": "f"}, "type": "function"}],
    }
    (shown,) = message["tool_calls"]
    assert list(shown) == ["id", "function", "type"]
    assert list(shown["function"]) == ["arguments", "name"]


def test_further_keys_of_tool_calls_stay_behind_the_known_ones() -> None:
    function = {"strict": None, "name": "f", "arguments": "{}"}
    call = {"index": 0, "type": "function", "x": {"b": 1, "a": 2}, "function": function, "id": "c1"}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    (shown,) = converted_calls(message, EngineKind.VLLM)
    assert list(shown.items()) == [
        ("id", "c1"),
        ("function", {"arguments": {}, "name": "f", "strict": None}),
        ("type", "function"),
        ("index", 0),
        ("x", {"b": 1, "a": 2}),
    ]
    assert list(shown["function"]) == ["arguments", "name", "strict"]
    (shown,) = converted_calls(message, EngineKind.SGLANG)
    assert shown == {"id": "c1", "function": {"arguments": {}, "name": "f"}, "type": "function"}


def test_sglang_takes_arguments_of_any_type() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[1]"}, "id": "c1"}
    (shown,) = converted_calls({"role": "assistant", "tool_calls": [call]}, EngineKind.SGLANG)
    assert shown["function"]["arguments"] == [1]


def converted_calls(message: dict[str, Any], engine: EngineKind) -> list[dict[str, Any]]:
    calls: Any = convert(message, engine=engine)[0]["tool_calls"]
    return list(calls)


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


DEVELOPER: list[dict[str, Any]] = [
    {"role": "system", "content": "a"},
    {"role": "developer", "content": [text("b"), text("c")], "name": "Ann"},
    {"role": "user", "content": "d"},
    {"role": "system", "content": ""},
    {"role": "developer", "content": "e"},
]


@pytest.mark.parametrize("parts", [False, True])
def test_developer_and_system_messages_become_one_in_front(parts: bool) -> None:
    user = [text("d")] if parts else "d"
    one = {"role": "system", "content": "a\n\nb\nc\n\ne"}
    assert convert(*DEVELOPER, parts=parts) == [one, {"role": "user", "content": user}]


def test_one_developer_message_in_front_only_changes_its_role() -> None:
    message = {"role": "developer", "content": "a", "name": "Ann", "tools": [{"x": 1}]}
    user = {"role": "user", "content": "b"}
    assert convert(message, user) == [{"role": "system", "content": "a", "name": "Ann"}, user]
    (shown, _) = convert(message, user, parts=True)
    assert shown == {"role": "system", "content": [text("a")], "name": "Ann"}
    assert convert(user, message) == [{"role": "system", "content": "a"}, user]


def test_system_messages_stay_apart_without_a_developer_message() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}, {"role": "system", "content": ""}]
    assert convert(*messages) == messages


def test_sglang_joins_developer_and_system_messages_that_are_neighbours() -> None:
    def sglang(**options: Any) -> list[Message]:
        return convert({"role": "system", "content": "a"}, *rest, engine=EngineKind.SGLANG, **options)

    rest = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "developer", "content": "d"},
    ]
    assert sglang() == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    assert sglang(parts=True)[0]["content"] == [text("a"), text("\n\n"), text("b")]


def test_templates_that_know_the_developer_role_get_its_tools_too() -> None:
    function = {"x": 1, "strict": True, "parameters": {"b": 1, "a": 2}, "name": "f"}
    tools = [{"type": "function", "function": function, "y": 2}]
    message = {"role": "developer", "tools": tools, "content": "a", "name": "Ann"}
    (shown,) = convert(message, keeps_developer=True)
    ordered = {"name": "f", "parameters": {"b": 1, "a": 2}, "strict": True, "x": 1}
    assert shown == {
        "role": "developer",
        "content": "a",
        "name": "Ann",
        "tools": [{"function": ordered, "type": "function", "y": 2}],
    }
    assert str(shown["tools"]) == str([{"function": ordered, "type": "function", "y": 2}])
    assert convert({"role": "developer", "content": "a"}, keeps_developer=True)[0]["tools"] is None
    assert convert(*DEVELOPER, keeps_developer=True)[0] == {"role": "system", "content": "a"}


@pytest.mark.parametrize(
    "tools",
    [
        "x",
        ["x"],
        [{"function": {"name": "f"}}],
        [{"type": "function", "function": {}}],
        [{"type": "function", "function": {"name": "f", "description": None}}],
        [{"type": "function", "function": {"name": "f", "parameters": []}}],
    ],
    ids=str,
)
def test_a_developers_tools_that_do_not_fit_are_the_engines_to_judge(tools: object) -> None:
    message = {"role": "developer", "content": "a", "tools": tools}
    with pytest.raises(Unrenderable, match="malformed"):
        convert(message, keeps_developer=True)
    assert convert(message) == [{"role": "system", "content": "a"}]


@pytest.mark.parametrize("part", ["image_url", "input_audio", "video_url", "video_embeds", "image_pil"])
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
