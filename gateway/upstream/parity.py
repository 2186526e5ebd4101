"""Whether the gateway finds the same token ids as a worker does.

Keys are made of token ids, so a tokenizer or template that differs from the worker's never gives a wrong hit, only
missing ones: the worker is used all the same, and the operator is told.

Asked is the worker's own `POST /tokenize` (vLLM; SGLang from 0.5.5 on), with a text and a chat that show what
tokenizers differ in: digits, white space, combining marks, contractions, upper case, other scripts.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway import findings as table
from gateway.prefix import PromptHasher
from gateway.records import ChatPrompt, Endpoint, Finding, InferenceRequest, Prompt, TextPrompt, WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed

_TEXT = (
    "In 2026,  we'll ship 1024 units (v3.14)!\n\n\tDON'T re\u0301sume\u0301; na\u00efve \u65e5\u672c\u8a9e 42 x==y\n"
)
_MESSAGES: list[dict[str, object]] = [
    {"role": "system", "content": "You answer in 3 words."},
    {"role": "user", "content": _TEXT},
]


class _Tokenized(msgspec.Struct):
    tokens: list[int]


async def token_differences(
    spec: WorkerSpec, model: str, hasher: PromptHasher, client: ControlClient
) -> tuple[Finding, ...]:
    """Findings for the operator; none when the ids agree, or the worker has no `/tokenize` to compare with."""
    if hasher.tokenizer is None:
        return (table.NO_TOKENIZER.found(model=model),)
    if not hasher.renders_chats:
        return (table.NO_CHAT_TEMPLATE.found(model=model),)
    asks: tuple[tuple[str, Prompt, dict[str, object]], ...] = (
        ("text", TextPrompt((_TEXT,), add_special_tokens=False), {"prompt": _TEXT, "add_special_tokens": False}),
        ("chat", ChatPrompt(_MESSAGES), {"messages": _MESSAGES, "add_generation_prompt": True}),
    )
    for kind, prompt, body in asks:
        endpoint = Endpoint.CHAT if kind == "chat" else Endpoint.COMPLETIONS
        ours = hasher.token_ids(InferenceRequest(endpoint, "parity", model, prompt))
        theirs = await _theirs(spec, model, body, client)
        if ours and theirs is not None and list(ours[0]) != theirs:
            row = table.TOKENIZER_DIFFERS if kind == "text" else table.TEMPLATE_DIFFERS
            return (row.found(at=_first_difference(ours[0], theirs)),)
    return ()


async def _theirs(spec: WorkerSpec, model: str, body: dict[str, object], client: ControlClient) -> list[int] | None:
    raw = msgspec.json.encode({"model": model, **body})
    try:
        answer = await client.post(f"{spec.url}/tokenize", raw, api_key=spec.api_key)
        return msgspec.json.decode(answer.body, type=_Tokenized).tokens if answer.status == 200 else None
    except (ProbeFailed, msgspec.MsgspecError):
        return None


def _first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
