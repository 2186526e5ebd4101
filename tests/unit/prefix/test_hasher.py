from __future__ import annotations

import json
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway import keys
from gateway.api import parse_request
from gateway.prefix import BadModelFiles, BadTemplate, KnownPrompts, PromptHasher, tellable
from gateway.prefix.files import read_model_files
from gateway.prefix.hasher import (
    CHAIN_INLINE_TOKENS,
    INLINE_CHARS,
    LOOK_UP_INLINE_BYTES,
    LOOK_UP_INLINE_PARTS,
    MAX_NEW_CHARS,
    MAX_PROMPTS,
)
from gateway.prefix.run import MAX_NEW_PIECES
from gateway.records import Endpoint, EngineKind, InferenceRequest, PrefixBlocks, PrefixMode, TokenPrompt

BLOCK = 16


def request_of(endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> InferenceRequest:
    return parse_request(endpoint, json.dumps({"model": "m", **fields}).encode(), request_id="r")


def chat(*contents: str, **fields: Any) -> InferenceRequest:
    roles = ("system", *(("user", "assistant") * len(contents)))
    messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return request_of(messages=messages, **fields)


def completion(prompt: Any, **fields: Any) -> InferenceRequest:
    return request_of(Endpoint.COMPLETIONS, prompt=prompt, **fields)


def blocks_of(hasher: PromptHasher, request: InferenceRequest, **options: Any) -> PrefixBlocks:
    work = hasher.begin(request, block_size=options.pop("block_size", BLOCK), **options)
    if work.pending:
        work.encode()
    return work.blocks()


BY_TEXT = {"converted", "multimodal", "chat_template", "text", "no_tokenizer", "no_template", "volatile"}


def expected(hasher: PromptHasher, request: InferenceRequest, adapter: str | None = None) -> list[list[int]]:
    prompts = hasher.token_ids(request)
    assert prompts is not None
    seed = keys.namespace(adapter, request.cache_salt)
    return [list(keys.chain(seed, ids, BLOCK)) for ids in prompts]


def reason_of(hasher: PromptHasher, request: InferenceRequest) -> str | None:
    work = hasher.begin(request, block_size=BLOCK)
    assert not work.pending
    blocks = work.blocks()
    if blocks.reason in BY_TEXT:
        assert (blocks.mode, len(blocks.chains)) == (PrefixMode.APPROXIMATE, 1)
        return blocks.reason
    assert (blocks.mode, blocks.chains) == (PrefixMode.NONE, ())
    assert blocks.tokens == max(1, request.body_bytes // 4)
    assert blocks.block_size == BLOCK
    return blocks.reason


def test_chat_blocks_are_those_of_the_whole_prompt(hasher: PromptHasher) -> None:
    request = chat("a system prompt that is quite long " * 9, "a question " * 9, "an answer " * 9, "and more?")
    blocks = blocks_of(hasher, request)
    (ids,) = hasher.token_ids(request) or ()
    assert [list(chain.keys) for chain in blocks.chains] == expected(hasher, request)
    assert (blocks.tokens, blocks.chains[0].tokens) == (len(ids), len(ids))
    assert (blocks.mode, blocks.reason, blocks.block_size) == (PrefixMode.EXACT, None, BLOCK)
    assert hasher.stats().cutting


def test_a_known_chat_needs_no_thread_and_no_tokenizer(hasher: PromptHasher) -> None:
    turns = ["you are terse " * 400, "first question " * 200, "first answer " * 200, "second question " * 200]
    first, second = chat(*turns[:2]), chat(*turns)
    assert hasher.begin(first, block_size=BLOCK).pending
    blocks_of(hasher, first)
    before = hasher.stats()
    assert not hasher.begin(first, block_size=BLOCK).pending
    blocks_of(hasher, first)
    assert hasher.stats().encoded_chars == before.encoded_chars
    blocks_of(hasher, second)
    new = len(hasher.texts(second.prompt)[0]) - len(hasher.texts(first.prompt)[0])  # type: ignore[arg-type]
    assert 0 < hasher.stats().encoded_chars - before.encoded_chars < new + 100
    assert not hasher.begin(second, block_size=BLOCK).pending
    assert [list(chain.keys) for chain in blocks_of(hasher, second).chains] == expected(hasher, second)


def test_a_short_new_text_is_encoded_at_once(hasher: PromptHasher) -> None:
    assert not hasher.begin(chat("x" * (INLINE_CHARS // 2), "y"), block_size=BLOCK).pending
    assert hasher.begin(chat("x" * (INLINE_CHARS * 2), "y"), block_size=BLOCK).pending


def test_the_same_text_elsewhere_is_not_encoded_again(hasher: PromptHasher) -> None:
    long = "some long document that is asked about, " * 100
    blocks_of(hasher, chat("one system prompt", long, "answer"))
    encoded = hasher.stats().encoded_chars
    moved = chat("another system prompt", long, "answer")
    assert not hasher.begin(moved, block_size=BLOCK).pending
    assert [list(chain.keys) for chain in blocks_of(hasher, moved).chains] == expected(hasher, moved)
    assert hasher.stats().encoded_chars - encoded < 200
    assert hasher.stats().piece_hits > 0


def test_blocks_may_be_asked_for_twice_and_without_encode(hasher: PromptHasher) -> None:
    work = hasher.begin(chat("long text " * 500), block_size=BLOCK)
    assert work.pending
    first = work.blocks()
    assert work.blocks() is first
    work.encode()
    assert work.blocks() is first


def test_model_adapter_salt_and_block_size_part_the_keys(hasher: PromptHasher) -> None:
    request, salted = chat("text " * 50), chat("text " * 50, cache_salt="s")
    plain = blocks_of(hasher, request).chains[0]
    assert [list(plain.keys)] == expected(hasher, request)
    assert [list(blocks_of(hasher, salted).chains[0].keys)] == expected(hasher, salted)
    adapted = blocks_of(hasher, request, adapter="lora").chains[0]
    assert [list(adapted.keys)] == expected(hasher, request, adapter="lora")
    other_size = blocks_of(hasher, request, block_size=32).chains[0]
    families = [set(chain.keys) for chain in (plain, adapted, blocks_of(hasher, salted).chains[0], other_size)]
    assert sum(map(len, families)) == len(set().union(*families))


def test_salt_and_adapter_part_the_keys_of_token_prompts(hasher: PromptHasher) -> None:
    prompt = TokenPrompt((list(range(1, 100)),))
    plain = replace(completion("x"), prompt=prompt)
    salted = replace(plain, cache_salt="s")
    families = [
        set(blocks_of(hasher, request, adapter=adapter).chains[0].keys)
        for request, adapter in ((plain, None), (salted, None), (plain, "lora"), (salted, "lora"))
    ]
    assert len(set().union(*families)) == sum(map(len, families)) == 4 * 6


def test_texts_get_the_tokens_a_tokenizer_adds(model_directory: Path, bos_tokenizer: Any) -> None:
    bos_tokenizer.save(str(model_directory / "tokenizer.json"))
    hasher = PromptHasher.load(model_directory)
    text = "some text<|start|> with a boundary " * 8
    for special in (True, False):
        request = completion(text, add_special_tokens=special)
        (ids,) = hasher.token_ids(request) or ()
        assert list(ids) == bos_tokenizer.encode(text, add_special_tokens=special).ids
        for _ in range(2):
            blocks = blocks_of(hasher, request)
            assert [list(chain.keys) for chain in blocks.chains] == expected(hasher, request)
            assert blocks.tokens == len(ids)
    for special in (True, False):
        request = chat("hello", "there", add_special_tokens=special)
        assert [list(chain.keys) for chain in blocks_of(hasher, request).chains] == expected(hasher, request)


def test_several_texts_are_several_chains(hasher: PromptHasher) -> None:
    request = completion(["first text " * 20, "second text " * 30, "first text " * 20])
    blocks = blocks_of(hasher, request)
    assert [list(chain.keys) for chain in blocks.chains] == expected(hasher, request)
    assert blocks.chains[0] == blocks.chains[2]
    assert blocks.tokens == sum(chain.tokens for chain in blocks.chains)


def test_token_prompts_need_no_tokenizer() -> None:
    hasher = PromptHasher.load(None)
    request = completion([list(range(100)), list(range(50, 70))])
    blocks = blocks_of(hasher, request)
    assert [list(chain.keys) for chain in blocks.chains] == expected(hasher, request)
    assert [chain.tokens for chain in blocks.chains] == [100, 20]
    assert blocks.tokens == 120
    work = hasher.begin(completion([7] * (CHAIN_INLINE_TOKENS + 1)), block_size=BLOCK)
    assert work.pending
    work.encode()
    assert len(work.blocks().chains[0].keys) == CHAIN_INLINE_TOKENS // BLOCK
    assert not hasher.stats().cutting


def test_large_requests_are_rendered_in_the_thread(hasher: PromptHasher) -> None:
    many = request_of(messages=[{"role": "user", "content": "x"}] * (LOOK_UP_INLINE_PARTS + 1))
    large = chat("word " * (LOOK_UP_INLINE_BYTES // 4))
    for request in (many, large, completion(["x"] * (LOOK_UP_INLINE_PARTS + 1))):
        for _ in range(2):
            work = hasher.begin(request, block_size=BLOCK)
            assert work.pending
            thread = threading.Thread(target=work.encode)
            thread.start()
            thread.join()
            assert [list(chain.keys) for chain in work.blocks().chains] == expected(hasher, request)
    # What such a request brought is known afterwards all the same.
    encoded = hasher.stats().encoded_chars
    blocks_of(hasher, large)
    assert hasher.stats().encoded_chars == encoded


def test_a_failure_in_the_thread_is_no_error(hasher: PromptHasher) -> None:
    request = request_of(messages=[{"role": "user", "content": [{"type": "image_url"}]}] * (LOOK_UP_INLINE_PARTS + 1))
    work = hasher.begin(request, block_size=BLOCK)
    work.encode()
    assert work.blocks().reason == "multimodal"


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "multimodal"),
        ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "malformed"),
        ({"messages": HELLO, "continue_final_message": True}, "malformed"),
        ({"messages": HELLO, "tools": [{"function": {}}]}, "malformed"),
        ({"messages": HELLO, "tools": "x"}, "malformed"),
        ({"messages": [{"content": "x"}]}, "malformed"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "text"),
        ({"messages": HELLO, "truncate_prompt_tokens": 5}, "truncated"),
        ({"messages": [{"role": "user"}] * 20_001}, "too_large"),
    ],
)
def test_what_cannot_be_known_has_a_reason(hasher: PromptHasher, fields: dict[str, Any], reason: str) -> None:
    request = request_of(**fields)
    assert reason_of(hasher, request) == reason
    if reason != "too_large":
        assert hasher.token_ids(request) is None


@pytest.mark.parametrize("prompt", ["x", [7]])
def test_too_many_prompts_are_not_looked_at(hasher: PromptHasher, prompt: object) -> None:
    assert reason_of(hasher, completion([prompt] * (MAX_PROMPTS + 1))) == "too_large"
    assert len(blocks_of(hasher, completion([prompt] * MAX_PROMPTS)).chains) == MAX_PROMPTS


def test_more_new_text_than_any_model_takes_is_not_encoded(hasher: PromptHasher) -> None:
    half = MAX_NEW_CHARS // 2 + 1
    for prompt in ("x " * half, ["x" * half] * 2):
        work = hasher.begin(completion(prompt), block_size=BLOCK)
        work.encode()
        assert (work.blocks().mode, work.blocks().reason) == (PrefixMode.NONE, "too_large")
    assert hasher.stats().encoded_chars == 0


def test_a_text_of_special_tokens_only_brings_few_pieces(hasher: PromptHasher) -> None:
    request = completion("<|start|><|end|>" * 100_000)
    for _ in range(2):
        assert [list(chain.keys) for chain in blocks_of(hasher, request).chains] == expected(hasher, request)
    assert hasher.stats().chain_nodes <= 2 * MAX_NEW_PIECES + 1


def test_endpoints_without_a_known_prompt(hasher: PromptHasher) -> None:
    assert reason_of(hasher, request_of(Endpoint.RERANK, query="x", documents=["y"])) == "endpoint"
    assert reason_of(hasher, request_of(Endpoint.RESPONSES, input="x", previous_response_id="r")) == "session"


def test_bodies_of_other_apis_have_the_blocks_of_the_chat_that_is_made_of_them(
    hasher: PromptHasher, model_directory: Path
) -> None:
    system, question = "You are the assistant of a shop. " * 9, "How do I fix a flat tyre? " * 9
    same = blocks_of(hasher, chat(system, question))
    assert len(same.chains[0].keys) > 4
    blocks = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    messages = request_of(Endpoint.MESSAGES, system=blocks, messages=[{"role": "user", "content": question}])
    responses = request_of(Endpoint.RESPONSES, instructions=system, input=question)
    for request in (messages, responses):
        assert blocks_of(hasher, request) == same
        # SGLang makes a chat of its own, and an engine that tells token ids was asked for another one.
        assert reason_of(PromptHasher.load(model_directory, engine=EngineKind.SGLANG), request) == "converted"
        assert reason_of(PromptHasher(None, known=KnownPrompts()), request) == "converted"
    unsure = request_of(Endpoint.RESPONSES, instructions=system, input=question, reasoning={"effort": "low"})
    assert reason_of(hasher, unsure) == "converted"
    assert not tellable(blocks_of(hasher, unsure))


def test_models_without_files_or_template(model_directory: Path) -> None:
    assert reason_of(PromptHasher.load(None), chat("x")) == "no_tokenizer"
    assert reason_of(PromptHasher.load(None), completion("x")) == "no_tokenizer"
    (model_directory / "chat_template.jinja").unlink()
    bare = PromptHasher.load(model_directory)
    assert reason_of(bare, chat("x")) == "no_template"
    assert blocks_of(bare, completion("x")).mode is PrefixMode.EXACT


def test_a_dated_template_needs_a_clock(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%d') }}{{ messages[0].content }}")
    assert reason_of(PromptHasher.load(model_directory), chat("x")) == "volatile"
    days = iter([datetime(2026, 1, 1), datetime(2026, 1, 2)])
    dated = PromptHasher.load(model_directory, clock=lambda: next(days))
    prompt = chat("x").prompt
    assert [dated.texts(prompt)[0] for _ in range(2)] == ["2026-01-01x", "2026-01-02x"]  # type: ignore[arg-type]


def test_named_templates(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").unlink()
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools {{ tools | length }}"}]
    (model_directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    hasher = PromptHasher.load(model_directory)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert hasher.texts(chat("x").prompt) == ("plain",)  # type: ignore[arg-type]
    assert hasher.texts(chat("x", tools=tools).prompt) == ("tools 1",)  # type: ignore[arg-type]
    override = PromptHasher.load(model_directory, chat_template="mine")
    assert override.texts(chat("x", tools=tools).prompt) == ("mine",)  # type: ignore[arg-type]


def test_template_files_win_over_settings(model_directory: Path) -> None:
    settings = {"chat_template": "from settings", "bos_token": {"content": "<s>"}, "unk_token": None}
    (model_directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (model_directory / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<old>", "eos_token": "</s>"}))
    (model_directory / "additional_chat_templates").mkdir()
    (model_directory / "additional_chat_templates" / "rag.jinja").write_text("rag")
    files = read_model_files(model_directory)
    assert files.tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert sorted(files.templates) == ["default", "rag"]
    assert files.templates["default"].startswith("{% for")
    (model_directory / "chat_template.jinja").unlink()
    assert read_model_files(model_directory).templates["default"] == "from settings"


def test_broken_model_files_are_named(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(BadTemplate, match="line 1"):
        PromptHasher.load(model_directory)
    (model_directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BadModelFiles, match=r"tokenizer_config\.json"):
        PromptHasher.load(model_directory)
    (model_directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadModelFiles, match=r"tokenizer_config\.json"):
        PromptHasher.load(model_directory)
    (model_directory / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModelFiles, match=r"tokenizer\.json"):
        PromptHasher.load(model_directory)
    with pytest.raises(BadModelFiles, match="not found"):
        PromptHasher.load(model_directory / "missing")


def test_reasoning_effort(model_directory: Path) -> None:
    (model_directory / "chat_template.jinja").write_text("{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}")
    hasher = PromptHasher.load(model_directory)

    def text(**fields: Any) -> str:
        return hasher.texts(chat("x", **fields).prompt)[0]  # type: ignore[arg-type]

    assert text() == "  "
    assert text(reasoning_effort="none") == "none False "
    assert text(reasoning_effort="high") == "high True "
    assert text(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}) == "none True "
    sglang = PromptHasher.load(model_directory, engine=EngineKind.SGLANG)
    assert sglang.texts(chat("x", reasoning_effort="low").prompt) == ("low True True",)  # type: ignore[arg-type]


def test_caches_stay_within_their_limits(model_directory: Path) -> None:
    hasher = PromptHasher.load(model_directory, piece_cache_bytes=30_000, chain_cache_bytes=40_000)
    for number in range(60):
        request = chat(f"system {number % 7} " * 10, f"question {number} " * 30, f"answer {number} " * 30)
        assert [list(chain.keys) for chain in blocks_of(hasher, request).chains] == expected(hasher, request)
        stats = hasher.stats()
        assert stats.piece_bytes <= 30_000
        assert stats.chain_bytes <= 40_000
    assert stats.piece_evictions > 0
    assert stats.chain_evictions > 0


def test_requests_in_flight_together_agree(hasher: PromptHasher) -> None:
    """Several works begin on the same caches, are encoded in threads at once, and end in another order."""
    requests = [chat("shared system prompt " * 100, f"question {number % 3} " * 200) for number in range(6)]
    works = [hasher.begin(request, block_size=BLOCK) for request in requests]
    threads = [threading.Thread(target=work.encode) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for work, request in reversed(list(zip(works, requests, strict=True))):
        assert [list(chain.keys) for chain in work.blocks().chains] == expected(hasher, request)
    assert all(not hasher.begin(request, block_size=BLOCK).pending for request in requests)


def test_a_burst_of_the_same_new_text_is_encoded_by_those_already_at_it_only(hasher: PromptHasher) -> None:
    requests = [chat("a new system prompt " * 300, f"question {number}") for number in range(5)]
    works = [hasher.begin(request, block_size=BLOCK) for request in requests]
    assert all(work.pending for work in works)
    works[0].encode()
    works[0].blocks()
    encoded = hasher.stats().encoded_chars
    for work in works[1:]:
        work.encode()
    for work, request in zip(works, requests, strict=True):
        assert [list(chain.keys) for chain in work.blocks().chains] == expected(hasher, request)
    assert hasher.stats().encoded_chars - encoded < 4 * 200
