"""Our rendering against transformers' (see ORIGIN.md)."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.prefix.messages import Unrenderable
from gateway.records import ChatPrompt, Endpoint, PrefixMode

HERE = Path(__file__).parent
TEMPLATES = HERE / "templates"
CASES: list[dict[str, Any]] = json.loads((TEMPLATES / "cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def hashers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptHasher]:
    hashers = {}
    for style in {case["template"] for case in CASES}:
        directory = tmp_path_factory.mktemp(style)
        shutil.copy(HERE / "tiny-qwen2" / "tokenizer.json", directory)
        for file in (TEMPLATES / style).iterdir():
            shutil.copy(file, directory)
        hashers[style] = PromptHasher.load(directory, clock=lambda: datetime(2026, 3, 5, 9, 8, 7))
    return hashers


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["template"])
def test_text_and_ids_equal_transformers(hashers: dict[str, PromptHasher], case: dict[str, Any]) -> None:
    hasher = hashers[case["template"]]
    request = parse_request(Endpoint.CHAT, json.dumps(case["body"]).encode(), request_id="golden")
    assert isinstance(request.prompt, ChatPrompt)
    if "error" in case:
        with pytest.raises(Unrenderable, match="template"):
            hasher.render(request.prompt)
        blocks = hasher.begin(request, block_size=16).blocks()
        assert (blocks.mode, blocks.reason) == (PrefixMode.NONE, "template")
        return
    # Twice: the second time with the tools out of the cache.
    for _ in range(2):
        assert hasher.render(request.prompt, remember=True) == case["text"]
    if "ids" in case:
        ids = hasher.token_ids(request)
        assert ids is not None
        assert list(ids[0]) == case["ids"]
