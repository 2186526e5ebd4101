"""Radix-tree prefix cache of one simulated SGLang worker: which pages are held, by how many requests, what goes first.

Rules (SGLang's `RadixCache`, page granular):
1. A node is a run of pages; its children differ in their first page. Looking a prompt up splits the node it ends in.
2. A page is in the tree once. What a request computes is its own until its prefill ends or it finishes; then it is
   inserted, and what another request has inserted meanwhile is used instead.
3. A node on the path of a running request is locked. What is not locked is evicted leaf by leaf, whole nodes, the one
   looked up longest ago first; a parent may go once its last child has gone.
4. locked + idle + reserved <= capacity, unless one request alone is larger than the cache. `reserved` are pages of
   running requests that are not in the tree.

Nothing here knows time: the order of use is counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from gateway.sim.cache import Claim, Released


class _Node:
    __slots__ = ("children", "locks", "pages", "parent", "used")

    def __init__(self, pages: list[int], parent: _Node | None, used: int) -> None:
        self.pages = pages
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.locks = 0
        self.used = used


class RadixCache:
    """A `PrefixCache`; pages are its blocks."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a cache has at least one page")
        self.capacity = capacity
        self._root = _Node([], None, 0)
        self._leaves: dict[int, _Node] = {}  # by the last page: evictable when not locked
        self._locked = 0
        self._idle = 0
        self._reserved = 0
        self._uses = 0

    # ---------------------------------------------------------------- looking

    @property
    def in_use(self) -> int:
        """Pages that cannot be evicted: locked and reserved."""
        return self._locked + self._reserved

    @property
    def resident(self) -> int:
        """Pages in the tree."""
        return self._locked + self._idle

    def __iter__(self) -> Iterator[int]:
        """Every page in the tree."""
        nodes = [self._root]
        while nodes:
            node = nodes.pop()
            yield from node.pages
            nodes += node.children.values()

    def held(self, blocks: Sequence[int]) -> int:
        """Length of the leading run of `blocks` in the tree."""
        return self._walk(blocks)[0]

    def fits(self, blocks: Sequence[int], reserved: int) -> bool:
        """See `PrefixCache`."""
        held, woken = self._walk(blocks)
        return len(blocks) - held + reserved <= self.capacity - self.in_use - woken

    # ---------------------------------------------------------------- changing

    def claim(self, blocks: Sequence[int], reserved: int) -> tuple[Claim, list[int]]:
        """See `PrefixCache`."""
        node, held = self._match(blocks)
        self._lock(node)
        claim = Claim(list(blocks), held, reserved + len(blocks) - held, at=node)
        self._reserved += claim.reserved
        return claim, self.evict(max(0, self.resident + self._reserved - self.capacity))

    def fill(self, claim: Claim) -> list[int]:
        """See `PrefixCache`."""
        node = claim.at
        assert isinstance(node, _Node)
        # What this claim itself has put into the tree is locked by it; the rest of its pages is reserved.
        mine = self._depth(node)
        last, held = self._match(claim.blocks)
        end = len(claim.blocks)
        if held < end:
            last = self._grow(last, claim.blocks[held:])
        self._lock(last)
        self._unlock(node)
        claim.at = last
        claim.reserved -= end - mine
        self._reserved -= end - mine
        return list(range(held, end))

    def extend(self, claim: Claim, block: int) -> list[int]:
        """See `PrefixCache`: an answer's pages enter the tree when the request is over."""
        claim.blocks.append(block)
        return []

    def release(self, claim: Claim, *, uncomputed: bool = False) -> Released:
        """See `PrefixCache`."""
        node = claim.at
        if not isinstance(node, _Node):
            return Released([], [])
        stored = [] if uncomputed else self.fill(claim)
        node = claim.at
        assert isinstance(node, _Node)
        self._unlock(node)
        self._reserved -= claim.reserved
        claim.reserved = 0
        claim.at = None
        return Released(stored, [])

    def evict(self, count: int | None) -> list[int]:
        """See `PrefixCache`: whole leaves, so it may be more than `count`."""
        wanted = self._idle if count is None else count
        gone: list[int] = []
        if not wanted:
            return gone
        heap = [(node.used, page) for page, node in self._leaves.items() if not node.locks]
        heapq.heapify(heap)
        while heap and len(gone) < wanted:
            leaf = self._leaves.pop(heapq.heappop(heap)[1])
            gone += leaf.pages
            self._idle -= len(leaf.pages)
            parent = leaf.parent
            assert parent is not None
            del parent.children[leaf.pages[0]]
            if not parent.children and parent.parent is not None:
                self._leaves[parent.pages[-1]] = parent
                if not parent.locks:
                    heapq.heappush(heap, (parent.used, parent.pages[-1]))
        return gone

    def clear(self) -> list[int]:
        """See `PrefixCache`."""
        return self.evict(None)

    # ---------------------------------------------------------------- the tree

    def _walk(self, blocks: Sequence[int]) -> tuple[int, int]:
        """Length of the leading run, and how much of it no request holds."""
        node, position, woken = self._root, 0, 0
        while (child := node.children.get(blocks[position]) if position < len(blocks) else None) is not None:
            same = _common(child.pages, blocks, position)
            position += same
            if not child.locks:
                woken += same
            if same < len(child.pages):
                break
            node = child
        return position, woken

    def _match(self, blocks: Sequence[int]) -> tuple[_Node, int]:
        """The node in which the leading run of `blocks` ends, split there if need be, and the length of the run."""
        self._uses += 1
        node, position = self._root, 0
        while (child := node.children.get(blocks[position]) if position < len(blocks) else None) is not None:
            same = _common(child.pages, blocks, position)
            if same < len(child.pages):
                child = self._split(child, same)
            child.used = self._uses
            node = child
            position += same
        return node, position

    def _split(self, node: _Node, at: int) -> _Node:
        """A new parent with the first `at` pages; the node keeps the rest, its children and its name as a leaf."""
        parent = node.parent
        assert parent is not None
        head = _Node(node.pages[:at], parent, node.used)
        head.locks = node.locks
        parent.children[head.pages[0]] = head
        node.pages = node.pages[at:]
        node.parent = head
        head.children[node.pages[0]] = node
        return head

    def _grow(self, parent: _Node, pages: list[int]) -> _Node:
        """A new leaf below `parent`."""
        leaf = _Node(pages, parent, self._uses)
        if parent.pages:
            self._leaves.pop(parent.pages[-1], None)
        parent.children[pages[0]] = leaf
        self._leaves[pages[-1]] = leaf
        self._idle += len(pages)
        return leaf

    def _lock(self, node: _Node) -> None:
        for step in _path(node):
            if not step.locks:
                self._locked += len(step.pages)
                self._idle -= len(step.pages)
            step.locks += 1

    def _unlock(self, node: _Node) -> None:
        for step in _path(node):
            step.locks -= 1
            if not step.locks:
                self._locked -= len(step.pages)
                self._idle += len(step.pages)

    @staticmethod
    def _depth(node: _Node) -> int:
        return sum(len(step.pages) for step in _path(node))


def _path(node: _Node) -> Iterator[_Node]:
    """The node and its ancestors, without the root."""
    step: _Node | None = node
    while step is not None and step.parent is not None:
        yield step
        step = step.parent


def _common(pages: list[int], blocks: Sequence[int], start: int) -> int:
    """How many of `pages` equal `blocks` from `start` on."""
    count = 0
    for page, block in zip(pages, blocks[start : start + len(pages)], strict=False):
        if page != block:
            break
        count += 1
    return count
