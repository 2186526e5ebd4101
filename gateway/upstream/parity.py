"""Whether the gateway finds the same token ids as a worker does.

Keys are made of token ids, so a tokenizer or template that differs from the worker's never gives a wrong hit, only
missing ones: the worker is used all the same, and the operator is told.

Compared are a text and a chat that show what tokenizers differ in: digits, white space, combining marks, contractions,
upper case, other scripts. Asked is `POST /tokenize` (vLLM; SGLang from 0.5.5 on). A worker without that path is sent
the same prompts with `max_tokens` 1 and asked for the prompt's ids: `return_token_ids` (vLLM from 0.10.2, SGLang from
0.5.18), `return_prompt_token_ids` (SGLang from 0.5.13).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway import findings as table
from gateway.errors import UNREADABLE
from gateway.prefix import PromptHasher
from gateway.records import ChatPrompt, Endpoint, Finding, InferenceRequest, Prompt, TextPrompt, WorkerSpec
from gateway.upstream.control import Answer, ControlClient, ProbeFailed

_TEXT = (
    "In 2026,  we'll ship 1024 units (v3.14)!\n\n\tDON'T re\u0301sume\u0301; na\u00efve \u65e5\u672c\u8a9e 42 x==y\n"
)
_MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "You answer in 3 words."},
    {"role": "user", "content": _TEXT},
]
_ASK_FOR_IDS: dict[str, object] = {"max_tokens": 1, "return_token_ids": True, "return_prompt_token_ids": True}

_KINDS: tuple[tuple[Endpoint, Prompt, dict[str, object], table.Kind], ...] = (
    (
        Endpoint.COMPLETIONS,
        TextPrompt((_TEXT,), add_special_tokens=False),
        {"prompt": _TEXT, "add_special_tokens": False},
        table.TOKENIZER_DIFFERS,
    ),
    (Endpoint.CHAT, ChatPrompt(_MESSAGES), {"messages": _MESSAGES}, table.TEMPLATE_DIFFERS),
)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Completed(msgspec.Struct):
    """vLLM's chats have the ids at the top, its completions and all of SGLang's in the choice."""

    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None


async def token_differences(
    spec: WorkerSpec, model: str, hasher: PromptHasher, client: ControlClient
) -> tuple[Finding, ...]:
    """Findings for the operator; none when the ids agree. Raises ProbeFailed when the worker cannot answer now."""
    if hasher.known is not None:
        return ()  # the ids are the engine's own
    if hasher.tokenizer is None:
        return (table.NO_TOKENIZER.found(model=model),)
    if not hasher.renders_chats:
        return (table.NO_CHAT_TEMPLATE.found(model=model),)
    for endpoint, prompt, body, differs in _KINDS:
        ours = hasher.token_ids(InferenceRequest(endpoint, "parity", model, prompt))
        if not ours:
            continue
        theirs = await _theirs(spec, endpoint, {"model": model, **body}, client)
        if theirs is None:
            return (table.TOKENS_UNCHECKED.found(reason="the worker does not tell the token ids of a prompt"),)
        if list(ours[0]) != theirs:
            return (differs.found(at=_first_difference(ours[0], theirs)),)
    return ()


async def _theirs(
    spec: WorkerSpec, endpoint: Endpoint, body: dict[str, object], client: ControlClient
) -> list[int] | None:
    asked = await _post(spec, "/tokenize", body, client)
    try:
        if asked.status == 200:
            return msgspec.json.decode(asked.body, type=_Tokenized).tokens
        ran = await _post(spec, endpoint.value, body | _ASK_FOR_IDS, client)
        if ran.status != 200:
            return None
        said = msgspec.json.decode(ran.body, type=_Completed)
    except UNREADABLE:
        return None
    return said.prompt_token_ids or next((choice.prompt_token_ids for choice in said.choices), None)


async def _post(spec: WorkerSpec, path: str, body: dict[str, object], client: ControlClient) -> Answer:
    answer = await client.post(spec.url + path, msgspec.json.encode(body), api_key=spec.api_key)
    if answer.status >= 500 or answer.status == 429:
        raise ProbeFailed(f"{spec.url}{path} answered {answer.status}")
    return answer


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
