"""The shape of the code: files stay small enough to be read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_LINES = 600


def test_no_file_outgrows_a_reader() -> None:
    long = {str(path): lines for path in ROOT.glob("gateway/**/*.py") if (lines := _lines(path)) > MAX_LINES}
    assert long == {}, "split by responsibility"


def _lines(path: Path) -> int:
    return path.read_text().count("\n")
