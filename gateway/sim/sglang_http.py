"""What a simulated SGLang worker reads and says where it differs from vLLM: `/generate`, answers, errors, the rank.

Field order and nulls follow captured answers (0.5.23). Differences that gateways meet: a chat stream ends its text and
gives the finish reason in two events, ids of tokens stand in each choice, refusals are flat, cached tokens are
reported with a flag only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.sim.openai_answers import DONE, Counts, Text, as_bytes, as_json, body_head, chunk_head
from gateway.sim.openai_asks import (
    ApiError,
    Ask,
    Body,
    Rules,
    Shape,
    check_length,
    extra_key_of,
    is_tokens,
    model_of,
    salt_of,
    session_of,
    text_tokens,
)
from gateway.sim.releases import Release
from gateway.sim.speech import Speech

_DEFAULT_NEW_TOKENS = 128
"""Of `/generate`, as SGLang's sampling parameters have it."""


# --------------------------------------------------------------------------- asking


def parse_generate(body: Body, rules: Rules, *, speech: Speech) -> Ask:
    """A `/generate` request with one text, list of token ids, or a list of either. Raises ApiError."""
    given = body.get("input_ids") if body.get("text") is None else body.get("text")
    items = given if isinstance(given, list) and given and not isinstance(given[0], int) else [given]
    prompts = [_prompt(item, speech) for item in items]
    sampling = body.get("sampling_params") or {}
    if not isinstance(sampling, dict):
        raise ApiError(400, "sampling_params must be a dictionary")
    named = {"max_new_tokens": sampling.get("max_new_tokens") or _DEFAULT_NEW_TOKENS}
    finish, output = check_length(named, rules, prompts, names=("max_new_tokens",))
    model, adapter = model_of({"lora_path": body.get("lora_path")}, rules)
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
        shape=Shape(stream=body.get("stream") is True),
    )


def rank_of(body: Body, headers: Mapping[str, str], release: Release, *, native: bool) -> object:
    """The data-parallel rank the request names, unchecked; None for none. The header wins over the body, and is not
    read on the native path (`entrypoints/openai/serving_base.py`, `entrypoints/http_server.py`)."""
    if release < (0, 5, 10):
        return body.get("data_parallel_rank")
    named = None if native else headers.get("x-data-parallel-rank")
    return body.get("routed_dp_rank") if named is None else named


def error_body(error: ApiError) -> bytes:
    """`{"object": "error", "message", "type", "param", "code"}`."""
    flat = {"object": "error", "message": error.message, "type": error.type_name, "param": None, "code": error.status}
    return as_bytes(as_json(flat))


def _prompt(item: object, speech: Speech) -> list[int]:
    if isinstance(item, str):
        item = text_tokens(item, speech, special=True)
    if not isinstance(item, list) or not item or not is_tokens(item):
        raise ApiError(400, "Either text, input_ids or input_embeds should be provided.")
    return item


# --------------------------------------------------------------------------- answering


class SglangAnswer:
    """Formats everything sent for one OpenAI request. `details` adds `prompt_tokens_details` to usage."""

    def __init__(self, ask: Ask, *, answer_id: str, created: int, details: bool) -> None:
        self._ask = ask
        self._id = answer_id
        self._created = created
        self._details = details
        self._chunk_head = chunk_head(ask, answer_id=answer_id, created=created)

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> bytes:
        """The role event of a chat stream; nothing for completions."""
        if not self._ask.chat:
            return b""
        return self._event(choice, {"reasoning_content": None, "role": "assistant", "content": ""}, None, "")

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
        """Text of one or more tokens; a chat's finish reason follows in an event of its own."""
        usage = ""
        if self._ask.shape.running_usage:
            usage = f',"usage":{as_json(self._usage(len(prompt_ids), done, cached))}'
        if not self._ask.chat:
            row = {"index": choice, "text": text, "logprobs": None, "finish_reason": finish, "matched_stop": None}
            usage = usage or ',"usage":null'
            return as_bytes(f"{self._chunk_head}{as_json(row)}]{usage}}}\n\n")
        call = self._ask.tool_call
        delta: dict[str, object] = {"reasoning_content": None, "content": text}
        if call is not None:
            first = done <= len(token_ids)
            function = ({"name": call.name} if first else {}) | {"arguments": text}
            opening = {"id": self._call_id(), "type": "function"} if first else {}
            delta = {"reasoning_content": None, "tool_calls": [opening | {"index": 0, "function": function}]}
        event = self._event(choice, delta, None, usage)
        if finish is None:
            return event
        return event + self._event(choice, {"reasoning_content": None}, finish, usage)

    def closing(self, counts: Counts) -> bytes:
        """The usage event, when asked for, and the end mark."""
        if not self._ask.shape.usage:
            return DONE
        usage = self._usage(counts.prompt, counts.completion, counts.cached)
        return as_bytes(f'{self._chunk_head}],"usage":{as_json(usage)}}}\n\n') + DONE

    def whole(self, texts: Sequence[Text], counts: Counts) -> bytes:
        """The body of a request without a stream."""
        ask = self._ask
        longest = max(len(text.token_ids) for text in texts)
        choices = [self._choice(number, text) for number, text in enumerate(texts)]
        body = body_head(ask, answer_id=self._id, created=self._created, choices=choices) | {
            "usage": self._usage(counts.prompt, counts.completion, counts.cached),
            "metadata": {"weight_version": "default", "weight_versions": _weight_versions(longest)},
        }
        return as_bytes(as_json(body))

    def _event(self, choice: int, delta: dict[str, object], finish: str | None, usage: str) -> bytes:
        row = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": finish, "matched_stop": None}
        return as_bytes(f"{self._chunk_head}{as_json(row)}]{usage}}}\n\n")

    def _choice(self, number: int, text: Text) -> dict[str, object]:
        ask = self._ask
        ending: dict[str, object] = {"logprobs": None, "finish_reason": ask.finish, "matched_stop": None}
        if ask.shape.token_ids:
            ending |= {"prompt_token_ids": list(text.prompt_ids), "response_token_ids": list(text.token_ids)}
        if not ask.chat:
            return {"index": number, "text": text.text} | ending
        message: dict[str, object] = {"role": "assistant", "content": text.text, "reasoning_content": None}
        if ask.tool_call is not None:
            function = {"name": ask.tool_call.name, "arguments": ask.tool_call.arguments}
            call = {"id": self._call_id(), "index": 0, "type": "function", "function": function}
            message |= {"content": None, "tool_calls": [call]}
            ending["finish_reason"] = "tool_calls"
        return {"index": number, "message": message} | ending

    def _call_id(self) -> str:
        return f"call_{self._id[:24]}"

    def _usage(self, prompt: int, completion: int, cached: int) -> dict[str, object]:
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": cached} if self._details else None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }


class GenerateAnswer:
    """Formats answers of `/generate`: each event has the whole text so far and the cached tokens, always."""

    def __init__(self, ask: Ask, *, answer_id: str, rank: int | None) -> None:
        self._ask = ask
        self._id = answer_id
        self._rank = rank
        self._said: dict[int, tuple[str, list[int]]] = {}

    def opening(self, choice: int, prompt_ids: Sequence[int]) -> bytes:
        """Nothing goes before the text."""
        return b""

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
        """Everything of one answer until now."""
        before, ids = self._said.get(choice, ("", []))
        self._said[choice] = said, known = before + text, [*ids, *token_ids]
        row = self._row(choice, Text(said, known, prompt_ids, cached), finish)
        if len(self._ask.prompts) > 1:
            row["index"] = choice
        return as_bytes(f"data: {as_json(row)}\n\n")

    def closing(self, counts: Counts) -> bytes:
        """The end mark."""
        return DONE

    def whole(self, texts: Sequence[Text], counts: Counts) -> bytes:
        """One object, or a list of them for a list of prompts."""
        rows = [self._row(number, text, self._ask.finish) for number, text in enumerate(texts)]
        return as_bytes(as_json(rows if len(rows) > 1 else rows[0]))

    def _row(self, number: int, text: Text, finish: str | None) -> dict[str, object]:
        count = len(text.token_ids)
        meta: dict[str, object] = {
            "id": self._id if len(self._ask.prompts) == 1 else f"{self._id}_{number}",
            "finish_reason": None if finish is None else {"type": finish, "length": count},
            "prompt_tokens": len(text.prompt_ids),
            "weight_version": "default",
            "num_retractions": 0,
            "reasoning_tokens": 0,
            "completion_tokens": count,
            "cached_tokens": text.cached_tokens,
            "cached_tokens_details": None,
            "dp_rank": self._rank,
        }
        if finish is not None:
            meta["weight_versions"] = _weight_versions(count)
        return {"text": text.text, "output_ids": list(text.token_ids), "meta_info": meta}


def _weight_versions(end: int) -> list[dict[str, object]]:
    return [{"version": "default", "start": 0, "end": end}]
