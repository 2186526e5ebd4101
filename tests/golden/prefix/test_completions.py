"""Ids of plain texts against transformers', for every way settings may change a tokenizer (see ORIGIN.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.api import parse_request
from gateway.prefix import PromptHasher
from gateway.records import Endpoint

HERE = Path(__file__).parent
CASES: list[dict[str, Any]] = json.loads((HERE / "completions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:8].strip())
def test_ids_equal_transformers(case: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(HERE / "tiny-qwen2" / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(case["settings"]))
    hasher = PromptHasher.load(tmp_path)
    for special, expected in ((True, case["with"]), (False, case["without"])):
        body = json.dumps({"model": "m", "prompt": case["text"], "add_special_tokens": special}).encode()
        request = parse_request(Endpoint.COMPLETIONS, body, request_id="golden")
        (ids,) = hasher.token_ids(request) or ()
        assert list(ids) == expected
        assert hasher.begin(request, block_size=16).blocks().tokens == len(expected)
