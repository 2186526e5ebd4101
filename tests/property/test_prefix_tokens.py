"""Cutting a text never changes its ids, and a longer chat's keys extend those of its beginning."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import keys
from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.prefix.files import read_model_files
from gateway.prefix.tokens import PromptTokenizer
from gateway.records import Chain, Endpoint, InferenceRequest, PrefixBlocks

ROOT = Path(__file__).parents[2]
MODELS = (ROOT / "gateway" / "sim" / "model", ROOT / "tests" / "golden" / "prefix" / "tiny-qwen2")
TOKENIZERS = [PromptTokenizer(read_model_files(model).tokenizer) for model in MODELS]
BLOCK = 4

specials = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</think>", "<|im_", "|>"])
blanks = st.sampled_from(["", " ", "  ", "\n", " \n\n", "\t", "\r\n", "\u00a0"])
words = st.sampled_from(["'s", "don't", "123", " the", "user\n", "e\u0301", "漢字", "🙂", "x" * 30, '{"a": 1}'])
texts = st.lists(specials | blanks | words | st.text(max_size=6), max_size=30).map("".join)
contents = st.lists(specials | words | blanks | st.text(max_size=40), max_size=6).map("".join)


@given(st.sampled_from(TOKENIZERS), texts)
@settings(max_examples=400)
def test_cut_ids_are_whole_ids(tokenizer: PromptTokenizer, text: str) -> None:
    try:
        (whole,) = tokenizer.encode([text])
    except ValueError:
        return
    assert tokenizer.boundary is not None
    assert tokenizer.encode_cut(text) == list(whole)


def request_of(turns: list[str], salt: str | None) -> InferenceRequest:
    roles = ("system", *("user", "assistant") * len(turns))
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    body = {"model": "m", "messages": messages, "add_generation_prompt": False, "cache_salt": salt}
    return parse_request(Endpoint.CHAT, json.dumps(body).encode(), request_id="r")


def blocks_of(hasher: PromptHasher, request: InferenceRequest) -> PrefixBlocks:
    work = hasher.begin(request, block_size=BLOCK)
    if work.pending:
        work.encode()
    return work.blocks()


@given(st.lists(st.lists(contents, min_size=1, max_size=6), min_size=1, max_size=4), st.sampled_from([None, "s"]))
@settings(max_examples=60)
def test_blocks_of_growing_chats(conversations: list[list[str]], salt: str | None) -> None:
    """Small caches, so that eviction happens in between; every answer must be as if there were none."""
    hasher = PromptHasher.load(MODELS[1], piece_cache_bytes=4_000, chain_cache_bytes=8_000)
    for turns in conversations:
        shorter: Chain | None = None
        for count in range(1, len(turns) + 1):
            request = request_of(turns[:count], salt)
            blocks = blocks_of(hasher, request)
            ids = hasher.token_ids(request)
            if ids is None:  # lone surrogates
                assert blocks.reason == "text"
                break
            (chain,) = blocks.chains
            assert list(chain.keys) == keys.chain(keys.namespace(None, salt), ids[0], BLOCK)
            assert chain.tokens == len(ids[0])
            if shorter is not None:
                assert list(chain.keys)[: len(shorter.keys)] == list(shorter.keys)
            shorter = chain
        assert hasher.chains.bytes <= hasher.chains.max_bytes
        assert hasher.pieces.bytes <= hasher.pieces.max_bytes
