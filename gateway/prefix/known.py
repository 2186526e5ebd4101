"""Token keys of prompts that an engine has tokenised, found again by the text of a longer or branching prompt.

An engine is asked in the background (`upstream.tokenizing`), after it has got the request: its answer comes too late
for that request, and in time for those that share its beginning. Only such a beginning can be cached anyway.

Rules:
1. A key of text (`prefix.text`) leads to a prompt that has this text, and to the number of its token blocks that any
   prompt with this text has.
2. That number is known where two prompts part: what their tokens have in common. Before, it is taken from the share
   of the text, less a tenth; at a prompt's end, where nearly every conversation goes on, it is all of it.
3. A prompt is learned from its last key to its first, so what is known of a text is always its beginning, and the least
   recently used goes first. Memory is bounded in bytes.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gateway import keys
from gateway.prefix.text import BLOCK_BYTES
from gateway.records import BlockKey, Chain, PrefixBlocks, PrefixMode

_ENTRY_BYTES = 250
"""A key, its place in the order of use, and its entry."""
_PROMPT_BYTES = 200

_ESTIMATED_SHARE = 0.9
"""Tokens are spread over a text unevenly; a prediction that is too high is worse than one that is a little low."""


class _Prompt:
    """Token keys and keys of the text of one prompt, as unsigned 64-bit numbers, and how many entries lead to it."""

    __slots__ = ("entries", "keys", "text")

    def __init__(self, token_keys: Sequence[BlockKey], text_keys: Sequence[BlockKey]) -> None:
        self.keys = array("Q", token_keys)
        self.text = array("Q", text_keys)
        self.entries = 0

    @property
    def size(self) -> int:
        return _PROMPT_BYTES + 8 * (len(self.keys) + len(self.text))


class _Entry(NamedTuple):
    prompt: _Prompt
    blocks: int


class KnownStats(NamedTuple):
    """Keys of text known, the bytes all of it takes (estimate), and keys dropped for the limit since the start."""

    entries: int
    bytes: int
    evictions: int


class KnownPrompts:
    """One model's prompts whose tokens an engine has told. `usable` is false while no engine answers: then prompts go
    by their text. `server` is the base URL of the render server that is asked, None: the worker that has the request.
    Owned by one thread."""

    def __init__(self, *, server: str | None = None, max_bytes: int = 64 << 20) -> None:
        self.server = server
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evictions = 0
        self.usable = True
        self._block_size = 0
        self._entries: OrderedDict[BlockKey, _Entry] = OrderedDict()

    def find(self, text: PrefixBlocks, *, block_size: int, bytes_a_token: float) -> PrefixBlocks:
        """The token blocks known for the beginning of a prompt, given the blocks of its text; none is fine too."""
        (chain,) = text.chains
        depth = self._depth(chain.keys) if block_size == self._block_size else 0
        found: list[BlockKey] = []
        tokens = chain.tokens
        if depth:
            entry = self._entries[chain.keys[depth - 1]]
            found = entry.prompt.keys[: entry.blocks].tolist()  # type: ignore[assignment]  # NewType of int
            rest = max(0.0, chain.tokens - depth * BLOCK_BYTES / bytes_a_token)
            tokens = len(found) * block_size + max(1, round(rest))
        return PrefixBlocks((Chain(found, tokens),), tokens, block_size, PrefixMode.ENGINE, None, text.text_bytes, text)

    def wants(self, text: PrefixBlocks, *, block_size: int) -> bool:
        """Whether asking for the tokens of a prompt would teach anything: some of its text was never seen."""
        (chain,) = text.chains
        return block_size != self._block_size or self._depth(chain.keys) < len(chain.keys)

    def learn(self, text: PrefixBlocks, seed: BlockKey, token_ids: Sequence[int], *, block_size: int) -> None:
        """An engine has told the token ids of a prompt, given the blocks of its text. Raises ValueError or TypeError
        for what are no token ids."""
        if block_size != self._block_size:
            self._clear()
            self._block_size = block_size
        (chain,) = text.chains
        if not chain.keys:
            return
        entries = self._entries
        prompt = _Prompt(keys.chain(seed, token_ids, self._block_size), chain.keys)
        total, count = len(prompt.keys), len(chain.keys)
        depth = self._depth(chain.keys)
        common, part = 0, False
        if depth:
            other = entries[chain.keys[depth - 1]].prompt
            common = _common(prompt.keys, other.keys)
            # Else more of the other's text is the same, and was dropped for the limit.
            part = _common(prompt.text, other.text) == depth
        self.bytes += prompt.size
        for at in range(count - 1, -1, -1):
            key = chain.keys[at]
            if at == depth - 1 and part:
                blocks_here = common
            elif at < depth:
                blocks_here = min(entries[key].blocks, common)
            elif at == count - 1:
                blocks_here = total
            else:
                blocks_here = int(_ESTIMATED_SHARE * total * (at + 1) / count)
            self._put(key, _Entry(prompt, blocks_here))
        if not prompt.entries:
            self.bytes -= prompt.size
        while self.bytes > self.max_bytes and entries:
            _, entry = entries.popitem(last=False)
            self.bytes -= _ENTRY_BYTES
            self._leave(entry.prompt)
            self.evictions += 1

    def stats(self) -> KnownStats:
        """Sizes and counters."""
        return KnownStats(len(self._entries), self.bytes, self.evictions)

    # ------------------------------------------------------------------ inside

    def _depth(self, text_keys: Sequence[BlockKey]) -> int:
        """Keys known from the start (rule 3)."""
        entries = self._entries
        return bisect_left(text_keys, True, key=lambda key: key not in entries)

    def _put(self, key: BlockKey, entry: _Entry) -> None:
        before = self._entries.get(key)
        self._entries[key] = entry
        self._entries.move_to_end(key)
        entry.prompt.entries += 1
        if before is None:
            self.bytes += _ENTRY_BYTES
        else:
            self._leave(before.prompt)

    def _leave(self, prompt: _Prompt) -> None:
        prompt.entries -= 1
        if not prompt.entries:
            self.bytes -= prompt.size

    def _clear(self) -> None:
        self._entries.clear()
        self.bytes = 0


def _common(one: array[int], other: array[int]) -> int:
    """Leading keys in common: a key names everything before it, so they are equal up to some block and differ after."""
    return bisect_left(range(min(len(one), len(other))), True, key=lambda at: one[at] != other[at])
