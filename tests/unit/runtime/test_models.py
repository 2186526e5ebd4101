"""Tokenizers of models: what cannot be read stops the start where it is configured, and no worker where it is found."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ConfigError
from gateway.prefix import PromptHasher
from gateway.records import EngineKind, WorkerFacts, WorkerId, WorkerSpec
from gateway.runtime.models import Tokenizers
from gateway.settings import ModelSettings

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


async def test_a_tokenizer_that_comes_later_is_found_at_the_next_probe(tmp_path: Path) -> None:
    made = tokenizers()
    spec, facts = WorkerSpec(WorkerId("w1"), "http://w1:8000"), WorkerFacts(EngineKind.VLLM, "1", ("m",), root="")
    elsewhere = await made.prepare(spec, replace(facts, root="/nowhere/at/all"))
    assert elsewhere is not None
    assert elsewhere.tokenizer is None
    facts = replace(facts, root=str(broken(tmp_path, "json")))
    assert await made.prepare(spec, facts) is elsewhere
    words = {"model": {"type": "WordLevel", "vocab": {"u": 0}, "unk_token": "u"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    found = await made.prepare(spec, facts)
    assert found is not None
    assert found.tokenizer is not None
    assert made.find("m") is found
    assert await made.prepare(spec, facts) is found


async def test_what_cannot_be_read_is_not_read_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tokenizers()
    facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), root=str(broken(tmp_path, "json")))
    spec = WorkerSpec(WorkerId("w1"), "http://w1:8000")
    loads: list[object] = []
    load = made._load

    def counted(*args: Any) -> PromptHasher:
        loads.append(args)
        return load(*args)

    monkeypatch.setattr(made, "_load", counted)
    for _ in range(3):
        await made.prepare(spec, facts)
    assert len(loads) == 1


async def test_who_serves_a_name_next_may_have_another_tokenizer(tmp_path: Path) -> None:
    words = {"model": {"type": "WordLevel", "vocab": {"u": 0}, "unk_token": "u"}}
    before, after = tmp_path / "before", tmp_path / "after"
    for directory in (before, after):
        directory.mkdir()
        (directory / "tokenizer.json").write_text(json.dumps(words))
    made = tokenizers(ModelSettings(name="told", tokenizer=before))
    made.load_configured()
    spec, facts = WorkerSpec(WorkerId("w1"), "http://w1:8000"), WorkerFacts(EngineKind.VLLM, "1", ("m",))
    first = await made.prepare(spec, replace(facts, root=str(before)))
    made.keep({"m"})
    assert made.find("m") is first is not None
    made.keep(())
    assert made.find("m") is None
    assert made.find("told") is not None  # the configuration's stays
    second = await made.prepare(spec, replace(facts, root=str(after)))
    assert second is made.find("m") is not None
    assert second is not first
