"""The tokenizer and template that come with the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gateway.sim
from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.prefix.files import read_model_files
from gateway.records import ChatPrompt, Endpoint

MODEL = Path(gateway.sim.__file__).parent / "model"

TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"city": "Rome"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "here"},
    {"role": "assistant", "content": "Here."},
    {"role": "user", "content": "Thanks"},
]


def text_of(hasher: PromptHasher, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = json.dumps({"model": "demo", "messages": messages, **fields}).encode()
    prompt = parse_request(Endpoint.CHAT, body, request_id="r").prompt
    assert isinstance(prompt, ChatPrompt)
    return hasher.render(prompt)


def test_any_text_comes_back_from_its_ids() -> None:
    tokenizer = read_model_files(MODEL).tokenizer
    text = "".join(map(chr, range(1, 0x300))) + "漢字 🙂 <|im_start|>user\n<tool_call>"
    assert tokenizer.get_vocab_size() == 4096
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_prompts_are_cut() -> None:
    assert PromptHasher.load(MODEL).stats().cutting


def test_template() -> None:
    hasher = PromptHasher.load(MODEL)
    assert text_of(hasher, CHAT) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhere?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "find", "arguments": {"city": "Rome"}}</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>here</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nHere.<|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert text_of(hasher, CHAT[1:2]).startswith("<|im_start|>user\nWhere?")
    with_tools = text_of(hasher, CHAT[1:2], tools=TOOLS)
    assert '{"type": "function", "function": {"name": "find", "description": null' in with_tools


def test_a_longer_chat_starts_with_the_shorter_one() -> None:
    hasher = PromptHasher.load(MODEL)
    for fields in ({}, {"tools": TOOLS}):
        shorter = ""
        for count in range(1, len(CHAT) + 1):
            text = text_of(hasher, CHAT[:count], add_generation_prompt=False, **fields)
            assert text.startswith(shorter)
            shorter = text
