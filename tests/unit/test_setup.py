"""What may be compiled (`setup.py`): mypyc differs from Python in a few things, and those modules keep off them."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_WAITING = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The modules that a build may compile."""
    monkeypatch.setattr("setuptools.setup", lambda **_: None)
    return [_ROOT / path for path in runpy.run_path(str(_ROOT / "setup.py"))["compiled_paths"]()]


def _handling(tree: ast.Module) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            yield from node.finalbody
            for handler in node.handlers:
                yield from handler.body


def test_nobody_waits_while_an_exception_is_handled(compiled: list[Path]) -> None:
    """Python keeps the exception that is handled for each coroutine. Compiled ones keep it for the thread: while one
    waits, whatever fails in another would be chained to it, and told in logs as a consequence of it."""
    found = [
        f"{path.relative_to(_ROOT)}:{node.lineno}"
        for path in compiled
        for statement in _handling(ast.parse(path.read_text()))
        for node in ast.walk(statement)
        if isinstance(node, _WAITING)
    ]
    assert compiled
    assert found == []


def test_no_exception_is_raised_from_none(compiled: list[Path]) -> None:
    """Compiled code leaves out what stands behind `from`: the exception before is shown nevertheless."""
    found = [
        f"{path.relative_to(_ROOT)}:{node.lineno}"
        for path in compiled
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and isinstance(node.cause, ast.Constant)
    ]
    assert found == []


def test_what_lets_other_threads_run_stays_python(compiled: list[Path]) -> None:
    """A compiled loop or function is no place where the interpreter's lock changes hands."""
    assert not {_ROOT / "gateway/pausing.py", _ROOT / "gateway/api/pieces.py"} & set(compiled)
