"""Answers of a simulated engine, in the bytes vLLM 0.32 sends: whole JSON bodies and server-sent events.

Field order and nulls follow captured answers. An `Answer` belongs to one request; it knows texts and counts and
formats them. `Answers` is the face it shares with SGLang's (`gateway.sim.sglang_http`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.sim.openai_asks import Ask

DONE = b"data: [DONE]\n\n"
GARBAGE = b'data: {"id": "chatcmpl-\n\n'


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one request, over all its prompts and answers. `created` are prompt tokens newly cached."""

    prompt: int
    completion: int
    cached: int
    created: int


@dataclass(frozen=True, slots=True)
class Text:
    """One finished answer: its text, token ids and the ids of its prompt, of which `cached_tokens` were cached."""

    text: str
    token_ids: Sequence[int]
    prompt_ids: Sequence[int]
    cached_tokens: int = 0


def as_json(value: object) -> str:
    """As the engines write it: nothing between the parts, every character as it is."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def as_bytes(text: str) -> bytes:
    """What cannot be encoded becomes a question mark."""
    return text.encode("utf-8", "replace")


def chunk_head(ask: Ask, *, answer_id: str, created: int) -> str:
    """How every event of a stream begins, up to its choices."""
    kind = "chat.completion.chunk" if ask.chat else "text_completion"
    head = f'"id":{as_json(answer_id)},"object":"{kind}","created":{created},"model":{as_json(ask.model)}'
    return f'data: {{{head},"choices":['


def body_head(ask: Ask, *, answer_id: str, created: int, choices: Sequence[object]) -> dict[str, object]:
    """How every whole answer begins, choices included."""
    kind = "chat.completion" if ask.chat else "text_completion"
    return {"id": answer_id, "object": kind, "created": created, "model": ask.model, "choices": choices}


class Answers(Protocol):
    """What is sent for one request, in the engine's own bytes. It decides nothing and sends nothing."""

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> bytes:
        """What goes before an answer's first text in a stream; may be nothing."""

    def piece(
        self,
        choice: int,
        text: str,
        *,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int],
        done: int,
        finish: str | None,
        cached: int = 0,
    ) -> bytes:
        """Text of one or more tokens; `done` counts the answer's tokens so far, `finish` ends it, `cached` are the
        prompt tokens that were cached."""

    def closing(self, counts: Counts) -> bytes:
        """What ends a stream."""

    def whole(self, texts: Sequence[Text], counts: Counts) -> bytes:
        """The body of a request without a stream."""


class Answer:
    """Formats everything sent for one request. `details` adds `prompt_tokens_details` to usage."""

    def __init__(self, ask: Ask, *, answer_id: str, created: int, version: str, details: bool) -> None:
        self._ask = ask
        self._details = details
        self._id = answer_id
        self._created = created
        self._fingerprint = f"vllm-{version}-simulated"
        self._chunk_head = chunk_head(ask, answer_id=answer_id, created=created)

    # ---------------------------------------------------------------- stream

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> bytes:
        """The role event of a chat stream; nothing for completions, which start with text."""
        if not self._ask.chat:
            return b""
        ids = as_json(list(prompt_ids)) if self._ask.shape.token_ids else "null"
        usage = self._running_usage(len(prompt_ids), 0)
        return as_bytes(
            f'{self._chunk_head}{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,'
            f'"finish_reason":null}}]{usage},"prompt_token_ids":{ids},"prompt_text":null}}\n\n'
        )

    def piece(
        self,
        choice: int,
        text: str,
        *,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int],
        done: int,
        finish: str | None,
        cached: int = 0,
    ) -> bytes:
        """Text of one or more tokens; `done` counts the answer's tokens so far, `finish` ends it."""
        ask = self._ask
        ids = as_json(list(token_ids)) if ask.shape.token_ids else "null"
        usage = self._running_usage(len(prompt_ids), done)
        reason = f'"finish_reason":{as_json(finish)}'
        if ask.chat:
            stop = ',"stop_reason":null' if finish else ""
            tail = f',"system_fingerprint":{as_json(self._fingerprint)}' if finish and not ask.shape.usage else ""
            return as_bytes(
                f'{self._chunk_head}{{"index":{choice},"delta":{self._delta(text, first=done <= len(token_ids))},'
                f'"logprobs":null,{reason}{stop},"token_ids":{ids}}}]{usage}{tail}}}\n\n'
            )
        shown = as_json(list(prompt_ids)) if ask.shape.token_ids and done <= len(token_ids) else "null"
        return as_bytes(
            f'{self._chunk_head}{{"index":{choice},"text":{as_json(text)},"logprobs":null,{reason},"stop_reason":null,'
            f'"prompt_token_ids":{shown},"token_ids":{ids}}}]{usage}}}\n\n'
        )

    def closing(self, counts: Counts) -> bytes:
        """The usage event, when asked for, and the end mark."""
        if not self._ask.shape.usage:
            return DONE
        usage = as_json(self._usage(counts, whole=False))
        made_by = as_json(self._fingerprint)
        return as_bytes(f'{self._chunk_head}],"usage":{usage},"system_fingerprint":{made_by}}}\n\n') + DONE

    # ---------------------------------------------------------------- whole

    def whole(self, texts: Sequence[Text], counts: Counts) -> bytes:
        """The body of a request without a stream."""
        ask = self._ask
        choices = [self._choice(number, text) for number, text in enumerate(texts)]
        head = body_head(ask, answer_id=self._id, created=self._created, choices=choices) | {
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": self._usage(counts, whole=True),
        }
        if ask.chat:
            shown = list(texts[0].prompt_ids) if ask.shape.token_ids else None
            head |= {"prompt_logprobs": None, "prompt_token_ids": shown, "prompt_text": None}
        return as_bytes(as_json(head | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}))

    # ---------------------------------------------------------------- parts

    def _choice(self, number: int, text: Text) -> dict[str, object]:
        ask = self._ask
        ids = list(text.token_ids) if ask.shape.token_ids else None
        ending = {"logprobs": None, "finish_reason": ask.finish, "stop_reason": None, "token_ids": ids}
        if not ask.chat:
            shown = list(text.prompt_ids) if ask.shape.token_ids else None
            extra = {"prompt_logprobs": None, "prompt_token_ids": shown, "routed_experts": None}
            return {"index": number, "text": text.text} | ending | extra
        message: dict[str, object] = {"role": "assistant", "content": text.text}
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None, "reasoning": None}
        if ask.tool_call is not None:
            function = {"name": ask.tool_call.name, "arguments": ask.tool_call.arguments}
            call = {"id": self._call_id(), "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
            ending["finish_reason"] = "tool_calls"
        return {"index": number, "message": message} | ending | {"routed_experts": None}

    def _delta(self, text: str, *, first: bool) -> str:
        call = self._ask.tool_call
        if call is None:
            return f'{{"content":{as_json(text)}}}'
        opening = f'"id":{as_json(self._call_id())},"type":"function",' if first else ""
        name = f'"name":{as_json(call.name)},' if first else ""
        return f'{{"tool_calls":[{{{opening}"index":0,"function":{{{name}"arguments":{as_json(text)}}}}}]}}'

    def _call_id(self) -> str:
        return "chatcmpl-tool-" + self._id.rpartition("-")[2]

    def _running_usage(self, prompt: int, done: int) -> str:
        if not self._ask.shape.running_usage:
            return ""
        counts = {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}
        return f',"usage":{as_json(counts | {"completion_tokens_details": None})}'

    def _usage(self, counts: Counts, *, whole: bool) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": counts.prompt,
            "total_tokens": counts.prompt + counts.completion,
            "completion_tokens": counts.completion,
        }
        chat = self._ask.chat
        if self._details:
            details: dict[str, object] = {"cached_tokens": counts.cached}
            if chat or whole:
                details["created_cache_tokens"] = counts.created if chat else None
            if whole:
                details["multimodal_tokens"] = None
            usage["prompt_tokens_details"] = details
        elif whole:
            usage["prompt_tokens_details"] = None
        return usage | {"completion_tokens_details": None} if whole else usage
