"""The JSON schema of the configuration file, for editors and for checks without kvgate.

Made from the sections themselves, so it cannot say anything else: types, limits, defaults, descriptions, and the unit
of each number in its description. What holds between keys (a name used twice, say) only `kvgate config check` knows.
"""

from __future__ import annotations

from typing import Any

from gateway.settings.tree import Settings

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_UNITS = {
    "max_inflight": "requests",
    "shards": "shards",
    "shard_workers": "workers",
    "share": "share, 0 to 1",
    "port": "port",
    "_port": "port",
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_ratio": "share, 0 to 1",
    "_threshold": "share, 0 to 1",
    "_percentile": "share, 0 to 1",
    "_per_minute": "a minute",
    "_size": "entries",
    "block_size": "tokens",
    "data_parallel_size": "ranks",
    "max_connections": "connections",
    "max_sessions": "sessions",
    "failures": "requests",
    "max": "workers",
    "alpha": "factor",
    "beta": "factor",
    "gamma": "factor",
    "weight": "share",
}
"""Unit of a number by its key's name, or by how that ends; the longest that fits counts."""

_NUMBERS = frozenset({"integer", "number"})


def unit_of(key: str) -> str | None:
    """What a key's number counts; None where its name does not say."""
    fitting = [end for end in _UNITS if key == end or (end.startswith("_") and key.endswith(end))]
    return _UNITS[max(fitting, key=len)] if fitting else None


def json_schema() -> dict[str, Any]:
    """The schema of `kvgate.yaml`, a tree that JSON can hold."""
    schema = Settings.model_json_schema()
    for section in (schema, *schema["$defs"].values()):
        for key, entry in section.get("properties", {}).items():
            _describe(key, entry)
    # A section that is there but empty means its defaults, and YAML calls it null.
    schema["properties"] = {
        key: {"anyOf": [entry, {"type": "null"}]} if "anyOf" not in entry else entry
        for key, entry in schema["properties"].items()
    }
    return {"$schema": DIALECT, **schema, "title": "kvgate.yaml", "description": "Configuration of kvgate serve."}


def _describe(key: str, entry: dict[str, Any]) -> None:
    if "$ref" in entry:
        entry.pop("default", None)  # each of its own keys has one
    unit = unit_of(key)
    if unit is not None and _is_number(entry):
        entry["description"] = f"{entry['description']} Unit: {unit}." if "description" in entry else f"Unit: {unit}."
    entry.pop("title", None)


def _is_number(entry: dict[str, Any]) -> bool:
    return entry.get("type") in _NUMBERS or any(_is_number(each) for each in entry.get("anyOf", ()))
