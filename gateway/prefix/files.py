"""What a model's directory says about its prompts: tokenizer, special tokens, chat templates.

Read once at start; nothing here is on a request's way. File names and meanings are Hugging Face's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class BadModelFiles(ValueError):
    """A file of the model's directory is missing or cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`templates` maps a name (`default`, `tool_use`, ...) to its source; `tokens` special token names to texts."""

    tokenizer: Tokenizer
    templates: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)


def read_model_files(directory: Path) -> ModelFiles:
    """Raises BadModelFiles. A model without a chat template is complete: it takes no chats."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise BadModelFiles(f"{path}: not found; only models with a tokenizer.json can be tokenised here")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise BadModelFiles(f"{path}: {error}") from error
    settings = _json_object(directory / "tokenizer_config.json")
    named = {**_json_object(directory / "special_tokens_map.json"), **settings}
    tokens = {name: text for name in _TOKEN_NAMES if (text := _token_text(named.get(name))) is not None}
    _complete(tokenizer, tokens, settings)
    return ModelFiles(tokenizer, _templates(directory, settings.get("chat_template")), tokens)


def _complete(tokenizer: Tokenizer, tokens: dict[str, str], settings: dict[str, object]) -> None:
    """What transformers 5 does to a tokenizer after reading it: special tokens that only the settings name are added.

    It does not follow `add_bos_token` and `add_eos_token` where there is a tokenizer.json: that file decides.
    """
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens"))
    texts = [*tokens.values(), *(_token_text(item) for item in (extra if isinstance(extra, list) else ()))]
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    missing = [text for text in dict.fromkeys(texts) if text and text not in known]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def _json_object(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModelFiles(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFiles(f"{path}: not an object")
    return value


def _token_text(value: object) -> str | None:
    """A special token is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _templates(directory: Path, setting: object) -> dict[str, str]:
    """A template file beside the tokenizer wins over the settings; more named ones may lie in a folder."""
    templates: dict[str, str] = {}
    if isinstance(setting, str):
        templates["default"] = setting
    elif isinstance(setting, list):
        for item in setting:
            if isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str):
                templates[item["name"]] = item["template"]
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    return templates
