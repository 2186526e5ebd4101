"""Prompts to prefix blocks: template, tokenizer, block keys, and the caches that make a chat's next turn cheap.

Face: `PromptHasher` (one a model) and its `PrefixWork` (one a request), `KnownPrompts` with `tellable` for token ids
that engines tell, `PrefixStats`, and the errors of loading. Does not know workers, pools or the index.
"""

from gateway.prefix.files import BadModelFiles
from gateway.prefix.hasher import PrefixStats, PrefixWork, PromptHasher, tellable
from gateway.prefix.known import KnownPrompts
from gateway.prefix.template import BadTemplate
from gateway.prefix.tokens import BadTokenizer

__all__ = [
    "BadModelFiles",
    "BadTemplate",
    "BadTokenizer",
    "KnownPrompts",
    "PrefixStats",
    "PrefixWork",
    "PromptHasher",
    "tellable",
]
