"""What a template is handed of messages and tools, against a real engine (see ORIGIN.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.records import ChatPrompt, Endpoint

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "vllm-0.32.0-render.json").read_text(encoding="utf-8"))
CASES: list[dict[str, Any]] = GOLDEN["cases"]


@pytest.fixture(scope="module")
def hashers() -> dict[str, PromptHasher]:
    return {
        name: PromptHasher.load(HERE / "tiny-qwen2", chat_template=source)
        for name, source in GOLDEN["templates"].items()
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}, {case['template']}")
def test_text_equals_the_engines(hashers: dict[str, PromptHasher], case: dict[str, Any]) -> None:
    hasher = hashers[case["template"]]
    request = parse_request(Endpoint.CHAT, json.dumps(case["body"]).encode(), request_id="golden")
    assert isinstance(request.prompt, ChatPrompt)
    assert hasher.render(request.prompt) == case["text"]
