"""The JSON of engines' answers, as far as `usage` and `sse` read it: shapes and their decoders.

Apart from those two, which are compiled for a release (`setup.py`), as msgspec makes these classes by a metaclass.
"""

from __future__ import annotations

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class WireUsage(msgspec.Struct):
    """The `usage` object of all dialects together; what one lacks stays None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cached_tokens: int | None = None


class Answer(msgspec.Struct):
    """A JSON answer or a stream's event. `response` and `message` wrap the usage in streams."""

    usage: WireUsage | None = None
    response: _Wrapped | None = None
    message: _Wrapped | None = None
    meta_info: WireUsage | None = None

    def found(self) -> WireUsage | None:
        """The usage wherever this dialect puts it."""
        for wrapped in (self.response, self.message):
            if wrapped is not None and wrapped.usage is not None:
                return wrapped.usage
        return self.usage or self.meta_info


class _Wrapped(msgspec.Struct):
    usage: WireUsage | None = None


class Chunk(msgspec.Struct):
    """One event of a stream of chat or completions."""

    choices: list[msgspec.Raw] | None = None
    usage: WireUsage | None = None


class ToldEnd(msgspec.Struct):
    """An event as far as it tells of the end. Errors: vLLM and SGLang `{"error": {"type", "code"}}`; Anthropic the same
    with `"type": "error"`; older SGLang flat, `{"object": "error", "type", "code"}`."""

    type: str | None = None
    object: str | None = None
    code: int | str | None = None
    error: Fault | None = None


class Fault(msgspec.Struct):
    """The error inside an event."""

    type: str | None = None
    code: int | str | None = None


decode_answer = msgspec.json.Decoder(Answer).decode
decode_answers = msgspec.json.Decoder(list[Answer]).decode
decode_usage = msgspec.json.Decoder(WireUsage).decode
decode_chunk = msgspec.json.Decoder(Chunk).decode
decode_told = msgspec.json.Decoder(ToldEnd).decode
