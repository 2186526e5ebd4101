"""What is known of earlier prompts: token ids of pieces, and the block keys at the end of every piece.

Two caches, both bounded in bytes, least recently used first out:
- `PieceCache`: text of a piece (with the boundary token before it) -> its token ids. Serves the same text in another
  place: another tenant, adapter or system prompt before it, an agent that drops its oldest turns.
- `ChainTree`: pieces in order from the start of a prompt -> the keys so far. Serves a conversation's next turn: a
  comparison of memory a piece, no cutting, no hashing.

Rules:
1. A node's text runs from cut to cut, so it ends with a boundary token; it is reached only by a text that has exactly
   this text at this place, and the next cut of such a text is where the node's text ends (`tokens`, rule 2).
2. Reading (`ChainTree.walk`, `PieceCache.peek`) changes nothing and may happen in any thread; everything else happens
   on the thread that owns the caches.
3. A node is touched together with all its ancestors, ancestors last: the oldest node is always a leaf.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from gateway.records import BlockKey

_NODE_BYTES = 700
"""A node without its text, keys and rest: the object, its dict of children, its places in the parent and in the order
of use (CPython 3.11-3.13, 64 bit, rounded up)."""
_KEY_BYTES = 40
"""A block key: an int above 2**30 and its place in the list."""


class PieceCache:
    """LRU of piece -> token ids."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0
        self._ids: OrderedDict[str, array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ids)

    def peek(self, piece: str) -> array[int] | None:
        """The ids, without counting it as use."""
        return self._ids.get(piece)

    def used(self, piece: str) -> None:
        """Count a hit; the piece may have gone since it was seen."""
        self.hits += 1
        if piece in self._ids:
            self._ids.move_to_end(piece)

    def store(self, piece: str, ids: array[int]) -> None:
        """Count a miss and keep the ids, unless the piece would fill a quarter of the cache alone."""
        self.misses += 1
        size = self._size(piece, ids)
        if piece in self._ids or size > self.max_bytes // 4:
            return
        self._ids[piece] = ids
        self.bytes += size
        while self.bytes > self.max_bytes:
            old, old_ids = self._ids.popitem(last=False)
            self.bytes -= self._size(old, old_ids)
            self.evictions += 1

    @staticmethod
    def _size(piece: str, ids: array[int]) -> int:
        return sys.getsizeof(piece) + sys.getsizeof(ids) + 100


class Node:
    """The state of a prompt behind one of its pieces.

    `keys` are the keys of the blocks that became full in this piece, `parent_key` the last key so far (or the
    namespace's seed), `rest` the tokens behind it, `tokens` all tokens up to here, `closing` the boundary token at
    the end.
    """

    __slots__ = ("children", "closing", "keys", "last", "parent", "parent_key", "rest", "root_name", "text", "tokens")

    def __init__(
        self,
        text: str,
        closing: str,
        *,
        keys: list[BlockKey],
        parent_key: BlockKey,
        rest: array[int],
        tokens: int,
        root_name: Hashable | None = None,
    ) -> None:
        self.text = text
        self.closing = closing
        self.keys = keys
        self.parent_key = parent_key
        self.rest = rest
        self.tokens = tokens
        self.root_name = root_name
        self.parent: Node | None = None
        self.children: dict[str, Node] | None = None
        self.last: Node | None = None

    @property
    def size(self) -> int:
        """Bytes the cache counts for this node."""
        return _NODE_BYTES + sys.getsizeof(self.text) + _KEY_BYTES * len(self.keys) + sys.getsizeof(self.rest)


@dataclass(slots=True)
class Walked:
    """How far a text is known: the nodes passed (root first), their keys, the position behind them."""

    path: list[Node]
    keys: list[BlockKey]
    at: int


class ChainTree:
    """Trie of pieces, one root a namespace and block size, with one byte limit over all of them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evictions = 0
        self._roots: dict[Hashable, Node] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def root(self, name: Hashable) -> Node | None:
        """The root of that name, if the tree has it."""
        return self._roots.get(name)

    def add_root(self, root: Node) -> None:
        """Keep a root; it goes like any other node when it has no children and was not used for long."""
        if root.root_name not in self._roots:
            self._roots[root.root_name] = root
            self._order[root] = None
            self.bytes += root.size
            self._fit()

    @staticmethod
    def walk(root: Node, text: str, next_cut: Callable[[str, int], int | None]) -> Walked:
        """Follow `text` from `root` as far as its pieces are known."""
        node, at = root, 0
        path = [root]
        keys = list(root.keys)
        while True:
            child = node.last
            # A conversation has one way on, so the child used last is nearly always the one.
            if child is None or not text.startswith(child.text, at):
                children = node.children
                end = next_cut(text, at) if children else None
                if children is None or end is None:
                    break
                child = children.get(text[at:end])
                if child is None:
                    break
            keys += child.keys
            at += len(child.text)
            path.append(child)
            node = child
        return Walked(path, keys, at)

    def touch(self, path: Sequence[Node], fresh: Sequence[Node]) -> None:
        """Mark a path as used and put new nodes (in order) behind its end, if that is still in the tree."""
        order = self._order
        end = path[-1]
        if end not in order:
            return
        used = [*path]
        for node in fresh:
            if end.children is None:
                end.children = {}
            known = end.children.setdefault(node.text, node)
            if known is node:  # else another request brought the same text meanwhile
                node.parent = end
                order[node] = None
                self.bytes += node.size
            used.append(known)
            end = known
        below: Node | None = None
        for node in reversed(used):
            order.move_to_end(node)
            if below is not None:
                node.last = below
            below = node
        self._fit()

    def _fit(self) -> None:
        while self.bytes > self.max_bytes:
            self._evict()

    def _evict(self) -> None:
        node, _ = self._order.popitem(last=False)
        self.bytes -= node.size
        self.evictions += 1
        parent = node.parent
        if parent is None:
            del self._roots[node.root_name]
            return
        if parent.children is not None:
            del parent.children[node.text]
        if parent.last is node:
            parent.last = None
        node.parent = None
