from __future__ import annotations

from typing import Any

import pytest

from gateway.prefix.messages import Unrenderable
from gateway.prefix.tools import ToolCache, tool_list
from gateway.records import EngineKind


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"function": {"parameters": {"b": 1, "a": 2}, "name": name, **function}, "type": "function", "x": 1}


def test_members_and_their_order() -> None:
    given = tool("f", unknown=1, defer_loading=False, strict=True)
    (shown,) = tool_list([{"defer_loading": True, **given}], None, engine=EngineKind.VLLM) or []
    assert shown == {
        "type": "function",
        "function": {
            "name": "f",
            "description": None,
            "parameters": {"b": 1, "a": 2},
            "strict": True,
            "defer_loading": False,
        },
        "defer_loading": True,
    }
    function: Any = shown["function"]
    assert list(shown) == ["type", "function", "defer_loading"]
    assert list(function) == ["name", "description", "parameters", "strict", "defer_loading"]
    assert list(function["parameters"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("on_tool", "on_function", "shown_on_tool", "shown_on_function"),
    [
        ({}, {}, {}, {}),
        ({}, {"strict": None, "defer_loading": None}, {}, {}),
        ({}, {"strict": False}, {}, {"strict": False}),
        ({}, {"defer_loading": True}, {}, {"defer_loading": True}),
        ({"defer_loading": None}, {"defer_loading": False}, {}, {"defer_loading": False}),
        ({"defer_loading": True}, {}, {"defer_loading": True}, {"defer_loading": True}),
        ({"defer_loading": False}, {"defer_loading": None}, {"defer_loading": False}, {"defer_loading": False}),
        ({"defer_loading": True}, {"defer_loading": False}, {"defer_loading": True}, {"defer_loading": False}),
    ],
    ids=str,
)
def test_flags_are_shown_where_they_are_set_and_the_tools_own_in_its_function_too(
    on_tool: dict[str, Any],
    on_function: dict[str, Any],
    shown_on_tool: dict[str, Any],
    shown_on_function: dict[str, Any],
) -> None:
    found = tool_list([tool("f", **on_function) | on_tool], None, engine=EngineKind.VLLM)
    function = {"name": "f", "description": None, "parameters": {"b": 1, "a": 2}, **shown_on_function}
    assert found == [{"type": "function", "function": function, **shown_on_tool}]


@pytest.mark.parametrize("flag", [1, "true", []], ids=repr)
def test_flags_that_are_no_booleans_are_the_engines_to_judge(flag: object) -> None:
    for broken in (tool("f", strict=flag), tool("f", defer_loading=flag), tool("f") | {"defer_loading": flag}):
        with pytest.raises(Unrenderable, match="malformed"):
            tool_list([broken], None, engine=EngineKind.VLLM)


def test_vllm_renders_tools_even_when_none_may_be_called() -> None:
    assert tool_list([tool("f")], "none", engine=EngineKind.VLLM) is not None


def test_sglang_follows_the_choice() -> None:
    tools = [tool("f"), tool("g")]
    assert tool_list(tools, "none", engine=EngineKind.SGLANG) is None
    named = tool_list(tools, {"type": "function", "function": {"name": "g"}}, engine=EngineKind.SGLANG)
    assert [item["function"]["name"] for item in named or []] == ["g"]  # type: ignore[index]
    both = tool_list(tools, "auto", engine=EngineKind.SGLANG)
    assert [list(item["function"]) for item in both or []] == [  # type: ignore[call-overload]
        ["description", "name", "parameters", "strict"]
    ] * 2


@pytest.mark.parametrize("broken", [{}, {"function": "f"}, {"function": {}}, {"function": {"name": 3}}])
def test_tools_the_engine_refuses(broken: dict[str, Any]) -> None:
    for engine in EngineKind:
        with pytest.raises(Unrenderable, match="malformed"):
            tool_list([broken], None, engine=engine)


def long_tool(default: object) -> list[dict[str, Any]]:
    return [tool("f", description="x" * 600, parameters={"default": default})]


def test_equal_tools_are_the_same_objects_and_others_are_not() -> None:
    cache = ToolCache(EngineKind.VLLM, 1 << 20)
    first = cache.tools(long_tool(1), None, remember=True)
    assert cache.tools(long_tool(1), None, remember=True) is first
    for other in (1.0, True, None, float("nan"), "1", -0.0, 0.0, [1], 2**70):
        different = cache.tools(long_tool(other), None, remember=True)
        assert different is not first
        assert repr(different) == repr(tool_list(long_tool(other), None, engine=EngineKind.VLLM))


def test_a_thread_only_reads() -> None:
    cache = ToolCache(EngineKind.VLLM, 1 << 20)
    first = cache.tools(long_tool(1), None, remember=False)
    assert cache.bytes == 0
    assert cache.tools(long_tool(1), None, remember=False) is not first


def test_the_cache_is_bounded() -> None:
    cache = ToolCache(EngineKind.VLLM, 10_000)
    for number in range(100):
        cache.tools(long_tool(number), None, remember=True)
        assert cache.bytes <= 10_000
    newest = cache.tools(long_tool(99), None, remember=True)
    assert cache.tools(long_tool(99), None, remember=True) is newest
    cache.tools([tool("f", description="y" * 5_000)], None, remember=True)
    assert cache.bytes <= 10_000


def test_nesting_too_deep_for_the_cache_is_still_rendered() -> None:
    deep: list[Any] = []
    for _ in range(3_000):
        deep = [deep]
    cache = ToolCache(EngineKind.VLLM, 1 << 20)
    shown = cache.tools([tool("f", parameters={"deep": deep})], None, remember=True)
    assert shown is not None
    assert cache.bytes == 0
