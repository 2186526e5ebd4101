"""Tokenizers of models: what cannot be read stops the start where it is configured, and no worker where it is found."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from gateway.config import ConfigError, ModelSettings
from gateway.records import EngineKind, WorkerFacts, WorkerId, WorkerSpec
from gateway.runtime.models import Tokenizers

NO_UNKNOWN = {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}}
"""Cannot encode most texts."""


def broken(directory: Path, kind: str) -> Path:
    model = NO_UNKNOWN if kind == "tokenizer" else {"model": {"type": "WordLevel", "vocab": {"u": 0}, "unk_token": "u"}}
    (directory / "tokenizer.json").write_text(json.dumps(model))
    match kind:
        case "json":
            (directory / "tokenizer.json").write_text("{")
        case "template":
            (directory / "chat_template.jinja").write_text("{% if %}")
        case "encoding":
            (directory / "chat_template.jinja").write_bytes(b"\xff\xfe")
    return directory


def tokenizers(*models: ModelSettings) -> Tokenizers:
    return Tokenizers(models, now=datetime.now)


@pytest.mark.parametrize("kind", ["tokenizer", "json", "template", "encoding"])
def test_a_configured_one_is_named(tmp_path: Path, kind: str) -> None:
    made = tokenizers(ModelSettings(name="m", tokenizer=broken(tmp_path, kind)))
    with pytest.raises(ConfigError, match=r"^models\.m: "):
        made.load_configured()


@pytest.mark.parametrize("kind", ["tokenizer", "json", "template", "encoding"])
async def test_a_found_one_lets_its_worker_join_without(tmp_path: Path, kind: str) -> None:
    made = tokenizers()
    facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), root=str(broken(tmp_path, kind)))
    await made.prepare(WorkerSpec(WorkerId("w1"), "http://w1:8000"), facts)
    hasher = made.find("m")
    assert hasher is not None
    assert hasher.tokenizer is None
