"""A request as it was read, and its prefix blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct, field

from gateway.records.words import BlockKey, Endpoint, EngineKind


class ChatPrompt(Struct, frozen=True, gc=False):
    """The parts of a chat body that decide its token ids; values are plain JSON (dict, list, str, ...). `exact_for` are
    the engines whose chat this is, where they make it of a body of another API; None: it came as it is."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None = None
    tool_choice: object = None
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Sequence[Mapping[str, object]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    exact_for: frozenset[EngineKind] | None = None


class TextPrompt(Struct, frozen=True, gc=False):
    """Completions: one or several texts, each a prompt of its own."""

    texts: tuple[str, ...]
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Completions: one or several prompts given as token ids."""

    token_lists: tuple[Sequence[int], ...]


@dataclass(frozen=True, slots=True)
class NoPrompt:
    """No prompt whose tokens we could know; `reason` is a short word shown in the decision."""

    reason: str


Prompt = ChatPrompt | TextPrompt | TokenPrompt | NoPrompt


class InferenceRequest(Struct, frozen=True, gc=False):
    """What the gateway reads of a request body. The body itself is forwarded as bytes, never rebuilt.

    `model` is the name the client used. `usage_asked` says that the client itself asked for the usage event of
    a stream (`stream_options.include_usage`). `session` comes from the affinity header or body field.
    `stream_options` is the client's object, `body_bytes` the length of the body. `labels` are those of the workers it
    may go to, None for any. `adapters` are named in the body beside the model, as SGLang takes them (`lora_path`).
    `engine_session`: the body itself names a session for the engine. `extra_key` is SGLang's own separation of cached
    prompts, which other engines do not read. `priority_taken`: its body asks for a better priority than its key allows.
    """

    endpoint: Endpoint
    request_id: str
    model: str
    prompt: Prompt
    stream: bool = False
    usage_asked: bool = False
    session: str | None = None
    tenant: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    max_tokens: int | None = None
    choices: int = 1
    stream_options: Mapping[str, object] | None = None
    body_bytes: int = 0
    labels: frozenset[str] | None = None
    adapters: tuple[str, ...] = ()
    engine_session: bool = False
    extra_key: str | None = None
    priority_taken: bool = False


# --------------------------------------------------------------------------- prefix blocks


class PrefixMode(StrEnum):
    """How the blocks of a request were found: from its token ids (rendered here or by the worker), or from its text."""

    EXACT = "exact"
    ENGINE = "engine"
    APPROXIMATE = "approximate"
    NONE = "none"


class Chain(NamedTuple):
    """One prompt of a request: keys of its full blocks in order, and its length in tokens."""

    keys: Sequence[BlockKey]
    tokens: int


class PrefixBlocks(Struct, frozen=True, gc=False):
    """The blocks of a request, one chain a prompt (a list of prompts has several).

    `mode` is NONE when the tokens are not known: then `chains` is empty, `tokens` an estimate from the body's
    size, and `reason` says why in a word (`no_tokenizer`, `multimodal`, `endpoint`, ...).

    When it is APPROXIMATE the keys are of the prompt's text, in blocks of a fixed number of bytes; `tokens`, those of
    each chain and `block_size` are then estimates, `text_bytes` is the length they were made from (0: not to be learned
    from), and `reason` says why the tokens are not known.

    When it is ENGINE the keys are of token ids that an engine told for the beginning of the prompt, the rest of
    `tokens` is an estimate, and `text` has the blocks of the prompt's text: for workers without events, and until an
    engine has told.
    """

    chains: tuple[Chain, ...]
    tokens: int
    block_size: int
    mode: PrefixMode = PrefixMode.EXACT
    reason: str | None = None
    text_bytes: int = 0
    text: PrefixBlocks | None = None
