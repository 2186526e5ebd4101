"""One text on its way to a chain of block keys.

Walk what the chain tree knows, cut the rest into pieces, take the ids of known pieces from the piece cache, encode the
others, chain the keys, remember. `Run(...)` and `finish()` only read the caches (they may run in a thread);
`remember()` writes them, on the thread that owns them.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import NamedTuple

from gateway import keys
from gateway.pausing import let_others_run
from gateway.prefix.chains import ChainTree, Node, PieceCache
from gateway.prefix.tokens import PromptTokenizer
from gateway.records import BlockKey, Chain

MAX_NEW_PIECES = 4_096
"""Pieces one text may bring; what comes behind them is one last piece, encoded in one go and not kept in the tree.
Every piece takes about 1 KB while the request is worked on, and a text can consist of special tokens only."""


class _Piece(NamedTuple):
    """`text` begins with the boundary token that closed the piece before; `own` is the part behind that.
    `closing` is the boundary token at the end, empty for the last piece of a text."""

    text: str
    own: str
    closing: str
    ids: array[int] | None


class Run:
    """`unknown_chars` is what `finish()` would have to encode; `chain` is there afterwards."""

    __slots__ = (
        "_cache",
        "_encoded",
        "_fresh",
        "_known",
        "_pieces",
        "_tokenizer",
        "_tree",
        "_walked",
        "chain",
        "text_chars",
        "unknown_chars",
    )

    chain: Chain

    def __init__(
        self, text: str, root: Node, *, tokenizer: PromptTokenizer, tree: ChainTree, cache: PieceCache
    ) -> None:
        self._tokenizer = tokenizer
        self._tree = tree
        self._cache = cache
        self._walked = tree.walk(root, text, tokenizer.next_cut)
        self._pieces: list[_Piece] = []
        self._known: list[str] = []
        self._encoded: list[tuple[str, array[int]]] = []
        self._fresh: list[Node] = []
        self.text_chars = len(text)
        self.unknown_chars = 0
        start, opening = self._walked.at, self._walked.path[-1].closing
        for end, closing in (*islice(tokenizer.pieces(text, start), MAX_NEW_PIECES), (len(text), "")):
            own = text[start:end]
            piece = opening + own
            ids = cache.peek(piece)
            if ids is None:
                self.unknown_chars += len(piece)
            self._pieces.append(_Piece(piece, own, closing, ids))
            start, opening = end, closing

    def finish(self, block_size: int, trail: array[int] | None) -> None:
        """Find the token ids, put those of `trail` behind them, and chain the keys.

        Raises ValueError for a text that cannot be encoded.
        """
        ids_of = self._ids()
        end = self._walked.path[-1]
        parent, rest, tokens = end.parent_key, end.rest, end.tokens
        found = self._walked.keys
        for piece, ids in zip(self._pieces, ids_of, strict=True):
            if not piece.closing and trail:
                ids = ids + trail
            let_others_run()
            tokens += len(ids)
            rest = rest + ids
            fresh: list[BlockKey] = []
            if len(rest) >= block_size:
                fresh = keys.chain(parent, rest, block_size)
                parent = fresh[-1]
                rest = rest[len(fresh) * block_size :]
                found += fresh
            if piece.closing:
                node = Node(piece.own, piece.closing, keys=fresh, parent_key=parent, rest=rest, tokens=tokens)
                self._fresh.append(node)
        self.chain = Chain(found, tokens)

    def remember(self) -> None:
        """Put what is new into the caches and mark the rest as used."""
        cache = self._cache
        for text in self._known:
            cache.used(text)
        for text, ids in self._encoded:
            cache.store(text, ids)
        self._tree.touch(self._walked.path, self._fresh)

    def _ids(self) -> list[array[int]]:
        """Token ids of every piece behind the walked part."""
        # Looked up once more: of many requests that bring the same new text at once, most wait for a thread, and find
        # here what the first one left.
        peek = self._cache.peek
        found = [piece.ids if piece.ids is not None else peek(piece.text) for piece in self._pieces]
        unknown = [piece.text for piece, ids in zip(self._pieces, found, strict=True) if ids is None]
        self.unknown_chars = sum(map(len, unknown))
        encoded = iter(self._tokenizer.encode(unknown) if unknown else ())
        result = []
        opening = self._walked.path[-1].closing
        for piece, ids in zip(self._pieces, found, strict=True):
            if ids is not None:
                self._known.append(piece.text)
            else:
                ids = next(encoded)
                if opening:  # encoded with the piece for its context, but it belongs to the piece before
                    ids = ids[1:]
                self._encoded.append((piece.text, ids))
            result.append(ids)
            opening = piece.closing
        return result
