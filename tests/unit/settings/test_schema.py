"""The schema of the file takes what kvgate takes, and says of each key what it is."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml

from gateway.config import ConfigError, load
from gateway.settings import json_schema, unit_of


def keys_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Every key below a section, by the section's name and its own."""
    return {
        f"{name}.{key}": entry
        for name, section in schema["$defs"].items()
        for key, entry in section.get("properties", {}).items()
    }


def test_every_key_is_described() -> None:
    keys = keys_of(json_schema())
    assert len(keys) > 50
    sections = [key for key, entry in keys.items() if "$ref" in entry]
    phases = [key for key in keys if key.startswith("PhaseSettings.")]  # as in `timeouts`, unit included
    assert [key for key, entry in keys.items() if "description" not in entry and key not in sections + phases] == []


def test_every_number_has_a_unit_and_a_default_or_none() -> None:
    for key, entry in keys_of(json_schema()).items():
        kinds = {entry.get("type")} | {each.get("type") for each in entry.get("anyOf", ())}
        if kinds & {"integer", "number"}:
            assert unit_of(key.rpartition(".")[2]) is not None, f"{key}: name its unit in gateway/settings/schema.py"
            assert "Unit: " in entry["description"], key
            assert "default" in entry, key


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("server: {port: 1}", True),
        ("server:\nauth:\nworkers:\n", True),
        ("workers: [{url: 'http://a:1', kv_events: off}]", True),
        ("routing: {alpha: auto, beta: 2}", True),
        ("timeouts: {paths: {/v1/embeddings: {total_s: 3}}}", True),
        ("server: {prot: 1}", False),
        ("sever: {}", False),
        ("server: {port: 70000}", False),
        ("workers: [{name: a}]", False),
        ("workers: {url: 'http://a:1'}", False),
        ("routing: {policy: best}", False),
        ("timeouts: {paths: {/v2/x: {total_s: 3}}}", False),
    ],
)
def test_it_takes_what_kvgate_takes(text: str, good: bool, tmp_path: Any) -> None:
    path = tmp_path / "kvgate.yaml"
    path.write_text(text)
    try:
        load(path, environ={})
        taken = True
    except ConfigError:
        taken = False
    valid = jsonschema.Draft202012Validator(json_schema()).is_valid(yaml.safe_load(text))
    assert (taken, valid) == (good, good)
