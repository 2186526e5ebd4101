"""Body of an inference request -> `InferenceRequest`; nothing else of the body is touched.

Rules:
1. JSON as the Python engines read it (the standard library's `json`): the last of two equal keys wins, big integers
   are exact, `NaN` and `Infinity` are numbers. The fast decoder agrees with it on all it accepts (checked by
   `tests/property/test_prefix_request.py`); what it refuses is given to `json`, whose word is final.
2. Only fields that the gateway itself needs are judged. A wrong one is `BadRequest` with its name in `param`; all
   others, known or not, are the worker's to judge, and the worker gets the bytes as they came.
3. A field is a member of the top-level object. Text inside a prompt is never looked at.
4. Where the body is right but its tokens cannot be told from it, or cached blocks are of no use to it, the prompt is
   `NoPrompt` with the reason: `endpoint` (never run, or not one prompt), `malformed` (the worker will
   refuse it), `truncated`, `prompt_embeds`, `multimodal`, `session` (continues a prompt that lives on the worker),
   `prompt_logprobs` (the worker computes the whole prompt anew).

The native endpoints (`/tokenize`, `/detokenize`, `/generate`) may leave `model` out: then it is "", the only model.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping

import msgspec

from gateway.api.asking import SALTED, tenant_salt
from gateway.api.converted import of_messages, of_responses
from gateway.api.pieces import Pieces, count_values
from gateway.errors import BadRequest
from gateway.records import (
    ChatPrompt,
    Endpoint,
    InferenceRequest,
    NoPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
)

Fields = Mapping[str, object]

_decode = msgspec.json.Decoder().decode

_NO_FIELDS: Mapping[str, object] = {}

# Endpoints whose stream carries usage only when `stream_options.include_usage` asks for it.
_USAGE_ON_DEMAND = frozenset({Endpoint.CHAT, Endpoint.COMPLETIONS})
_MODEL_OPTIONAL = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE, Endpoint.GENERATE})

_SELDOM = frozenset(
    {
        "cache_salt",
        "extra_key",
        "lora_path",
        "n",
        "priority",
        "sampling_params",
        "session_id",
        "stream_options",
    }
)
"""Fields of any endpoint that most bodies lack: one look tells, instead of one for each."""
_SELDOM_IN_CHATS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "echo",
        "prompt_logprobs",
        "reasoning_effort",
        "tool_choice",
        "tools",
        "truncate_prompt_tokens",
    }
)
"""The same of a chat's prompt."""

_MAX_SESSION_CHARS = 1024
"""Longer values of the affinity field are no session names; such a request simply has no session."""

_COUNTED_FROM_BYTES = 1 << 20


def parse_request(
    endpoint: Endpoint,
    body: bytes,
    *,
    request_id: str,
    session: str | None = None,
    affinity_field: str | None = None,
    priority: int = 0,
    tenant: str | None = None,
    salted: bool = False,
    labels: frozenset[str] | None = None,
    least_priority: int | None = None,
) -> InferenceRequest:
    """Read a request body.

    `session` and `priority` come from headers: the session header wins over the body's `affinity_field`, the body's
    `priority` over the header's (as in vLLM: lower is served first). `usage_asked` is also true where a stream has
    its usage without being asked (every endpoint but chat and completions). `salted`: the request's cache salt becomes
    one of its tenant's own, as `ask_for_salt` writes it into the body. `labels` are those of workers its key allows.
    A better priority than `least_priority` becomes that one; None: any is fine.

    Raises BadRequest: not UTF-8, not JSON, nested too deeply, not an object, or a field of the gateway's is wrong.
    """
    fields = _object(body)
    model = fields.get("model")
    if type(model) is not str or not model:
        if model is not None or endpoint not in _MODEL_OPTIONAL:
            raise BadRequest("'model' must be a non-empty string", param="model")
        model = ""
    stream = _flag(fields, "stream", False)
    options: Mapping[str, object] | None = None
    body_priority = choices = salt = None
    extra_key: object = None
    adapters: tuple[str, ...] = ()
    engine_session = False
    sampling = _NO_FIELDS if endpoint is Endpoint.GENERATE else fields
    if not _SELDOM.isdisjoint(fields):
        if endpoint in _USAGE_ON_DEMAND:
            options = _stream_options(fields)
        body_priority = _whole(fields, "priority", None)
        if endpoint is Endpoint.GENERATE:
            sampling = _sampling(fields)
        choices = _whole(sampling, "n", 1)
        salt = _text(fields, "cache_salt")
        extra_key = _extra_key(fields)
        adapters = _adapters(fields.get("lora_path"))
        engine_session = fields.get("session_id") is not None
    if body_priority is not None:
        priority = body_priority
    lowered = least_priority is not None and priority < least_priority
    if session is None and affinity_field is not None:
        session = _session(fields.get(affinity_field))
    if salted and tenant is not None and endpoint in SALTED:
        native = endpoint is Endpoint.GENERATE
        salt = tenant_salt(tenant, salt, extra_key if native else None)
        if native:
            extra_key = None  # `ask_for_salt` writes the salt in its place
    return InferenceRequest(
        endpoint=endpoint,
        request_id=request_id,
        model=model,
        prompt=_prompt(endpoint, fields, body),
        stream=stream,
        usage_asked=endpoint not in _USAGE_ON_DEMAND or (options is not None and options.get("include_usage") is True),
        session=session,
        tenant=tenant,
        cache_salt=salt,
        priority=priority if least_priority is None or not lowered else least_priority,
        priority_taken=lowered and body_priority is not None and body_priority < 0,
        max_tokens=_max_tokens(endpoint, sampling),
        choices=1 if choices is None else choices,
        stream_options=options,
        body_bytes=len(body),
        labels=labels,
        adapters=adapters,
        engine_session=engine_session,
        extra_key=None if extra_key is None else _one_extra_key(endpoint, extra_key),
    )


# --------------------------------------------------------------------------- JSON


def _object(body: bytes) -> Fields:
    if len(body) > _COUNTED_FROM_BYTES:
        count_values(body)
        try:
            return Pieces(body, _value)
        except (UnicodeDecodeError, RecursionError, msgspec.MsgspecError):
            pass  # the decoder of the whole has the words for it, or accepts more
    fields = _value(body)
    if type(fields) is not dict:
        raise BadRequest("the body must be a JSON object", code="invalid_json")
    return fields


def _value(text: bytes | msgspec.Raw) -> object:
    """The whole body, or one value of it."""
    try:
        return _decode(text)
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from error
    except msgspec.MsgspecError:
        return _exact(bytes(text))


def _exact(body: bytes) -> object:
    """Decode with the engines' own decoder: slower, final."""
    try:
        return json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid UTF-8 at byte {error.start}", code="invalid_json") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error.msg} at {error.pos}", code="invalid_json") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:  # an integer above the interpreter's limit of digits
        raise BadRequest("the body has a number with too many digits", code="invalid_json") from error


# --------------------------------------------------------------------------- fields


def _flag(fields: Mapping[str, object], name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if value is True:
        return True
    if value is False:
        return False
    raise BadRequest(f"'{name}' must be true or false", param=name)


def _text(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None or type(value) is str:
        return value
    raise BadRequest(f"'{name}' must be a string", param=name)


def _whole(fields: Mapping[str, object], name: str, least: int | None) -> int | None:
    """A whole number; 12.0 is one (JSON does not know the difference), true and "12" are not."""
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise BadRequest(f"'{name}' must be a whole number", param=name)
    if least is not None and value < least:
        raise BadRequest(f"'{name}' must be at least {least}", param=name)
    return value


def _stream_options(fields: Mapping[str, object]) -> Mapping[str, object] | None:
    options = fields.get("stream_options")
    if options is None:
        return None
    if type(options) is not dict:
        raise BadRequest("'stream_options' must be an object", param="stream_options")
    asked = options.get("include_usage")
    if asked is not None and type(asked) is not bool:
        raise BadRequest("'stream_options.include_usage' must be true or false", param="stream_options.include_usage")
    return options


def _sampling(fields: Mapping[str, object]) -> Mapping[str, object]:
    """SGLang's `sampling_params`; a list of them (one a prompt) is not looked into."""
    sampling = fields.get("sampling_params")
    return sampling if type(sampling) is dict else _NO_FIELDS


def _max_tokens(endpoint: Endpoint, fields: Mapping[str, object]) -> int | None:
    if endpoint is Endpoint.GENERATE:
        return _whole(fields, "max_new_tokens", 0)
    if endpoint is Endpoint.RESPONSES:
        return _whole(fields, "max_output_tokens", 0)
    limit = _whole(fields, "max_tokens", 0)
    if endpoint is Endpoint.CHAT:
        newer = _whole(fields, "max_completion_tokens", 0)
        return limit if newer is None else newer
    return limit


def _adapters(value: object) -> tuple[str, ...]:
    """Of SGLang's `lora_path`: a name, or one for each prompt. Anything else is the engine's to refuse."""
    named = value if type(value) is list else (value,)
    return tuple(name for name in named if type(name) is str and name)


def _extra_key(fields: Mapping[str, object]) -> object:
    """SGLang's own separation of cached prompts: a text, or one a prompt."""
    value = fields.get("extra_key")
    if type(value) is list:
        return [key for key in value if type(key) is str]
    return value if type(value) is str else None


def _one_extra_key(endpoint: Endpoint, value: object) -> str | None:
    """As one text; none where the engine takes it for none: an empty one, except on its native path."""
    if type(value) is not str:
        return json.dumps(value)
    return value if value or endpoint is Endpoint.GENERATE else None


def _session(value: object) -> str | None:
    if type(value) is int:
        value = str(value) if abs(value) < 1 << 63 else None
    if type(value) is str and 0 < len(value) <= _MAX_SESSION_CHARS:
        return value
    return None


# --------------------------------------------------------------------------- prompts


def _prompt(endpoint: Endpoint, fields: Fields, body: bytes) -> Prompt:
    match endpoint:
        case Endpoint.CHAT:
            prompt = _chat(fields, generation_prompt=True)
            return NoPrompt("prompt_logprobs") if _scores_prompt(fields, echoed=0) else prompt
        case Endpoint.COMPLETIONS:
            prompt = _completion(fields, body)
            return NoPrompt("prompt_logprobs") if _scores_prompt(fields, echoed=fields.get("logprobs")) else prompt
        case Endpoint.GENERATE:
            return _generate(fields, body)
        case Endpoint.EMBEDDINGS:
            if fields.get("messages") is not None:
                return _chat(fields, generation_prompt=False)
            return _plain(fields, "input", fields.get("input"), body)
        case Endpoint.MESSAGES:
            return of_messages(fields)
        case Endpoint.RESPONSES:
            return of_responses(fields)
        case _:
            return NoPrompt("endpoint")


def _scores_prompt(fields: Fields, *, echoed: object) -> bool:
    """Whether vLLM computes log probabilities of the prompt, for which it does not look into its prefix cache.

    `echoed`: how many alternatives a token of an echoed prompt has, None for no probabilities at all. A chat's echo
    has them always.
    """
    return fields.get("prompt_logprobs") is not None or (echoed is not None and bool(fields.get("echo")))


def _chat(fields: Fields, *, generation_prompt: bool) -> Prompt:
    messages = fields.get("messages")
    if type(messages) is not list or not messages:
        raise BadRequest("'messages' must be a non-empty list of objects", param="messages")
    for message in messages:
        if type(message) is not dict:
            raise BadRequest("'messages' must be a non-empty list of objects", param="messages")
    if _SELDOM_IN_CHATS.isdisjoint(fields):
        return ChatPrompt(messages, template_kwargs=_NO_FIELDS, add_generation_prompt=generation_prompt)
    get = fields.get
    tools, documents, kwargs = get("tools"), get("documents"), get("chat_template_kwargs")
    effort, template = get("reasoning_effort"), get("chat_template")
    if (
        not _objects(tools)
        or not _objects(documents)
        or not (kwargs is None or type(kwargs) is dict)
        or not (effort is None or type(effort) is str)
        or not (template is None or type(template) is str)
    ):
        return NoPrompt("malformed")
    if _truncates(fields):
        return NoPrompt("truncated")
    return ChatPrompt(
        messages=messages,
        tools=tools or None,  # type: ignore[arg-type]  # checked by _objects, which mypy cannot see
        tool_choice=get("tool_choice"),
        template_kwargs=kwargs or _NO_FIELDS,
        add_generation_prompt=_flag(fields, "add_generation_prompt", generation_prompt),
        continue_final_message=_flag(fields, "continue_final_message", False),
        add_special_tokens=_flag(fields, "add_special_tokens", False),
        documents=documents,  # type: ignore[arg-type]
        reasoning_effort=effort,
        chat_template=template,
    )


def _completion(fields: Fields, body: bytes) -> Prompt:
    prompt = fields.get("prompt")
    if prompt is None and fields.get("prompt_embeds") is not None:
        return NoPrompt("prompt_embeds")
    return _plain(fields, "prompt", prompt, body)


def _generate(fields: Fields, body: bytes) -> Prompt:
    if fields.get("session_params") is not None:
        return NoPrompt("session")
    for media in ("image_data", "audio_data", "video_data"):
        if fields.get(media) is not None:
            return NoPrompt("multimodal")
    ids = fields.get("input_ids")
    if ids is not None:
        return _plain(fields, "input_ids", ids, body)
    if fields.get("text") is None and fields.get("input_embeds") is not None:
        return NoPrompt("prompt_embeds")
    return _plain(fields, "text", fields.get("text"), body)


def _plain(fields: Fields, name: str, value: object, body: bytes) -> Prompt:
    """A text, texts, token ids, or lists of token ids."""
    prompt = _texts_or_tokens(name, value, body, add_special_tokens=_flag(fields, "add_special_tokens", True))
    return NoPrompt("truncated") if _truncates(fields) else prompt


def _texts_or_tokens(name: str, value: object, body: bytes, *, add_special_tokens: bool) -> Prompt:
    if type(value) is str and value:
        return TextPrompt((value,), add_special_tokens)
    if type(value) is list and value:
        match value[0]:
            case str():
                if set(map(type, value)) == {str} and "" not in value:
                    return TextPrompt(tuple(value), add_special_tokens)
            case list():
                if set(map(type, value)) == {list}:
                    flags = _has_flags(body)
                    return TokenPrompt(tuple(_token_ids(name, ids, flags=flags) for ids in value))
            case dict() if name == "input":  # embeddings of image and text pairs
                return NoPrompt("multimodal")
            case _:
                return TokenPrompt((_token_ids(name, value, flags=_has_flags(body)),))
    raise BadRequest(
        f"'{name}' must be a non-empty string, list of strings, list of token ids or list of lists of token ids",
        param=name,
    )


def _has_flags(body: bytes) -> bool:
    """A search of the bytes, once a body, is cheaper than a look at every token id's type: `array` takes true for 1."""
    return b"true" in body or b"false" in body


def _token_ids(name: str, values: list[object], *, flags: bool) -> array[int]:
    try:
        ids: array[int] = array("I", values)  # type: ignore[arg-type]  # array itself refuses what is no int
    except OverflowError as error:
        raise BadRequest(f"'{name}' has a token id outside 0 to 4294967295", param=name) from error
    except TypeError as error:
        raise BadRequest(f"'{name}' mixes token ids with something else", param=name) from error
    if not ids:
        raise BadRequest(f"'{name}' has an empty prompt", param=name)
    if flags and bool in set(map(type, values)):
        raise BadRequest(f"'{name}' mixes token ids with something else", param=name)
    return ids


def _truncates(fields: Fields) -> bool:
    """-1 means the model's length: a longer prompt than that is refused anyway."""
    limit = fields.get("truncate_prompt_tokens")
    return limit is not None and limit != -1


def _objects(value: object) -> bool:
    return value is None or (type(value) is list and all(type(item) is dict for item in value))
