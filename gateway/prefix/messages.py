"""A chat request's messages -> what the engine hands to the chat template.

Source: vLLM's conversion and, where it is marked, SGLang's. Rules:
1. What the engine would refuse or expand itself is `Unrenderable` with a word for the decision; never an error.
2. Nothing of the request is changed: a message is copied as soon as one of its values differs.
3. Key order of tool calls is `id, function {arguments, name}, type`, as the engine's request model writes them, and as
   `tojson` shows them. Keys that are no part of the API stay behind those in a vLLM tool call and in a part (where the
   template takes parts), and are gone everywhere else.
4. Where releases of vLLM differ, the newest counts. What an older one does not do: make one system message of all
   where the template does not know the developer role (since 0.23), keep further keys of parts (0.26), show `{}` for
   arguments that are no object (0.29), take the billing line away (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

import msgspec

from gateway.pausing import let_others_run
from gateway.records import EngineKind

Message = dict[str, object]

_decode = msgspec.json.Decoder().decode

_MEDIA = frozenset(
    {
        "image",
        "image_url",
        "input_image",
        "image_pil",
        "image_embeds",
        "audio_url",
        "input_audio",
        "audio_embeds",
        "video_url",
        "video_embeds",
        "video",
        "prompt_embeds",
    }
)
_TEXT_FIELD = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_SKIPPED_WHEN_NULL = frozenset({"text", "refusal"})
_PART_FIELDS = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    }
)
"""What the API knows as a part's keys. vLLM takes the text out of them and hands all other keys to the template."""
_DEFINITION = {"name": str, "description": str, "parameters": dict, "strict": bool}
_BILLING_LINE = "x-anthropic-billing-header"
"""A coding agent writes it into its system prompt with a value that is new each time; vLLM takes the line away."""

_TURN = 64
"""Messages between two chances for other threads."""


class ContentFormat(Enum):
    """How a template wants `message.content`: one string, or the list of parts (OpenAI's form)."""

    STRING = "string"
    OPENAI = "openai"


class Unrenderable(Exception):
    """The prompt's tokens cannot be known here; `reason` is the word the decision shows."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def conversation(
    messages: Sequence[Mapping[str, object]],
    content_format: ContentFormat,
    *,
    engine: EngineKind,
    keeps_developer: bool,
) -> list[Message]:
    """The messages as the template gets them. `keeps_developer`: the template knows the role of that name.

    Raises Unrenderable: `multimodal`, or `malformed` where the engine refuses the message.
    """
    parts = content_format is ContentFormat.OPENAI
    sglang = engine is EngineKind.SGLANG
    # vLLM joins the text parts of a message with a line end, SGLang with a blank.
    glue = " " if sglang else "\n"
    result: list[Message] = []
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if type(role) is not str:
            raise Unrenderable("malformed")
        if role == "system" and not sglang:
            content = without_billing(content)
        if type(content) is str:
            shown: object = [{"type": "text", "text": content}] if parts else content
        else:
            shown = _parts(content, further_keys=not sglang) if parts else glue.join(_texts(content))
        converted: Message = {"role": role, "content": shown}
        if role == "assistant":
            _assistant(converted, message, engine)
        elif role == "tool":
            if message.get("tool_call_id") is not None:
                converted["tool_call_id"] = message["tool_call_id"]
            if parts:
                converted["content"] = content if type(content) is str else glue.join(_all_texts(content))
        name = message.get("name")
        if type(name) is str:
            converted["name"] = name
        if "task" in message and type(message["task"]) is str and not sglang:
            converted["task"] = message["task"]
        if role == "developer" and keeps_developer:
            _developer_tools(converted, message.get("tools"), engine)
        result.append(converted)
        if len(result) % _TURN == 0:
            let_others_run()
    if not keeps_developer and any(message["role"] == "developer" for message in result):
        return _neighbours_as_system(result) if sglang else _one_system_message(result)
    return result


# --------------------------------------------------------------------------- content


def _texts(content: object) -> list[str]:
    """Texts of the parts, for templates that take a string: empty ones are left out, as the engine does."""
    return [text for text in _all_texts(content) if text]


def _all_texts(content: object) -> list[str]:
    return [text for _, text in _text_parts(content)]


def _text_parts(content: object) -> Iterator[tuple[object, str]]:
    if content is None:
        return
    if type(content) is not list:
        raise Unrenderable("malformed")
    for part in content:
        text = part if type(part) is str else _part_text(part)
        if text is not None:
            yield part, text


def _parts(content: object, *, further_keys: bool) -> list[Message]:
    shown: list[Message] = []
    for part, text in _text_parts(content):
        converted: Message = {"type": "text", "text": text}
        if further_keys and type(part) is dict and len(part) > len(converted):
            converted.update({key: value for key, value in part.items() if key not in _PART_FIELDS})
        shown.append(converted)
    return shown


def _part_text(part: object) -> str | None:
    if type(part) is not dict:
        raise Unrenderable("malformed")
    kind = part.get("type")
    if kind is None and not _MEDIA.isdisjoint(part):
        raise Unrenderable("multimodal")
    if type(kind) is not str:
        raise Unrenderable("malformed")
    if kind in _MEDIA:
        raise Unrenderable("multimodal")
    field = _TEXT_FIELD.get(kind)
    if field is None or part.get("uuid") is not None:
        raise Unrenderable("malformed")
    text = part.get(field)
    if text is None and kind in _SKIPPED_WHEN_NULL:
        return None
    if type(text) is not str:
        raise Unrenderable("malformed")
    return text


def plain_text(part: object) -> str | None:
    """The text of a content part that is nothing but text, else None."""
    if type(part) is dict and type(part.get("type")) is str:
        part = part.get(_TEXT_FIELD.get(part["type"], ""))
    return part if type(part) is str else None


def without_billing(content: object) -> object:
    """The content without the billing line, of a string or of each part; nothing stays of a part that is no more."""
    if type(content) is str:
        return content.partition("\n")[2] or None if content.startswith(_BILLING_LINE) else content
    if type(content) is not list:
        return content
    kept: list[object] = []
    for part in content:
        text = part.get("text") if type(part) is dict and part.get("type") == "text" else part
        if type(text) is not str or not text.startswith(_BILLING_LINE):
            kept.append(part)
        elif rest := text.partition("\n")[2]:
            kept.append({**part, "text": rest} if type(part) is dict else rest)
    return kept


# --------------------------------------------------------------------------- roles


def _assistant(converted: Message, message: Mapping[str, object], engine: EngineKind) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if type(calls) is not list:
            raise Unrenderable("malformed")
        if calls:
            converted["tool_calls"] = [_tool_call(call, engine) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        converted["reasoning"] = reasoning
        converted["reasoning_content"] = reasoning


def _tool_call(call: object, engine: EngineKind) -> Message:
    function = call.get("function") if type(call) is dict else None
    if type(call) is not dict or type(function) is not dict:
        raise Unrenderable("malformed")
    arguments = _arguments(function.get("arguments"))
    shown_function: Message = {"arguments": arguments, "name": function.get("name")}
    shown: Message = {"id": call.get("id"), "function": shown_function, "type": call.get("type", "function")}
    if engine is EngineKind.SGLANG:
        return shown
    if type(arguments) is not dict:
        shown_function["arguments"] = {}
    _add_others(shown_function, function)
    _add_others(shown, call)
    return shown


def _add_others(shown: Message, given: Message) -> None:
    """Put the client's other keys behind those that are shown. In what the engine accepts, all of those are there."""
    if len(given) > len(shown):
        for key, value in given.items():
            shown.setdefault(key, value)


def _arguments(text: object) -> object:
    """Arguments come as JSON text; templates get the value, `{}` for what is no JSON."""
    if type(text) is not str:
        return text if type(text) in (dict, list) else {}
    try:
        return _decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
        return _arguments_by_engine(text)


def _arguments_by_engine(text: str) -> object:
    """The engines' own decoder has the last word, as for the body: slower, accepts a little more."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {}
    except (RecursionError, ValueError) as error:  # too deep, or a number with too many digits
        raise Unrenderable("malformed") from error


def _developer_tools(converted: Message, tools: object, engine: EngineKind) -> None:
    """What a developer message says of tools, for templates that know the role."""
    if engine is EngineKind.SGLANG:
        if tools is not None:
            converted["tools"] = tools
        return
    if tools is not None and type(tools) is not list:
        raise Unrenderable("malformed")
    converted["tools"] = None if tools is None else [_developer_tool(tool) for tool in tools]


def _developer_tool(tool: object) -> Message:
    """In the order of the engine's model. Where it does not fit, the engine may keep all of them as they came."""
    function = tool.get("function") if type(tool) is dict else None
    if type(tool) is not dict or tool.get("type") != "function" or type(function) is not dict:
        raise Unrenderable("malformed")
    for key, kind in _DEFINITION.items():
        if type(function.get(key)) is not kind and (key == "name" or key in function):
            raise Unrenderable("malformed")
    shown_function = {key: function[key] for key in _DEFINITION if key in function}
    shown: Message = {"function": shown_function, "type": "function"}
    _add_others(shown_function, function)
    _add_others(shown, tool)
    return shown


def _one_system_message(messages: list[Message]) -> list[Message]:
    """vLLM: developer messages are system messages; where one is not the first message, all become one in front."""
    system = [message for message in messages if message["role"] in ("system", "developer")]
    if len(system) == 1 and system[0] is messages[0]:
        return [{**system[0], "role": "system"}, *messages[1:]]
    texts = [text for text in map(_text_of, system) if text]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _text_of(message: Message) -> str:
    content = message["content"]
    return "\n".join(part["text"] for part in content) if type(content) is list else str(content)


def _neighbours_as_system(messages: list[Message]) -> list[Message]:
    """SGLang: the developer role under the name every template knows; neighbours become one message."""
    result: list[Message] = []
    for message in messages:
        if message["role"] not in ("developer", "system"):
            result.append(message)
            continue
        message = {"role": "system", "content": message["content"]}
        if result and result[-1]["role"] == "system":
            message["content"] = _joined(result.pop()["content"], message["content"])
        result.append(message)
    return result


def _joined(first: object, second: object) -> object:
    if type(first) is str and type(second) is str:
        return f"{first}\n\n{second}"
    if type(first) is list and type(second) is list:
        return [*first, {"type": "text", "text": "\n\n"}, *second]
    raise Unrenderable("malformed")
