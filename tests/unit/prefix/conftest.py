"""Small tokenizers of every kind that is known to treat the start of a text or its neighbours specially."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from gateway.prefix import PromptHasher

CORPUS = [
    "the quick brown fox jumps over the lazy dog 0123456789",
    "user assistant system hello there don't it's we'll",
    "a text with , signs ! and ( brackets ) { } [ ] < > | / \\ n's",
    "Ein Satz mit Umlauten: äöü ß, und noch einer.",
] * 5
SPECIAL = ("<|start|>", "<|end|>")


def train(tokenizer: Tokenizer, *, alphabet: list[str] | None = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=alphabet or [],
        special_tokens=[] if alphabet else ["<unk>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return train(tokenizer, alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))


def byte_level_with_prefix_space() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return train(tokenizer, alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return train(tokenizer)


def prepending_normalizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return train(tokenizer)


def with_bos_and_eos() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    return tokenizer


def stripping_tokens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True, normalized=False, special=True),
            AddedToken("<cls>", rstrip=True, normalized=False, special=True),
        ]
    )
    return tokenizer


def whole_words_only() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("word", single_word=True, normalized=False, special=True)])
    return tokenizer


def truncating() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    return tokenizer


def normalized_tokens() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    train(tokenizer)
    tokenizer.add_tokens([AddedToken("hello there", normalized=True), AddedToken("  ", normalized=True)])
    return tokenizer


CUT: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_with_prefix_space": byte_level_with_prefix_space,
    "metaspace_first": lambda: metaspace("first"),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "prepending_normalizer": prepending_normalizer,
    "with_bos_and_eos": with_bos_and_eos,
    "stripping_tokens": stripping_tokens,
    "truncating": truncating,
    "normalized_tokens": normalized_tokens,
}
"""Tokenizers that may be cut; the decoder plays no part."""

TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\n' + message.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(params=sorted(CUT), scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    tokenizer = CUT[request.param]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """A model with the plain byte-level tokenizer and a ChatML-like template."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


@pytest.fixture
def hasher(model_directory: Path) -> PromptHasher:
    return PromptHasher.load(model_directory)


@pytest.fixture
def whole_words_tokenizer() -> Tokenizer:
    return whole_words_only()


@pytest.fixture
def broken_tokenizer() -> Tokenizer:
    """Its unknown token is not in its vocabulary."""
    tokenizer = Tokenizer(models.BPE(unk_token="<nowhere>"))
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=100, show_progress=False))
    return tokenizer


@pytest.fixture
def bos_tokenizer() -> Tokenizer:
    return with_bos_and_eos()
