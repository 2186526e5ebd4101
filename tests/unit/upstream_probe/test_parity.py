"""Token ids compared with a worker's: its tokenise endpoint, or the prompt ids of an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.prefix import PromptHasher
from gateway.records import ChatPrompt, Endpoint, InferenceRequest, TextPrompt, WorkerId, WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed
from gateway.upstream.parity import token_differences

TINY = Path(__file__).parents[2] / "golden" / "prefix" / "tiny-qwen2"
SPEC = WorkerSpec(name=WorkerId("w1"), url="http://127.0.0.1:8000")


class Worker:
    """Tokenises as `hasher` does; `told` says where: `tokenize`, `vllm` or `sglang` (in answers), `nowhere`."""

    def __init__(self, told: str, hasher: PromptHasher, *, off_by: int = 0, chats_only: bool = False) -> None:
        self.told = told
        self.hasher = hasher
        self.off_by = off_by
        self.chats_only = chats_only
        self.ran: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        chat = "messages" in body
        prompt = ChatPrompt(body["messages"]) if chat else TextPrompt((body["prompt"],), add_special_tokens=False)
        endpoint = Endpoint.CHAT if chat else Endpoint.COMPLETIONS
        (ids,) = self.hasher.token_ids(InferenceRequest(endpoint, "r", "m", prompt)) or ((),)
        tokens = list(ids)
        if chat or not self.chats_only:
            tokens[3] += self.off_by
        if request.url.path == "/tokenize":
            return httpx.Response(200 if self.told == "tokenize" else 404, json={"tokens": tokens, "count": 1})
        self.ran.append(body)
        at_top = self.told == "vllm" and chat
        in_choice = self.told == "sglang" or (self.told == "vllm" and not chat)
        choice = {"index": 0, "prompt_token_ids": tokens if in_choice else None}
        return httpx.Response(200, json={"choices": [choice], "prompt_token_ids": tokens if at_top else None})


@pytest.fixture(scope="module")
def hasher() -> PromptHasher:
    return PromptHasher.load(TINY)


async def compared(worker: Any, hasher: PromptHasher) -> list[str]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(worker)) as http:
        return [finding.code for finding in await token_differences(SPEC, "m", hasher, ControlClient(http))]


@pytest.mark.parametrize("told", ["tokenize", "vllm", "sglang"])
async def test_the_same_ids(told: str, hasher: PromptHasher) -> None:
    worker = Worker(told, hasher)
    assert await compared(worker, hasher) == []
    assert len(worker.ran) == (0 if told == "tokenize" else 2)
    assert all(body["max_tokens"] == 1 and body["return_token_ids"] for body in worker.ran)


@pytest.mark.parametrize("told", ["tokenize", "vllm", "sglang"])
async def test_other_ids(told: str, hasher: PromptHasher) -> None:
    assert await compared(Worker(told, hasher, off_by=1), hasher) == ["tokenizer_differs"]
    assert await compared(Worker(told, hasher, off_by=1, chats_only=True), hasher) == ["template_differs"]


async def test_a_worker_that_tells_no_ids(hasher: PromptHasher) -> None:
    assert await compared(Worker("nowhere", hasher), hasher) == ["tokens_unchecked"]
    assert await compared(lambda _: httpx.Response(404), hasher) == ["tokens_unchecked"]
    assert await compared(lambda _: httpx.Response(200, text="<html>"), hasher) == ["tokens_unchecked"]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_worker_is_asked_again_later(status: int, hasher: PromptHasher) -> None:
    with pytest.raises(ProbeFailed, match=str(status)):
        await compared(lambda _: httpx.Response(status), hasher)


async def test_without_tokenizer_or_template(tmp_path: Path) -> None:
    assert await compared(Worker("nowhere", PromptHasher.load(None)), PromptHasher.load(None)) == ["no_tokenizer"]
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    bare = PromptHasher.load(tmp_path)
    assert await compared(Worker("nowhere", bare), bare) == ["no_chat_template"]
