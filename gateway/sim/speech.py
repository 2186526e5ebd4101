"""What a simulated engine reads and says: token ids of prompts, made-up answers, and the engine's own block names.

Answers are words of the tokenizer's vocabulary, chosen by a random source that the prompt seeds: the same prompt
always gets the same answer. Only tokens that encode back to themselves are used, so that the blocks of an answer are
found again when the next turn sends it as text, as with a real model most of the time.

Block names are a SHA-256 chain of the engine's own: a gateway must learn them from events, it cannot compute them.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from random import Random

from gateway.prefix import PromptHasher
from gateway.prefix.files import ModelFiles, read_model_files
from gateway.records import ChatPrompt, Endpoint, EngineKind, InferenceRequest

DEMO_MODEL = Path(__file__).parent / "model"
"""Tokenizer and chat template that come with the project."""

_WORD = re.compile(" [a-z]{2,}")
_OPENER = re.compile("[A-Z][a-z]{2,}")


class Speech:
    """Tokenizer, chat template and vocabulary of one model. Thread-safe for reading; no state of requests."""

    def __init__(self, files: ModelFiles) -> None:
        tokenizer = files.tokenizer
        self._tokenizer = tokenizer
        self._prompts = {kind: PromptHasher(files, engine=kind) for kind in (EngineKind.VLLM, EngineKind.SGLANG)}
        openers: list[int] = []
        words: list[int] = []
        for token in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([token])
            kind = words if _WORD.fullmatch(text) else openers if _OPENER.fullmatch(text) else None
            if kind is not None and tokenizer.encode(text, add_special_tokens=False).ids == [token]:
                kind.append(token)
        self._words = words
        self._openers = openers or words

    @classmethod
    def load(cls, directory: Path) -> Speech:
        """Reads a model's directory. Raises BadModelFiles or BadTemplate, see `gateway.prefix`."""
        return cls(read_model_files(directory))

    def chat(self, prompt: ChatPrompt, engine: EngineKind = EngineKind.VLLM) -> list[int]:
        """Token ids of a chat prompt, rendered as the engine does and encoded. Raises ValueError when it cannot be."""
        request = InferenceRequest(endpoint=Endpoint.CHAT, request_id="", model="simulated", prompt=prompt)
        found = self._prompts[engine].token_ids(request)
        if found is None:
            raise ValueError("the chat template does not take these messages")
        return list(found[0])

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; `special` adds what the tokenizer puts around a prompt. Raises ValueError for lone
        surrogates."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, special tokens included; ids outside the vocabulary show as nothing."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token of an answer."""
        known: dict[int, str] = {}
        for token in tokens:
            if token not in known:
                known[token] = self._tokenizer.decode([token])
        return [known[token] for token in tokens]

    def token_strings(self, tokens: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def answer(self, prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
        """`count` token ids: an opening word and more words. `choice` tells several answers to one prompt apart."""
        digest = hashlib.sha256(_bytes(prompt[-256:]) + len(prompt).to_bytes(8, "little") + bytes([choice & 255]))
        chance = Random(digest.digest())
        return [chance.choice(self._openers), *chance.choices(self._words, k=count - 1)]


def block_names(
    tokens: Sequence[int],
    block_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    apart: str | None = None,
) -> list[int]:
    """Names of the full blocks of `tokens`: last 8 bytes of a SHA-256 chain, as unsigned integers.

    Adapter, cache salt and what else keeps it `apart` seed the chain, so requests that differ in them share no block.
    """
    seed = f"simulated engine\0{adapter or ''}\0{salt or ''}" + ("" if apart is None else f"\0{apart}")
    digest = hashlib.sha256(seed.encode()).digest()
    raw = _bytes(tokens)
    width = 8 * block_size
    names: list[int] = []
    for start in range(0, len(tokens) // block_size * width, width):
        digest = hashlib.sha256(digest + raw[start : start + width]).digest()
        names.append(int.from_bytes(digest[-8:], "big"))
    return names


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("Q", tokens).tobytes()
