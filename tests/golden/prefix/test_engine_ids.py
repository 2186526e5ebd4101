"""Our token ids against those of a real engine (see ORIGIN.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import keys
from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.records import Endpoint, InferenceRequest, PrefixMode

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "vllm-0.32.0.json").read_text(encoding="utf-8"))
EXCHANGES: list[dict[str, Any]] = GOLDEN["exchanges"]
STORED: list[dict[str, Any]] = GOLDEN["stored"]


@pytest.fixture(scope="module")
def hasher() -> PromptHasher:
    return PromptHasher.load(HERE / "tiny-qwen2")


def as_request(exchange: dict[str, Any]) -> InferenceRequest:
    chat = "messages" in exchange["body"]
    endpoint = Endpoint.CHAT if chat else Endpoint.COMPLETIONS
    return parse_request(endpoint, json.dumps(exchange["body"]).encode(), request_id="golden")


@pytest.mark.parametrize("exchange", [e for e in EXCHANGES if e["ids"]], ids=lambda e: e["name"])
def test_ids_equal_the_engines(hasher: PromptHasher, exchange: dict[str, Any]) -> None:
    ids = hasher.token_ids(as_request(exchange))
    assert ids is not None
    assert [list(prompt) for prompt in ids] == exchange["ids"]


@pytest.mark.parametrize("exchange", [e for e in EXCHANGES if e["prompt_tokens"]], ids=lambda e: e["name"])
def test_prompt_length_equals_the_engines(hasher: PromptHasher, exchange: dict[str, Any]) -> None:
    blocks = hasher.begin(as_request(exchange), block_size=32).blocks()
    assert blocks.mode is PrefixMode.EXACT
    assert blocks.tokens == exchange["prompt_tokens"]


@pytest.mark.parametrize("name", sorted({e["step"] for e in STORED} & {e["name"] for e in EXCHANGES}))
def test_ids_equal_those_in_the_engines_events(hasher: PromptHasher, name: str) -> None:
    (exchange,) = [e for e in EXCHANGES if e["name"] == name]
    prompts = hasher.token_ids(as_request(exchange))
    assert prompts is not None
    chains: dict[int | None, list[int]] = {None: []}
    for event in STORED:
        known = chains[event["parent"]]
        size = event["block_size"]
        for block, engine_hash in enumerate(event["hashes"], start=1):
            chains[engine_hash] = known + event["token_ids"][: block * size]
        if event["step"] == name:
            # The chain may go on with what was generated, so only the prompt's part is compared.
            full = known + event["token_ids"]
            assert any(full[: len(ids)] == list(ids)[: len(full)] for ids in prompts)


def test_keys_of_equal_tokens_meet_across_requests_and_events(hasher: PromptHasher) -> None:
    (exchange,) = [e for e in EXCHANGES if e["name"] == "chat_shared_prefix_0"]
    (event,) = [e for e in STORED if e["step"] == "chat_shared_prefix_0"]
    blocks = hasher.begin(as_request(exchange), block_size=event["block_size"]).blocks()
    stored = keys.chain(keys.namespace(), event["token_ids"], event["block_size"])
    assert list(blocks.chains[0].keys) == stored
    assert len(stored) == 12
