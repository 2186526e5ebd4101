"""Requests a simulated engine understands: `/v1/chat/completions` and `/v1/completions`, checked as vLLM does.

Only what decides prompt, length and shape of the answer is read; every other field is accepted and ignored, as
sampling is made up. Mistakes raise `ApiError`, in vLLM's words where those were captured (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from gateway.records import ChatPrompt, EngineKind
from gateway.sim.speech import Speech

Body = Mapping[str, Any]

_STATUS_NAMES = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}

_CHAT_FIELDS: Mapping[str, type] = MappingProxyType(
    {
        "messages": list,
        "tools": list,
        "chat_template_kwargs": dict,
        "add_generation_prompt": bool,
        "continue_final_message": bool,
        "add_special_tokens": bool,
        "documents": list,
        "reasoning_effort": str,
        "chat_template": str,
    }
)


class ApiError(Exception):
    """A refusal. `body` is vLLM's: `{"error": {"message", "type", "param", "code"}}`, `code` being the HTTP status."""

    def __init__(self, status: int, message: str, *, param: str | None = None, type_name: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type_name = type_name or _STATUS_NAMES.get(status, "InternalServerError")
        error = {"message": message, "type": self.type_name, "param": param, "code": status}
        self.body = json.dumps({"error": error}, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool the answer must call, and the arguments it makes up, as JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Shape:
    """Form of the answer: `choices` answers a prompt, streamed or whole, with usage at the end (`usage`) or on every
    event (`running_usage`), with token ids."""

    choices: int = 1
    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    token_ids: bool = False


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: prompts as token ids, length and shape of the answers, and what separates its cache.

    `finish` is the reason an answer ends with: `length` when the client set its length, else `stop`. `session` is the
    one it belongs to, as SGLang's clients name it; `extra_key` keeps its blocks apart there, and shows in no event.
    """

    chat: bool
    model: str
    adapter: str | None
    salt: str | None
    prompts: tuple[list[int], ...]
    output_tokens: int
    finish: str
    shape: Shape
    tool_call: ToolCall | None = None
    session: str | None = None
    extra_key: str | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """What the engine serves: `models` by name with the adapter each stands for (None: the base model). `lenient`, as
    SGLang is: any model name is served, adapters are named `base:adapter` or by `lora_path` too, and several answers to
    a greedy request are fine."""

    models: Mapping[str, str | None]
    max_model_len: int
    default_output_tokens: int
    lenient: bool = False


def parse_json(raw: bytes) -> Body:
    """The body as an object. Raises ApiError 400."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        place = f"body.{error.pos}" if isinstance(error, json.JSONDecodeError) else "body"
        raise _invalid("json_invalid", place, "JSON decode error") from error
    if not isinstance(body, dict):
        raise _invalid("model_attributes_type", "body", "Input should be a valid dictionary")
    return body


def parse_chat(body: Body, rules: Rules, *, speech: Speech) -> Ask:
    """A chat request. Raises ApiError."""
    _check_fields(body)
    model, adapter = model_of(body, rules)
    tokens = chat_tokens(body, speech, rules)
    finish, output = check_length(body, rules, [tokens], names=("max_completion_tokens", "max_tokens"))
    return Ask(
        chat=True,
        model=model,
        adapter=adapter,
        salt=salt_of(body),
        session=session_of(body),
        extra_key=extra_key_of(body),
        prompts=(tokens,),
        output_tokens=output,
        finish=finish,
        shape=_shape(body, rules),
        tool_call=_tool_call(body),
    )


def parse_completion(body: Body, rules: Rules, *, speech: Speech) -> Ask:
    """A text completion request with a text, texts, token ids or lists of them. Raises ApiError."""
    model, adapter = model_of(body, rules)
    special = body.get("add_special_tokens") is not False
    prompts = [
        text_tokens(prompt, speech, special=special) if isinstance(prompt, str) else prompt
        for prompt in _prompts(body.get("prompt"))
    ]
    if not all(prompts):
        raise ApiError(400, "The decoder prompt cannot be empty", param="prompt")
    finish, output = check_length(body, rules, prompts, names=("max_tokens",))
    return Ask(
        chat=False,
        model=model,
        adapter=adapter,
        salt=salt_of(body),
        session=session_of(body),
        extra_key=extra_key_of(body),
        prompts=tuple(prompts),
        output_tokens=output,
        finish=finish,
        shape=_shape(body, rules),
    )


def text_tokens(text: str, speech: Speech, *, special: bool) -> list[int]:
    """Token ids of a text. Raises ApiError."""
    try:
        return speech.encode(text, special=special)
    except ValueError as error:
        raise ApiError(400, f"The prompt cannot be encoded: {error}", param="prompt") from error


def chat_tokens(body: Body, speech: Speech, rules: Rules) -> list[int]:
    """Token ids of a chat body's prompt. Raises ApiError; for media too, which no text model reads."""
    _check_fields(body)
    if not body["messages"]:
        raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    for message in body["messages"]:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") not in ("text", "input_text", "refusal"):
                raise ApiError(400, "The model is not a multimodal model", param="messages")
    prompt = ChatPrompt(
        messages=body["messages"],
        tools=body.get("tools") or None,
        tool_choice=body.get("tool_choice"),
        template_kwargs=body.get("chat_template_kwargs") or {},
        add_generation_prompt=body.get("add_generation_prompt") is not False,
        continue_final_message=body.get("continue_final_message") is True,
        add_special_tokens=body.get("add_special_tokens") is True,
        documents=body.get("documents"),
        reasoning_effort=body.get("reasoning_effort"),
        chat_template=body.get("chat_template"),
    )
    try:
        return speech.chat(prompt, EngineKind.SGLANG if rules.lenient else EngineKind.VLLM)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from error


def _check_fields(body: Body) -> None:
    """The kinds of the fields that make up a chat prompt."""
    if body.get("messages") is None:
        raise _invalid("missing", "body.messages", "Field required")
    for name, kind in _CHAT_FIELDS.items():
        value = body.get(name)
        if value is not None and not isinstance(value, kind):
            raise _invalid(f"{kind.__name__}_type", f"body.{name}", f"Input should be a valid {kind.__name__}")
    for name in ("messages", "tools", "documents"):
        if not all(isinstance(item, dict) for item in body.get(name) or ()):
            raise _invalid("dict_type", f"body.{name}", "Input should be a valid dict")


def model_of(body: Body, rules: Rules) -> tuple[str, str | None]:
    """The model's name as asked for, and the adapter. Raises ApiError for one that is not served."""
    base = next(iter(rules.models))
    name = body.get("model") or base
    if rules.lenient and isinstance(name, str):
        adapter = rules.models.get(name) or name.partition(":")[2] or body.get("lora_path")
        return name, adapter if isinstance(adapter, str) else None
    if not isinstance(name, str) or name not in rules.models:
        message = f"The model `{name}` does not exist. Valid aliases: {', '.join(rules.models)}."
        raise ApiError(404, message, param="model")
    return name, rules.models[name]


def _prompts(prompt: object) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    items: list[Any] = prompt if isinstance(prompt, list) else []
    if items and all(isinstance(item, str) for item in items):
        return items
    if items and is_tokens(items):
        return [items]
    if items and all(isinstance(item, list) and is_tokens(item) for item in items):
        return items
    raise ApiError(400, "Either prompt or prompt_embeds must be provided and must not be empty.", param="prompt")


def is_tokens(items: Sequence[object]) -> bool:
    """Whether all of them are token ids."""
    return all(type(item) is int and 0 <= item < 1 << 32 for item in items)


def check_length(body: Body, rules: Rules, prompts: list[list[int]], *, names: tuple[str, ...]) -> tuple[str, int]:
    """Reason an answer ends with, and its tokens; the first of the fields `names` says how many. Raises ApiError."""
    longest, limit = max(map(len, prompts)), rules.max_model_len
    asked = next((body[name] for name in names if body.get(name) is not None), None)
    if asked is not None and (type(asked) is not int or asked < 1):
        raise ApiError(400, f"max_tokens must be at least 1, got {asked}.", param="max_tokens")
    if asked is not None and asked > limit:
        raise ApiError(
            400,
            f"max_tokens={asked} cannot be greater than max_model_len={limit}. Please request fewer output tokens. "
            f"(parameter=max_tokens, value={asked})",
            param="max_tokens",
        )
    if longest >= limit:
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens. However, your prompt contains at least {longest} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
            f"input prompt. (parameter=input_tokens, value={longest})",
            param="input_tokens",
        )
    if asked is None:
        return "stop", min(rules.default_output_tokens, limit - longest)
    if asked + longest > limit:
        raise ApiError(
            400,
            f"This model's maximum context length is {limit} tokens. However, you requested {asked} output tokens and "
            f"your prompt contains {longest} input tokens, for a total of {asked + longest} tokens.",
            param="input_tokens",
        )
    return "length", asked


def _choices(body: Body, rules: Rules) -> int:
    choices = 1 if body.get("n") is None else body["n"]
    if type(choices) is not int or not 1 <= choices <= 128:
        raise ApiError(400, f"n must be at least 1, got {choices}.", param="n")
    if choices > 1 and body.get("temperature") == 0 and not rules.lenient:
        raise ApiError(400, f"n must be 1 when using greedy sampling, got {choices}.")
    return choices


def _shape(body: Body, rules: Rules) -> Shape:
    stream = body.get("stream") or False
    options = body.get("stream_options") or {}
    if not isinstance(stream, bool) or not isinstance(options, dict):
        raise _invalid("bool_parsing", "body.stream", "Input should be a valid boolean")
    if options and not stream:
        raise _invalid("value_error", "body", "Value error, Stream options can only be defined when `stream=True`.")
    heat = body.get("temperature")
    if isinstance(heat, int | float) and heat < 0:
        text = f"temperature must be non-negative, got {float(heat)}. (parameter=temperature, value={float(heat)})"
        raise ApiError(400, text, param="temperature")
    usage = bool(options.get("include_usage"))
    return Shape(
        choices=_choices(body, rules),
        stream=stream,
        usage=usage,
        running_usage=usage and bool(options.get("continuous_usage_stats")),
        token_ids=bool(body.get("return_token_ids")),
    )


def salt_of(body: Body) -> str | None:
    """The cache salt. Raises ApiError for one that is no text."""
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ApiError(400, "Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    return salt


def session_of(body: Body) -> str | None:
    """The session SGLang tells of in its events."""
    session = body.get("session_id")
    return session if isinstance(session, str) else None


def extra_key_of(body: Body) -> str | None:
    """What else separates the cache of SGLang; other engines do not look at it."""
    key = body.get("extra_key")
    return key if isinstance(key, str) else None


def _tool_call(body: Body) -> ToolCall | None:
    """The call a forced tool choice leads to: the named tool, or the first one when any is required."""
    choice = body.get("tool_choice")
    functions = [_dict(tool, "function") for tool in body.get("tools") or ()]
    if isinstance(choice, dict):
        wanted = _dict(choice, "function").get("name")
        functions = [function for function in functions if function.get("name") == wanted]
        if not functions:
            raise ApiError(400, f"The tool `{wanted}` has not been found in the tools list.", param="tool_choice")
    elif choice != "required":
        return None
    if not functions:
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", param="tool_choice")
    return ToolCall(str(functions[0].get("name")), json.dumps(_example(functions[0].get("parameters"), depth=0)))


def _dict(value: object, key: str) -> dict[str, Any]:
    """The object under `key`, empty when there is none."""
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _example(schema: object, *, depth: int) -> object:
    """The simplest value of a JSON schema's type."""
    if not isinstance(schema, dict) or depth > 8:
        return {} if depth == 0 else None
    match schema:
        case {"enum": [first, *_]}:
            return first
        case {"type": "array"}:
            return []
        case {"type": "integer" | "number"}:
            return 1
        case {"type": "boolean"}:
            return True
        case {"type": "string"}:
            return "text"
        case {"type": "null"}:
            return None
    fields = _dict(schema, "properties")
    required = schema.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else list(fields)
    return {name: _example(fields.get(name), depth=depth + 1) for name in names}


def _invalid(kind: str, place: str, message: str) -> ApiError:
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{place}', 'msg': '{message}'}}"
    return ApiError(400, text, param=place, type_name="Bad Request")
