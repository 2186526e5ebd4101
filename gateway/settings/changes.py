"""What differs between two configurations, by dotted path of the key.

A list (`workers`, `models`), a table by name (`timeouts.paths`) and a section that may be missing
(`discovery.kubernetes`) are one key each. Keys are told, never values: they may be secrets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from pydantic import BaseModel

from gateway.settings.tree import Settings

_Section = TypeVar("_Section", bound=BaseModel)


def all_keys() -> list[str]:
    """Every key of the tree."""
    return list(_keys(Settings))


def changed_keys(before: Settings, now: Settings) -> list[str]:
    """The keys whose values differ."""
    return [key for key in _keys(Settings) if value_of(before, key) != value_of(now, key)]


def value_of(settings: BaseModel, key: str) -> Any:
    """The value of a key; KeyError for one that does not exist."""
    value: Any = settings
    for part in key.split("."):
        if part not in type(value).model_fields:
            raise KeyError(key)
        value = getattr(value, part)
    return value


def with_keys_of(settings: Settings, other: Settings, keys: Iterable[str]) -> Settings:
    """`settings`, with the values that these keys have in `other`. Not validated."""
    for key in keys:
        settings = _put(settings, key.split("."), value_of(other, key))
    return settings


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _put(section: _Section, path: list[str], value: Any) -> _Section:
    name, *rest = path
    inner = _put(getattr(section, name), rest, value) if rest else value
    return section.model_copy(update={name: inner})
