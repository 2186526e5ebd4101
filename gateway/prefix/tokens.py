"""Text -> token ids, and where a text may be cut so that its pieces can be encoded one by one.

Rules:
1. The ids are those of the engines' own library for the whole text. Cutting is used only where it gives the same ids.
2. A cut is made behind a *boundary token*: an added token that the tokenizer takes out of the raw text wherever it
   stands, whatever is around it. That needs: no `normalized`, `lstrip`, `rstrip`, `single_word`; not contained in
   another such token and overlapping with none (itself included). Then the text between two of them is encoded as if
   it stood alone between them.
3. Because rule 2 is about one library's behaviour, it is also tried at load: a set of awkward texts must give the same
   ids cut and whole, or this tokenizer is never cut (`boundary` is None): correct, only slower.
4. A piece is encoded together with the boundary token before it, whose id is dropped again: pre-tokenizers that treat
   the start of a text differently see the same context as in the whole text.

Thread-safe. `encode_batch_fast` is used throughout because, unlike `encode`, it releases the interpreter lock.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import AddedToken, Tokenizer

Ids = array  # of "I": token ids, unsigned 32-bit

MIN_PIECE_CHARS = 16
"""A cut comes at the first boundary token that begins at least this far behind the last cut. What stands between two
messages (a line end, the token that opens the next one) so goes with the message: one piece a message, not two or
three. Larger would glue a short system prompt to a long question, which is then not recognised behind another one."""

_MAX_BOUNDARIES = 512


class BadTokenizer(ValueError):
    """The tokenizer of the model's directory is of no use here; the message says why."""


class PromptTokenizer:
    """One model's tokenizer. `lead` and `trail` are the ids it puts around a text when it adds special tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        try:
            tokenizer.encode_batch_fast(list(_AWKWARD))
        except Exception as error:  # the library raises nothing narrower
            raise BadTokenizer(f"the tokenizer cannot encode every text: {error}") from error
        self.lead, self.trail = self._around()
        self.boundary = self._proven(boundary_tokens(tokenizer.get_added_tokens_decoder().values()))

    def encode(self, texts: Sequence[str]) -> list[Ids[int]]:
        """Token ids of each text, without the tokens a tokenizer may add around it. Raises ValueError for a text with
        lone surrogates, which no engine can encode either."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError as error:
            raise ValueError("the text has lone surrogates") from error
        return [array("I", encoding.ids) for encoding in encodings]

    def pieces(self, text: str, start: int = 0) -> Iterator[tuple[int, str]]:
        """Cuts of `text` from `start` (itself a cut) on: (end of the piece, the boundary token it ends with)."""
        if self.boundary is None:
            return
        search = self.boundary.search
        while (found := search(text, start + MIN_PIECE_CHARS)) is not None:
            start = found.end()
            yield start, found.group()

    def next_cut(self, text: str, start: int) -> int | None:
        """Where the piece that begins at `start` ends, None when the text ends before."""
        found = self.boundary.search(text, start + MIN_PIECE_CHARS) if self.boundary is not None else None
        return None if found is None else found.end()

    def encode_cut(self, text: str) -> list[int]:
        """Ids of `text` by pieces; for the proof and for tests."""
        ids: list[int] = []
        start, opening = 0, ""
        for end, closing in [*self.pieces(text), (len(text), "")]:
            piece = self.encode([opening + text[start:end]])[0]
            ids += piece[1:] if opening else piece
            start, opening = end, closing
        return ids

    def _around(self) -> tuple[Ids[int], Ids[int]]:
        """Found by encoding a letter both ways, so that it holds for every kind of post-processor."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for at in range(len(full) - len(bare) + 1):
            if full[at : at + len(bare)] == bare:
                return array("I", full[:at]), array("I", full[at + len(bare) :])
        raise BadTokenizer("the tokenizer changes a text's own ids when it adds special tokens")

    def _proven(self, tokens: Sequence[str]) -> re.Pattern[str] | None:
        if not tokens:
            return None
        # Longest first is not needed (none is part of another); sorted, so that equal models give equal patterns.
        self.boundary = re.compile("|".join(map(re.escape, sorted(tokens))))
        texts = list(proof_texts(tokens, [t.content for t in self._tokenizer.get_added_tokens_decoder().values()]))
        whole = self.encode(texts)
        cut = all(self.encode_cut(text) == list(ids) for text, ids in zip(texts, whole, strict=True))
        return self.boundary if cut else None


def boundary_tokens(added: Iterable[AddedToken]) -> list[str]:
    """The added tokens that are boundaries by rule 2, at most 512 of them (special ones first)."""
    # Normalized tokens are looked for after all others, inside of what is left between those.
    raw = [token for token in added if not token.normalized]
    if any(token.single_word for token in raw):
        return []
    stripping = any(token.lstrip or token.rstrip for token in raw)
    contents = [token.content for token in raw]
    ends = {content[at:] for content in contents for at in range(1, len(content))}
    boundaries = []
    for token in sorted(raw, key=lambda token: not token.special):
        text = token.content
        if token.lstrip or token.rstrip or not text or (stripping and text.strip() != text):
            continue
        if any(text[:length] in ends for length in range(1, len(text) + 1)):
            continue  # another one (or itself) may begin before it and reach into it, or end with it
        if any(text in other for other in contents if other != text):
            continue
        boundaries.append(text)
        if len(boundaries) == _MAX_BOUNDARIES:
            break
    return boundaries


# What tokenizers are known to treat specially at the edge of a text: blanks and line ends of every length,
# contractions, digits, letters that normalise or combine with what stands before, signs, other scripts.
_AWKWARD = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n ",
    "\t",
    "\r\n",
    "a",
    " a",
    "a ",
    "'s",
    "'S it",
    "don't",
    "'ll ",
    "12345",
    " 7",
    "3.14",
    ".",
    "...\n",
    "!?",
    " ,x",
    "user\nHello there",
    "\u0301e",
    "e\u0301",
    "\ufb01n",
    "\u00a0x",
    "\u2028",
    "\u200b",
    "\ufeff",
    "ÄÖ",
    "İi",
    "ß",
    "漢字かな",
    "한글",
    "\u1100\u1161",
    "नमस्ते",
    "🙂",
    "👩‍👩‍👧",
    "\u0000",
    "▁",
    "▁a",
    "<",
    "<|",
    "|>",
    "</",
    "[",
    "def f(x):\n    return x\n",
    '{"a": [1, 2]}',
)
_FILLER = "The quick brown fox jumps over the lazy dog, 42 times. "
_MAX_PROOF_TOKENS = 12


def proof_texts(boundaries: Sequence[str], added: Sequence[str]) -> Iterator[str]:
    """Texts on which cutting must change nothing: every awkward piece after, before and between boundary tokens."""
    first, last = boundaries[0], boundaries[-1]
    for awkward in _AWKWARD:
        for left, right in ((first, last), (last, first)):
            yield f"{awkward}{left}{awkward}{right}{awkward}"
            yield f"{_FILLER}{awkward}{left}{awkward}{_FILLER}{awkward}{right}{awkward}{_FILLER}{awkward}"
    # Any added token beside a boundary, also ones that are no boundaries themselves.
    step = max(1, len(added) // _MAX_PROOF_TOKENS)
    for other in [*added[::step], *boundaries[:_MAX_PROOF_TOKENS]]:
        for blank in ("", " ", "\n"):
            yield f"{_FILLER}{first}{blank}{other}{blank}{last}{_FILLER}{other}{blank}{first}{blank}{other}"
            yield f"{other}{blank}{first}{_FILLER}{blank}{other}{last}{blank}x{other}"
    yield first * 3 + last * 40 + first * 40
