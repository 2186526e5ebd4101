"""Keys of a prompt's text: what they depend on, and the estimate of its tokens."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from gateway import keys
from gateway.prefix import PromptHasher, tellable
from gateway.prefix.hasher import CHAIN_INLINE_TOKENS, LOOK_UP_INLINE_BYTES, LOOK_UP_INLINE_PARTS
from gateway.prefix.text import BLOCK_BYTES, MEDIA_BYTES
from gateway.records import BlockKey, PrefixBlocks, PrefixMode, TextPrompt, TokenPrompt
from tests.unit.prefix.test_hasher import chat, completion, request_of

SYSTEM = "You answer for the shop, in one sentence. " * 40
SIZE = 16


def blocks_of(request: Any, *, adapter: str | None = None, bytes_a_token: float = 4.0) -> PrefixBlocks:
    work = PromptHasher.load(None).begin(request, block_size=SIZE, adapter=adapter, bytes_a_token=bytes_a_token)
    work.encode()
    return work.blocks()


def keys_of(request: Any, *, adapter: str | None = None) -> Sequence[BlockKey]:
    (chain,) = blocks_of(request, adapter=adapter).chains
    return chain.keys


def shared(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """Leading keys in common; none behind the first difference."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    length = same.index(False) if False in same else len(same)
    assert not set(one[length:]) & set(other[length:])
    return length


def test_a_longer_conversation_extends_the_keys_of_its_beginning() -> None:
    first, second = keys_of(chat(SYSTEM, "one?" * 100)), keys_of(chat(SYSTEM, "one?" * 100, "yes", "two?" * 100))
    assert shared(first, second) == len(first) == (len(SYSTEM) + 400 + 14) // BLOCK_BYTES


def test_keys_are_those_of_the_text_as_numbers() -> None:
    """Replicas tell each other keys: another way to the same text must not lead elsewhere."""
    words = struct.unpack(f"<{2 * BLOCK_BYTES // 4}I", SYSTEM.encode()[: 2 * BLOCK_BYTES])
    seed = keys.with_extra(keys.namespace(), b"text")
    chain = keys.chain(seed, words, BLOCK_BYTES // 4)
    assert keys_of(completion(SYSTEM[: 2 * BLOCK_BYTES + 5])) == chain
    assert keys.chain_of_bytes(seed, SYSTEM.encode()[: BLOCK_BYTES + 5], BLOCK_BYTES) == chain[:1]
    assert keys.chain_of_bytes(seed, b"", BLOCK_BYTES) == []


def test_what_differs_ends_the_overlap_in_its_block() -> None:
    one, other = keys_of(chat(SYSTEM, "a" * 900)), keys_of(chat(SYSTEM, "b" * 900))
    assert shared(one, other) == len(SYSTEM) // BLOCK_BYTES
    assert shared(keys_of(chat(SYSTEM)), keys_of(chat("!" + SYSTEM))) == 0


def test_roles_and_borders_of_messages_count() -> None:
    one = request_of(messages=[{"role": "user", "content": SYSTEM}, {"role": "user", "content": "x" * 300}])
    glued = request_of(messages=[{"role": "user", "content": SYSTEM + "x" * 300}])
    other_role = request_of(messages=[{"role": "system", "content": SYSTEM}])
    assert shared(keys_of(one), keys_of(glued)) == len(SYSTEM) // BLOCK_BYTES
    assert shared(keys_of(one), keys_of(other_role)) == 0


def test_salts_adapters_and_kinds_never_share() -> None:
    body: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}]}
    plain = keys_of(request_of(**body))
    others = [
        keys_of(request_of(**body, cache_salt="a")),
        keys_of(request_of(**body, cache_salt="b")),
        keys_of(request_of(**body), adapter="a"),
        keys_of(completion(SYSTEM)),
        keys_of(completion(list(SYSTEM.encode()))),
    ]
    for other in others:
        assert not set(plain) & set(other)
    assert not set(others[0]) & set(others[1])
    assert not set(others[3]) & set(others[4])


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"tools": [{"type": "function", "function": {"name": "g"}}]},
        {"documents": [{"text": "d"}]},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "low"},
        {"chat_template": "{{ 1 }}"},
    ],
)
def test_what_templates_print_first_is_part_of_the_keys(fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}]}
    with_fields = keys_of(request_of(**body, **fields))
    assert shared(with_fields, keys_of(request_of(**body))) == 0
    assert shared(with_fields, keys_of(request_of(**body, **fields))) == len(with_fields) > 0


def test_what_changes_no_prompt_is_no_part_of_the_keys() -> None:
    body: dict[str, Any] = {"messages": [{"role": "system", "content": SYSTEM}]}
    assert keys_of(request_of(**body, tool_choice="auto", temperature=1.0, user="u")) == keys_of(request_of(**body))


def test_the_billing_line_of_a_coding_agent_is_left_out() -> None:
    """Its value is new each time; the engine takes the line away."""
    lines = [f"x-anthropic-billing-header: cch={number};\n" for number in range(2)]
    one, other = (keys_of(request_of(messages=[{"role": "system", "content": line + SYSTEM}])) for line in lines)
    assert one == other


def test_tool_calls_and_reasoning_count() -> None:
    def asked(**more: object) -> Sequence[BlockKey]:
        messages = [{"role": "assistant", "content": None, **more}, {"role": "user", "content": "x" * 600}]
        return keys_of(request_of(messages=messages))

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert shared(asked(tool_calls=[call]), asked()) == 0
    assert shared(asked(reasoning="r"), asked(reasoning="s")) == 0


def test_images_are_told_apart_by_their_content() -> None:
    def asked(url: str, question: str = "What is this?") -> PrefixBlocks:
        image = {"type": "image_url", "image_url": {"url": url}}
        content = [{"type": "text", "text": SYSTEM}, image, {"type": "text", "text": question * 50}]
        return blocks_of(request_of(messages=[{"role": "user", "content": content}]))

    first = asked("data:image/png;base64," + "A" * 5000)
    again = asked("data:image/png;base64," + "A" * 5000, "And where?")
    other = asked("data:image/png;base64," + "B" * 5000)
    assert first.mode is PrefixMode.APPROXIMATE
    assert first.text_bytes == 0  # nothing to learn a ratio from
    before = len(SYSTEM) // BLOCK_BYTES
    assert shared(first.chains[0].keys, other.chains[0].keys) == before
    assert shared(first.chains[0].keys, again.chains[0].keys) == (len(SYSTEM) + MEDIA_BYTES) // BLOCK_BYTES
    assert first.tokens < 1.2 * (len(SYSTEM) + MEDIA_BYTES + 650) / 4  # not the length of the encoded image


def test_each_text_of_a_list_is_a_prompt_of_its_own() -> None:
    blocks = blocks_of(completion([SYSTEM, "x" * 600, SYSTEM]))
    assert [len(chain.keys) for chain in blocks.chains] == [6, 2, 6]
    assert blocks.chains[0] == blocks.chains[2]
    assert blocks.text_bytes == 2 * len(SYSTEM) + 600


@pytest.mark.parametrize("ratio", [1.0, 3.0, 3.7, 4.0, 16.0])
def test_tokens_follow_the_ratio_of_the_model(ratio: float) -> None:
    blocks = blocks_of(completion("x" * 4096), bytes_a_token=ratio)
    (chain,) = blocks.chains
    assert len(chain.keys) == 16
    assert blocks.tokens == chain.tokens == round(4096 / ratio)
    assert blocks.block_size == round(256 / ratio)
    assert (blocks.mode, blocks.reason, blocks.text_bytes) == (PrefixMode.APPROXIMATE, "no_tokenizer", 4096)


def test_any_text_has_keys() -> None:
    for text in ("\ud800" * 200, "ü" * 200, "漢字" * 100, "\x1e\x1f" * 300, "🙂" * 90):
        assert len(keys_of(completion(text))) >= 1
    assert keys_of(chat("x")) == []


def test_large_texts_are_hashed_in_the_thread() -> None:
    hasher = PromptHasher.load(None)
    for request in (
        chat("word " * (LOOK_UP_INLINE_BYTES // 4)),
        request_of(messages=[{"role": "user", "content": "x"}] * (LOOK_UP_INLINE_PARTS + 1)),
    ):
        work = hasher.begin(request, block_size=SIZE)
        assert work.pending
        work.encode()
        assert work.blocks().mode is PrefixMode.APPROXIMATE


@pytest.mark.parametrize(
    "message", [{"content": "x"}, {"role": 1, "content": "x"}, {"role": "user", "content": 7}], ids=str
)
def test_what_the_worker_will_refuse_has_no_keys(message: dict[str, object]) -> None:
    blocks = blocks_of(request_of(messages=[message]))
    assert (blocks.mode, blocks.reason, blocks.chains) == (PrefixMode.NONE, "malformed", ())


# --------------------------------------------------------------------------- kept apart by the engine


def apart(request: Any, *, reads: bool = True, hasher: PromptHasher | None = None) -> PrefixBlocks:
    return (hasher or PromptHasher.load(None)).begin(request, block_size=SIZE, reads_extra_key=reads).blocks()


@pytest.mark.parametrize("prompt", [SYSTEM, list(range(500))], ids=["text", "token ids"])
def test_a_key_of_its_own_keeps_blocks_from_those_of_events(prompt: Any, hasher: PromptHasher) -> None:
    plain = replace(
        completion("x"), prompt=TokenPrompt((prompt,)) if isinstance(prompt, list) else TextPrompt((prompt,))
    )
    one, same, other = (apart(replace(plain, extra_key=key), hasher=hasher) for key in ("a", "a", "b"))
    announced = apart(plain, hasher=hasher)
    assert (announced.mode, announced.reason) == (PrefixMode.EXACT, None)
    assert (one.mode, one.reason) == (PrefixMode.APPROXIMATE, "extra_key")
    assert one == same
    assert len(one.chains[0].keys) >= 4
    names = [set(blocks.chains[0].keys) for blocks in (one, other, announced)]
    assert len(set.union(*names)) == sum(map(len, names)), "none in common"
    assert not tellable(one), "an engine's token ids would lead to what events announced"
    # Where no engine reads it, nothing is lost.
    assert apart(replace(plain, extra_key="a"), reads=False, hasher=hasher) == announced


def test_token_ids_kept_apart_are_counted_exactly() -> None:
    request = replace(completion("x"), prompt=TokenPrompt((list(range(500)), [1])), extra_key="a")
    blocks = apart(request)
    assert [(len(chain.keys), chain.tokens) for chain in blocks.chains] == [(7, 500), (0, 1)]
    assert (blocks.tokens, blocks.block_size, blocks.text_bytes) == (501, 64, 0)


def test_long_prompts_kept_apart_are_hashed_in_the_thread() -> None:
    for prompt in (TokenPrompt((list(range(CHAIN_INLINE_TOKENS + 1)),)), TextPrompt(("x" * 2_000,) * 300)):
        request = replace(completion("x"), prompt=prompt, extra_key="a")
        work = PromptHasher.load(None).begin(request, block_size=SIZE, reads_extra_key=True)
        assert work.pending
        work.encode()
        assert work.blocks().reason == "extra_key"
