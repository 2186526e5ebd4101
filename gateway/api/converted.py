"""Bodies of `/v1/messages` and `/v1/responses` -> the chat that an engine makes of them.

Source: vLLM's conversions (`entrypoints/anthropic/serving.py`, `entrypoints/openai/responses/utils.py`). Rules:
1. A prompt is exact (`ChatPrompt.exact_for` vLLM) where releases make the same chat of it: system and texts; for
   Messages also tools, calls of tools and their results as text, and thinking; for Responses `instructions` and `input`
   as a text or as messages. SGLang converts in its own way. Early releases wrote a list of texts in a tool's result as
   Python does: there the newest counts, as in `prefix.messages`.
2. All else has releases that differ (system messages in the middle, effort, Responses' tools and calls). Such a prompt
   is exact for no engine: its beginning is known by its text. What cannot be a prompt is `NoPrompt`.
3. Nothing of the body is changed. Keys of blocks that are no part of the conversion (`cache_control`) are left out.
4. Nothing here raises: what is wrong with such a body is the worker's to say, in its own words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from gateway.records import ChatPrompt, EngineKind, NoPrompt, Prompt

Fields = Mapping[str, object]
Message = dict[str, object]

_VLLM = frozenset({EngineKind.VLLM})
_NOBODY: frozenset[EngineKind] = frozenset()

_BILLING_LINE = "x-anthropic-billing-header"
"""Blocks that begin with it are left out since vLLM 0.32 and rendered before."""

_TOOL_KEYS = frozenset({"name", "description", "input_schema", "type", "cache_control"})
"""Of a tool's keys those whose place in the prompt no release has changed; `cache_control` has none."""


class _Unsure(Exception):
    """Releases differ in what they make of it, or refuse it."""


# --------------------------------------------------------------------------- Messages


def of_messages(fields: Fields) -> Prompt:
    """The chat of a body of Anthropic's Messages API."""
    messages, tools, kwargs = fields.get("messages"), fields.get("tools"), fields.get("chat_template_kwargs")
    if not _objects(messages) or not (kwargs is None or type(kwargs) is dict) or not (tools is None or _objects(tools)):
        return NoPrompt("malformed")
    assert isinstance(messages, list)
    kwargs = kwargs or {}
    try:
        if fields.get("thinking") is not None or fields.get("output_config") is not None:
            raise _Unsure
        chat = _system(fields.get("system"))
        for message in messages:
            chat += _turn(message)
        if not chat or chat[-1]["role"] == "assistant":
            raise _Unsure  # some releases go on with it
        shown = [_tool(tool) for tool in tools] if isinstance(tools, list) else None
    except _Unsure:
        front = {key: fields[key] for key in ("thinking", "output_config") if fields.get(key) is not None}
        system: list[Message] = [{"role": "system", "content": fields.get("system")}] if fields.get("system") else []
        return _by_text([*system, *messages], tools, {**kwargs, **front})
    return ChatPrompt(messages=chat, tools=shown or None, template_kwargs=kwargs, exact_for=_VLLM)


def _system(system: object) -> list[Message]:
    if system is None or system == "" or system == []:
        return []
    if type(system) is not str:
        if type(system) is not list:
            raise _Unsure
        system = "".join([_text(block) for block in system])
    if system.startswith(_BILLING_LINE):
        raise _Unsure
    return [{"role": "system", "content": system}] if system else []


def _turn(message: Mapping[str, object]) -> list[Message]:
    """One message; results of tools come before what else it says."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise _Unsure
    if type(content) is str:
        return [{"role": role, "content": content}]
    if type(content) is not list:
        raise _Unsure
    results: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if type(block) is dict else None
        if kind == "text":
            if text := _text(block):
                parts.append({"type": "text", "text": text})
        elif kind == "image" and role == "user":
            parts.append({"type": "image_url", "image_url": block.get("source")})
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block))
        elif kind == "thinking" and role == "assistant" and type(block.get("thinking")) is str:
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking" or role != "assistant":
            raise _Unsure
    shown: Message = {"role": role}
    if thoughts:
        shown["reasoning"] = "".join(thoughts)
    if calls:
        shown["tool_calls"] = calls
    if parts:
        alone = len(parts) == 1 and parts[0]["type"] == "text"
        shown["content"] = parts[0]["text"] if alone else parts
    if len(shown) > 1:
        return [*results, shown]
    if role == "assistant":
        raise _Unsure
    return results


def _text(block: object) -> str:
    text = block.get("text") if type(block) is dict and block.get("type") == "text" else None
    if type(text) is not str or text.startswith(_BILLING_LINE):
        raise _Unsure
    return text


def _call(block: Mapping[str, object]) -> Message:
    name, given = block.get("name"), block.get("input")
    if type(block.get("id")) is not str or not block["id"] or type(name) is not str:
        raise _Unsure
    if given is not None and type(given) is not dict:
        raise _Unsure
    return {"id": block["id"], "type": "function", "function": {"name": name, "arguments": given or {}}}


def _result(block: Mapping[str, object]) -> Message:
    name, content = block.get("tool_use_id"), block.get("content")
    if type(name) is not str:
        raise _Unsure
    if type(content) is list:
        content = "\n".join([_text(item) for item in content])
    elif content is not None and type(content) is not str:
        raise _Unsure
    return {"role": "tool", "tool_call_id": name, "content": content or ""}


def _tool(tool: Mapping[str, object]) -> Message:
    schema = tool.get("input_schema")
    if type(schema) is not dict or not _TOOL_KEYS.issuperset(tool):
        raise _Unsure
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": function}


# --------------------------------------------------------------------------- Responses

_OWN_WAY = ("tools", "reasoning", "chat_template_kwargs", "chat_template", "truncation")
"""What changes the prompt, in each release in another way."""
_LIVES_ON_WORKER = ("previous_response_id", "conversation", "prompt", "previous_input_messages")


def of_responses(fields: Fields) -> Prompt:
    """The chat of a body of the Responses API."""
    if any([fields.get(key) is not None for key in _LIVES_ON_WORKER]):
        return NoPrompt("session")
    given, instructions = fields.get("input"), fields.get("instructions")
    if instructions is not None and type(instructions) is not str:
        return NoPrompt("malformed")
    system: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if type(given) is str:
        items: Sequence[Mapping[str, object]] = [{"role": "user", "content": given}]
    elif _objects(given) and given:
        items = given  # type: ignore[assignment]  # checked by _objects, which mypy cannot see
    else:
        return NoPrompt("malformed")
    try:
        unlike = [key for key in _OWN_WAY if fields.get(key) and fields[key] != "disabled"]
        if unlike or items[-1].get("status") in ("in_progress", "incomplete"):
            raise _Unsure
        return ChatPrompt(messages=[*system, *map(_item, items)], exact_for=_VLLM)
    except _Unsure:
        front = {key: fields[key] for key in _OWN_WAY if fields.get(key) is not None}
        return _by_text([*system, *items], None, front)


def _item(item: Mapping[str, object]) -> Message:
    """A message of the input."""
    role, content = item.get("role"), item.get("content")
    if item.get("type", "message") != "message" or role not in ("user", "system", "developer", "assistant"):
        raise _Unsure
    if role == "assistant" and type(content) is list:
        if len(content) != 1 or type(content[0]) is not dict or content[0].get("type") != "output_text":
            raise _Unsure
        content = content[0].get("text")
    if role == "assistant" and type(content) is not str:
        raise _Unsure
    return {"role": role, "content": content}


# --------------------------------------------------------------------------- by their text


def _by_text(messages: Sequence[Mapping[str, object]], tools: object, front: Mapping[str, object]) -> Prompt:
    """Known by what it says, in its order."""
    shown = [
        _shown(message) if type(message.get("role")) is str else {"role": "item", **message} for message in messages
    ]
    listed = tools if type(tools) is list and tools else None
    return ChatPrompt(messages=shown, tools=listed, template_kwargs=front, exact_for=_NOBODY)


def _shown(message: Mapping[str, object]) -> Mapping[str, object]:
    content = message.get("content")
    if type(content) is not list or not any([_is_tool_block(block) for block in content]):
        return message
    return {**message, "content": [_as_text(block) if _is_tool_block(block) else block for block in content]}


def _is_tool_block(block: object) -> bool:
    return type(block) is dict and block.get("type") in ("tool_use", "tool_result")


def _as_text(block: Mapping[str, object]) -> Message:
    """What a tool was told or has told. Where a client puts its `cache_control` changes from turn to turn."""
    return {"type": "text", "text": json.dumps({key: block[key] for key in block if key != "cache_control"})}


def _objects(value: object) -> bool:
    return type(value) is list and all(type(item) is dict for item in value)
