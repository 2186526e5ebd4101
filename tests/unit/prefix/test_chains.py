from __future__ import annotations

from array import array

from gateway.prefix.chains import ChainTree, Node, PieceCache
from gateway.records import BlockKey


def node(text: str, key: int = 0, *, root_name: str | None = None) -> Node:
    return Node(
        text,
        text[-1:],
        keys=[BlockKey(key)] if key else [],
        parent_key=BlockKey(key),
        rest=array("I"),
        tokens=len(text),
        root_name=root_name,
    )


def next_cut(text: str, start: int) -> int | None:
    end = text.find("|", start)
    return None if end < 0 else end + 1


def grow(tree: ChainTree, root: Node, *texts: str) -> list[Node]:
    """Add a path of pieces, as a request that brings all of them would."""
    walked = tree.walk(root, "".join(texts), next_cut)
    known = len(walked.path) - 1
    fresh = [node(text, key=hash(text) & 0xFFFF | 1) for text in texts[known:]]
    tree.touch(walked.path, fresh)
    return [*walked.path, *fresh]


def test_walk_follows_known_pieces_only() -> None:
    tree = ChainTree(1 << 20)
    root = node("", root_name="r")
    tree.add_root(root)
    path = grow(tree, root, "ab|", "c|", "d|")
    walked = tree.walk(root, "ab|c|d|tail", next_cut)
    assert walked.path == path
    assert walked.keys == [key for passed in path for key in passed.keys]
    assert walked.at == len("ab|c|d|")
    for text, at in (("ab|c|x|", 5), ("ab|c|d", 5), ("ab|", 3), ("ab", 0), ("x|", 0), ("", 0), ("ab|cc|d|", 3)):
        assert tree.walk(root, text, next_cut).at == at


def test_walk_finds_every_branch_whichever_was_used_last() -> None:
    tree = ChainTree(1 << 20)
    root = node("", root_name="r")
    tree.add_root(root)
    for branch in "abcdef":
        grow(tree, root, "shared|", f"{branch}|", "same|")
    for branch in "fbdace":
        text = f"shared|{branch}|same|"
        walked = tree.walk(root, text, next_cut)
        assert walked.at == len(text)
        tree.touch(walked.path, [])
        assert [passed.text for passed in walked.path[1:]] == ["shared|", f"{branch}|", "same|"]


def test_the_same_text_brought_twice_at_once_is_kept_once() -> None:
    tree = ChainTree(1 << 20)
    root = node("", root_name="r")
    tree.add_root(root)
    first, second = (tree.walk(root, "a|b|", next_cut) for _ in range(2))
    tree.touch(first.path, [node("a|"), node("b|")])
    size, count = tree.bytes, len(tree)
    tree.touch(second.path, [node("a|"), node("b|"), node("c|")])
    assert len(tree) == count + 1
    assert tree.bytes == size + node("c|").size
    assert tree.walk(root, "a|b|c|", next_cut).at == 6


def test_oldest_leaves_go_first_and_the_limit_holds() -> None:
    tree = ChainTree(20 * node("conversation 00|").size)
    root = node("", root_name="r")
    tree.add_root(root)
    for number in range(100):
        grow(tree, root, "system|", f"conversation {number:02}|", "more|")
        assert tree.bytes <= tree.max_bytes
        assert tree.root("r") is root
        # What was just used is there, down to its end.
        assert tree.walk(root, f"system|conversation {number:02}|more|", next_cut).at == 28
    assert tree.walk(root, "system|conversation 00|", next_cut).at == len("system|")
    assert tree.evictions == 100 * 2 + 2 - len(tree)


def test_a_path_that_was_evicted_meanwhile_is_not_grown() -> None:
    tree = ChainTree(4 * node("xx|").size)
    root = node("", root_name="r")
    tree.add_root(root)
    grow(tree, root, "aa|", "bb|")
    stale = tree.walk(root, "aa|bb|", next_cut)
    for number in range(10, 20):
        grow(tree, root, f"{number}|")
    size = tree.bytes
    tree.touch(stale.path, [node("cc|")])
    assert tree.bytes == size
    assert tree.walk(root, "aa|bb|cc|", next_cut).at == 0


def test_roots_go_when_they_are_empty_and_old() -> None:
    tree = ChainTree(3 * node("").size)
    for number in range(10):
        tree.add_root(node("", root_name=f"r{number}"))
        tree.touch([tree.root(f"r{number}") or node("")], [])
    assert tree.root("r0") is None
    assert tree.root("r9") is not None
    assert len(tree) == 3


def test_piece_cache_counts_and_stays_in_its_limit() -> None:
    cache = PieceCache(10_000)
    ids = array("I", range(50))
    assert cache.peek("a") is None
    for number in range(100):
        cache.store(f"piece {number}", ids)
        assert cache.bytes <= 10_000
    assert cache.peek("piece 99") is ids
    assert cache.peek("piece 0") is None
    kept = len(cache)
    assert cache.evictions == 100 - kept
    # Use keeps a piece alive.
    oldest = f"piece {100 - kept}"
    cache.used(oldest)
    cache.store("one more", ids)
    assert cache.peek(oldest) is ids
    assert (cache.hits, cache.misses) == (1, 101)
    cache.used("not there")
    cache.store("too large", array("I", range(5_000)))
    assert cache.peek("too large") is None
    size = cache.bytes
    cache.store("one more", ids)
    assert cache.bytes == size


def test_roots_alone_stay_in_the_limit() -> None:
    """Every cache salt makes one, also for prompts that are never walked."""
    tree = ChainTree(max_bytes=10_000)
    for number in range(1_000):
        tree.add_root(node("", root_name=f"salt {number}"))
    assert tree.bytes <= tree.max_bytes
    assert 0 < len(tree) < 20
    assert tree.root("salt 999") is not None
