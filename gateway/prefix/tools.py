"""A request's tools -> what the engine hands to the chat template, remembered with its JSON text.

Agents send the same tools, often 20 KB and more of schemas, with every turn, and templates write them out as JSON every
time. That would cost more than all the rest of a request's prefix work, so equal tools get the same objects again, and
`tojson` writes each of those once.

Rules:
1. Key order is `type, function {name, description, parameters, strict, defer_loading}, defer_loading`, unknown keys are
   gone: as vLLM's request model writes them. `description` and `parameters` are null where they are unset, `strict` and
   `defer_loading` are left out. Inside `parameters` the client's order stays.
   Since vLLM 0.27; up to 0.26 unknown keys were rendered too, behind the known ones. `strict` is rendered by every
   release (before 0.24 as such a key, so null as well), `defer_loading` is part of the model since 0.21.
2. Equal means equal to the last bit: `marshal` (not JSON text) tells 1 from 1.0, null from NaN and keeps key order.
3. Templates cannot change a `Tool`: the sandbox forbids it.
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.prefix.messages import Message, Unrenderable
from gateway.records import EngineKind

_MIN_BYTES = 512
"""Smaller tools are not worth a look-up."""


class Tool(dict[str, Any]):
    """A rendered tool. `written` maps `tojson`'s options to the text they gave; templates see the items only."""

    __slots__ = ("written",)

    def __init__(self, items: Mapping[str, object]) -> None:
        super().__init__(items)
        self.written: dict[tuple[object, ...], str] = {}


class ToolCache:
    """LRU of tool lists, bounded in bytes of what the clients sent (their objects take about ten times that)."""

    def __init__(self, engine: EngineKind, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._engine = engine
        self._lists: OrderedDict[bytes, list[Message] | None] = OrderedDict()

    def tools(
        self, tools: Sequence[Mapping[str, object]], tool_choice: object, *, remember: bool
    ) -> list[Message] | None:
        """The tools as the template gets them, None when it gets none. Raises Unrenderable (`malformed`).

        With `remember` false the cache is only read, as a thread must.
        """
        try:
            # Version 2 writes no references: equal values give equal bytes.
            key = marshal.dumps((tools, tool_choice), 2)  # type: ignore[arg-type]  # JSON values only
        except ValueError:  # nested too deeply for it
            return tool_list(tools, tool_choice, engine=self._engine)
        if key in self._lists:
            if remember:
                self._lists.move_to_end(key)
            return self._lists[key]
        found = tool_list(tools, tool_choice, engine=self._engine)
        if remember and _MIN_BYTES <= len(key) <= self.max_bytes // 4:
            self._lists[key] = found
            self.bytes += len(key)
            while self.bytes > self.max_bytes:
                old, _ = self._lists.popitem(last=False)
                self.bytes -= len(old)
        return found


def tool_list(
    tools: Sequence[Mapping[str, object]], tool_choice: object, *, engine: EngineKind
) -> list[Message] | None:
    """The tools as the template gets them, None when it gets none. Raises Unrenderable (`malformed`)."""
    if engine is EngineKind.SGLANG:
        return _sglang_tools(tools, tool_choice)
    # vLLM renders the tools even when tool_choice is "none" (unless it was started with the flag against that).
    return [_vllm_tool(tool) for tool in tools] or None


def _tool(tool: Mapping[str, object], keys: Sequence[str]) -> Tool:
    function = tool.get("function")
    if type(function) is not dict or type(function.get("name")) is not str:
        raise Unrenderable("malformed")
    return Tool({"type": tool.get("type", "function"), "function": Tool({key: function.get(key) for key in keys})})


def _vllm_tool(tool: Mapping[str, object]) -> Message:
    shown = _tool(tool, ("name", "description", "parameters"))
    given: Mapping[str, object] = tool["function"]  # type: ignore[assignment]  # an object, as _tool has checked
    late = _flag(tool, "defer_loading")
    function_late = _flag(given, "defer_loading")
    flags = {"strict": _flag(given, "strict"), "defer_loading": late if function_late is None else function_late}
    shown["function"].update({key: flag for key, flag in flags.items() if flag is not None})
    if late is not None:
        shown["defer_loading"] = late
    return shown


def _flag(fields: Mapping[str, object], name: str) -> bool | None:
    flag = fields.get(name)
    if flag is None or type(flag) is bool:
        return flag
    raise Unrenderable("malformed")  # the engine turns some of them into booleans and refuses the others


def _sglang_tools(tools: Sequence[Mapping[str, object]], tool_choice: object) -> list[Message] | None:
    """SGLang leaves tools out for "none", renders only a named one, and writes the function's keys in its own order."""
    if tool_choice == "none":
        return None
    rendered: list[Message] = [_tool(tool, ("description", "name", "parameters", "strict")) for tool in tools]
    if type(tool_choice) is dict:
        chosen = tool_choice.get("function")
        name = chosen.get("name") if type(chosen) is dict else None
        rendered = [tool for tool in rendered if tool["function"]["name"] == name]  # type: ignore[index]
    return rendered or None
