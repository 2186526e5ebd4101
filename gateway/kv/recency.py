"""Blocks of one worker in order of use: what was asked for longest ago first, the end of a chain before its beginning.

Rules:
1. Blocks are kept as *pieces*, runs of a chain that were used last at the same time; a request touches a few of them,
   not every block. A piece is parted where a chain leaves it or ends in it, and grows with a chain that goes on from
   its end, as long as nothing else does (`joint`).
2. A request touches its blocks from the last to the first. So no block was used later than the one before it in its
   chain, and what is known of a chain is its beginning.
3. Blocks go from the end of the oldest piece. The order in which they go is the one in which single blocks would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from gateway.records import BlockKey

_PIECE_BYTES: Final = 200
"""A piece with its list and its place in the table of first keys, without the blocks."""

_MAX_USES: Final = 16
"""Runs of equal age told apart in one chain: a conversation has a handful, one for each prefix it shares."""

Uses = tuple[tuple[int, float], ...]
"""Runs of blocks with their last use, as (blocks from the start, seconds)."""


class Piece:
    """A run of one chain, with its neighbours in the order of use."""

    __slots__ = ("at", "joint", "keys", "newer", "older")

    def __init__(self, keys: list[BlockKey], at: float, *, joint: bool) -> None:
        self.keys = keys
        self.at = at
        self.joint = joint
        """Some piece goes on from its end."""
        self.older: Piece | None = None
        self.newer: Piece | None = None


class Recency:
    """Blocks of one kind of one worker. `blocks` is their number, `size` the tokens that one stands for."""

    __slots__ = ("_first", "_newest", "_oldest", "blocks", "size")

    def __init__(self) -> None:
        self.blocks = 0
        self.size = 1
        self._first: dict[BlockKey, Piece] = {}
        """The pieces by their first keys."""
        self._oldest: Piece | None = None
        self._newest: Piece | None = None

    def __iter__(self) -> Iterator[BlockKey]:
        """All keys, oldest first."""
        found: list[BlockKey] = []
        piece = self._oldest
        while piece is not None:
            found += reversed(piece.keys)
            piece = piece.newer
        return iter(found)

    @property
    def oldest_at(self) -> float | None:
        """When the block used least recently was used; None when there is none."""
        return None if self._oldest is None else self._oldest.at

    @property
    def weight(self) -> int:
        """Blocks and pieces."""
        return self.blocks + len(self._first)

    @property
    def bytes(self) -> int:
        """What the order takes, without the keys themselves (estimate)."""
        return _PIECE_BYTES * len(self._first) + 9 * self.blocks

    def touch(self, keys: Sequence[BlockKey], now: float) -> tuple[int, Uses]:
        """The blocks of this chain are used now. Returns how many of them were known, from its beginning on, and their
        last uses before."""
        path: list[Piece] = []
        uses: list[tuple[int, float]] = []
        known, total = 0, len(keys)
        while known < total:
            piece = self._first.get(keys[known])
            if piece is None:
                break
            own = piece.keys
            end = known + len(own)
            whole = end <= total and keys[end - 1] == own[-1]
            if not whole:
                end = known + _common(own, keys, known)
                piece = self._part(piece, end - known)
            path.append(piece)
            if uses and uses[-1][1] == piece.at:
                uses[-1] = (end, piece.at)
            elif len(uses) < _MAX_USES:
                uses.append((end, piece.at))
            known = end
            if not whole:
                break
        if known < total:
            fresh = list(keys[known:]) if known else list(keys)
            self.blocks += total - known
            if path and not path[-1].joint:
                path[-1].keys += fresh
            else:
                if path:
                    path[-1].joint = True
                self._append(self._enter(Piece(fresh, now, joint=False)))
        path.reverse()
        for piece in path:
            piece.at = now
            if piece is not self._newest:
                self._unlink(piece)
                self._append(piece)
        return known, tuple(uses)

    def drop(self, most: int) -> list[BlockKey]:
        """Let go at most so many blocks that were used last at the same time, the least recently used ones. There are
        some."""
        piece = self._oldest
        assert piece is not None
        keys = piece.keys
        if most < len(keys):
            gone = keys[-most:]
            del keys[-most:]
            piece.joint = False  # what went on from there is gone: it was older
        else:
            gone = keys
            self._unlink(piece)
            if self._first.get(gone[0]) is piece:
                del self._first[gone[0]]
        self.blocks -= len(gone)
        return gone

    def _part(self, piece: Piece, at: int) -> Piece:
        """Part a piece before its block `at`: what follows keeps its place, the beginning is returned."""
        beginning = Piece(piece.keys[:at], piece.at, joint=True)
        del piece.keys[:at]
        self._append(self._enter(beginning))
        self._enter(piece)
        return beginning

    def _enter(self, piece: Piece) -> Piece:
        self._first[piece.keys[0]] = piece
        return piece

    def _append(self, piece: Piece) -> None:
        newest = self._newest
        piece.older, piece.newer = newest, None
        self._newest = piece
        if newest is None:
            self._oldest = piece
        else:
            newest.newer = piece

    def _unlink(self, piece: Piece) -> None:
        older, newer = piece.older, piece.newer
        if older is None:
            self._oldest = newer
        else:
            older.newer = newer
        if newer is None:
            self._newest = older
        else:
            newer.older = older
        piece.older = piece.newer = None


def _common(own: Sequence[BlockKey], keys: Sequence[BlockKey], at: int) -> int:
    """How many blocks of a piece are those of the chain from block `at` on; its first is. A key names all before it."""
    low, high = 1, min(len(own), len(keys) - at)
    while low < high:
        middle = (low + high + 1) >> 1
        if own[middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
