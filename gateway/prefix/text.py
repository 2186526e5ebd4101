"""A prompt's text -> block keys, for prompts whose token ids cannot be known here.

Rules:
1. The text is what the client sent, in the order templates print it: what stands in front of a conversation (tools,
   documents, the template's variables), then role and content of each message. Equal beginnings give equal keys; that
   the engine prints it differently does not matter, since it prints equal prompts equally.
2. Blocks are of `BLOCK_BYTES` bytes, chained as token blocks are (`gateway.keys`), from a seed of their own: a key of
   text is never one of tokens, and adapter and cache salt keep tenants apart as there.
3. What is no text (an image, audio) is its digest, over as many bytes as an engine makes tokens of it, roughly.
4. Nothing of the text is kept: only keys leave this module.

How many tokens a block is, is an estimate from the worker's own usage reports (`PoolRates.bytes_a_token`).
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping

from xxhash import xxh3_64_hexdigest

from gateway import keys
from gateway.prefix.messages import Unrenderable, plain_text, without_billing
from gateway.records import BlockKey, Chain, ChatPrompt, PrefixBlocks, PrefixMode, TextPrompt, TokenPrompt

BLOCK_BYTES = 256
"""Some 64 tokens of English. Half of it is lost at the end of an overlap on average; half the size would cost twice the
time and memory for 16 tokens more."""

MEDIA_BYTES = 2048
"""Length of an image in the text: 512 tokens or so, between a thumbnail's 256 and a page's thousands."""

_SEED = b"text"
_TOKENS = b"tokens"
_MESSAGE = "\x1e"
_CONTENT = "\x1f"
_WORD = 4
"""Bytes of a token id."""

_PLAIN = keys.with_extra(keys.namespace(), _SEED)
"""Seed of most texts: without adapter and salt."""


def text_blocks(
    prompt: ChatPrompt | TextPrompt | TokenPrompt,
    *,
    adapter: str | None,
    salt: str | None,
    bytes_a_token: float,
    reason: str,
    extra_key: str | None = None,
) -> PrefixBlocks:
    """The blocks of a prompt's text; `reason` says why not of its tokens. Raises Unrenderable (`malformed`).

    Token ids that must not meet those of events are a text as well: their blocks are of as many bytes.
    """
    seed = _PLAIN
    if adapter is not None or salt is not None:
        seed = keys.with_extra(keys.namespace(adapter, salt), _SEED)
    if extra_key is not None:
        seed = keys.with_extra(seed, extra_key.encode("utf-8", "surrogatepass"))
    if isinstance(prompt, TokenPrompt):
        return _of_tokens(prompt, keys.with_extra(seed, _TOKENS), reason)
    size = max(1, round(BLOCK_BYTES / bytes_a_token))
    if isinstance(prompt, ChatPrompt):
        text, media = _chat(prompt)
        chain, length = _chain(seed, text, bytes_a_token)
        tokens = chain.tokens
        return PrefixBlocks((chain,), tokens, size, PrefixMode.APPROXIMATE, reason, 0 if media else length)
    found = [_chain(seed, text, bytes_a_token) for text in prompt.texts]
    return PrefixBlocks(
        tuple([chain for chain, _ in found]),
        sum([chain.tokens for chain, _ in found]),
        size,
        PrefixMode.APPROXIMATE,
        reason,
        sum([length for _, length in found]),
    )


def _of_tokens(prompt: TokenPrompt, seed: BlockKey, reason: str) -> PrefixBlocks:
    """Blocks of `BLOCK_BYTES // _WORD` tokens; nothing is learned from their number of bytes."""
    size = BLOCK_BYTES // _WORD
    chains = tuple([Chain(keys.chain(seed, ids, size), len(ids)) for ids in prompt.token_lists])
    return PrefixBlocks(chains, sum([chain.tokens for chain in chains]), size, PrefixMode.APPROXIMATE, reason)


def _chain(seed: BlockKey, text: str, bytes_a_token: float) -> tuple[Chain, int]:
    """The chain of a text, and its length in bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    length = len(raw)
    return Chain(keys.chain_of_bytes(seed, raw, BLOCK_BYTES), max(1, round(length / bytes_a_token))), length


def _chat(prompt: ChatPrompt) -> tuple[str, bool]:
    """The text of a chat, and whether some of it stands for what is no text."""
    parts: list[str] = []
    front = (prompt.tools, prompt.documents, prompt.template_kwargs, prompt.reasoning_effort, prompt.chat_template)
    if any(front):
        parts.append(_dump(front).decode("latin-1"))
    media = False
    for message in prompt.messages:
        role, content = message.get("role"), message.get("content")
        if type(role) is not str:
            raise Unrenderable("malformed")
        if role == "system":
            content = without_billing(content)
        parts += (_MESSAGE, role, _CONTENT)
        if type(content) is str:
            parts.append(content)
        elif type(content) is list:
            media |= _add_parts(parts, content)
        elif content is not None:
            raise Unrenderable("malformed")
        if len(message) > 2:
            parts.append(_others(message))
    return "".join(parts), media


def _add_parts(parts: list[str], content: list[object]) -> bool:
    """Add the parts of one message; true when one of them is no text."""
    media = False
    for part in content:
        text = plain_text(part)
        if text is not None:
            parts += (text, _CONTENT)
        else:
            media = True
            parts.append(xxh3_64_hexdigest(_dump(part)) * (MEDIA_BYTES // 16))
    return media


def _others(message: Mapping[str, object]) -> str:
    """Tool calls, names, reasoning: whatever else a message has."""
    others = {key: value for key, value in message.items() if key not in ("role", "content")}
    return _dump(others).decode("latin-1")


def _dump(value: object) -> bytes:
    try:
        # Version 2 writes no references: equal values give equal bytes. JSON would be as long, and slower.
        return marshal.dumps(value, 2)  # type: ignore[arg-type]  # JSON values only
    except ValueError as error:  # nested too deeply for it
        raise Unrenderable("malformed") from error
