"""The chain tree against a dictionary of every text it was given."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from gateway.prefix.chains import ChainTree, Node
from gateway.records import BlockKey

paths = st.lists(st.sampled_from(["a|", "b|", "aa|", "ab|", "c" * 50 + "|"]), max_size=6)


def node(path: list[str]) -> Node:
    text = path[-1] if path else ""
    return Node(
        text,
        "|" if text else "",
        keys=[BlockKey(hash("".join(path)) & (1 << 64) - 1)],
        parent_key=BlockKey(0),
        rest=array("I"),
        tokens=0,
        root_name=None if path else "root",
    )


def next_cut(text: str, start: int) -> int | None:
    end = text.find("|", start)
    return None if end < 0 else end + 1


@given(st.lists(paths, max_size=40), st.integers(min_value=1, max_value=20))
def test_tree_gives_what_was_put_in_and_stays_in_its_limit(requests: list[list[str]], room: int) -> None:
    tree = ChainTree(room * 1_000)
    for path in requests:
        root = tree.root("root")
        if root is None:
            root = node([])
            tree.add_root(root)
        walked = tree.walk(root, "".join(path), next_cut)
        known = len(walked.path) - 1
        assert walked.at == sum(map(len, path[:known]))
        assert walked.keys == [node(path[:count]).keys[0] for count in range(known + 1)]
        fresh = [node(path[:count]) for count in range(known + 1, len(path) + 1)]
        tree.touch(walked.path, fresh)
        assert tree.bytes <= tree.max_bytes
        check(tree)


def check(tree: ChainTree) -> None:
    """Every node in the order hangs on a node in the order, and the other way round; sizes add up."""
    root = tree.root("root")
    nodes = [root] if root is not None else []
    for passed in nodes:
        for child in (passed.children or {}).values():
            assert child.parent is passed
            nodes.append(child)
        assert passed.last is None or passed.last in (passed.children or {}).values()
    assert len(nodes) == len(tree)
    assert sum(passed.size for passed in nodes) == tree.bytes
