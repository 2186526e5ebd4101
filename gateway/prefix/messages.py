"""A chat request's messages -> what the engine hands to the chat template.

Source: vLLM's conversion (`protocols.md` 5.2) and, where it is marked, SGLang's. Rules:
1. What the engine would refuse or expand itself is `Unrenderable` with a word for the decision; never an error.
2. Nothing of the request is changed: a message is copied as soon as one of its values differs.
3. Key order of tool calls is `id, function {arguments, name}, type`: the order the engine's request model writes, which
   `tojson` shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum

import msgspec

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
    # vLLM joins the text parts of a message with a line end, SGLang with a blank.
    glue = " " if engine is EngineKind.SGLANG else "\n"
    result: list[Message] = []
    for message in messages:
        role = message.get("role")
        content = message.get("content")
        if type(role) is not str:
            raise Unrenderable("malformed")
        if type(content) is str:
            shown: object = [{"type": "text", "text": content}] if parts else content
        else:
            shown = _parts(content) if parts else glue.join(_texts(content))
        converted: Message = {"role": role, "content": shown}
        if role == "assistant":
            _assistant(converted, message)
        elif role == "tool":
            if message.get("tool_call_id") is not None:
                converted["tool_call_id"] = message["tool_call_id"]
            if parts:
                converted["content"] = content if type(content) is str else glue.join(_all_texts(content))
        elif role == "developer" and message.get("tools") is not None:
            converted["tools"] = message["tools"]
        name = message.get("name")
        if type(name) is str:
            converted["name"] = name
        result.append(converted)
    if not keeps_developer and any(message["role"] == "developer" for message in result):
        return _developer_as_system(result)
    return result


# --------------------------------------------------------------------------- content


def _texts(content: object) -> list[str]:
    """Texts of the parts, for templates that take a string: empty ones are left out, as the engine does."""
    return [text for text in _all_texts(content) if text]


def _all_texts(content: object) -> list[str]:
    if content is None:
        return []
    if type(content) is not list:
        raise Unrenderable("malformed")
    texts = []
    for part in content:
        text = part if type(part) is str else _part_text(part)
        if text is not None:
            texts.append(text)
    return texts


def _parts(content: object) -> list[Message]:
    return [{"type": "text", "text": text} for text in _all_texts(content)]


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


# --------------------------------------------------------------------------- roles


def _assistant(converted: Message, message: Mapping[str, object]) -> None:
    calls = message.get("tool_calls")
    if calls is not None:
        if type(calls) is not list:
            raise Unrenderable("malformed")
        if calls:
            converted["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")
    if reasoning is not None:
        converted["reasoning"] = reasoning
        converted["reasoning_content"] = reasoning


def _tool_call(call: object) -> Message:
    function = call.get("function") if type(call) is dict else None
    if type(call) is not dict or type(function) is not dict:
        raise Unrenderable("malformed")
    return {
        "id": call.get("id"),
        "function": {"arguments": _arguments(function.get("arguments")), "name": function.get("name")},
        "type": call.get("type", "function"),
    }


def _arguments(text: object) -> object:
    """Arguments come as JSON text; templates get the object, `{}` for what is none."""
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


def _developer_as_system(messages: list[Message]) -> list[Message]:
    """The developer role under the name every template knows; neighbours become one message."""
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
