"""Every command that the documentation, the alerts and the examples name exists, with its subcommand and its flags."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from gateway.cli import app as cli

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.yaml"),
        *(ROOT / "deploy").rglob("*.txt"),
    )
    if "reference" not in path.parts
)
ROOT_COMMAND = typer.main.get_command(cli.app)

_ENDS = {"|", "&&", ">", "&"}
"""What follows is another command or a file."""


def _named(page: Path) -> Iterator[list[str]]:
    """The words of each command: in backquotes, or on a line of its own (of a page: in a block of code)."""
    text = page.read_text()
    lines = "".join(re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)) if page.suffix == ".md" else text
    found = [*re.findall(r"`kvgate ([^`]*)`", text), *re.findall(r"^ *(?:\$ )?kvgate +([a-z].*)$", lines, re.MULTILINE)]
    for line in found:
        words = shlex.split(line.rstrip("\\"), comments=True)
        ends = [at for at, word in enumerate(words) if word in _ENDS]
        yield words[: ends[0]] if ends else words


def _wrong(words: list[str]) -> str | None:
    command = ROOT_COMMAND
    rest = list(words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        names = rest.pop(0).split("|")
        unknown = [name for name in names if name not in command.commands]
        if unknown:
            return f"`kvgate {' '.join(words)}`: no command {', '.join(unknown)}"
        command = command.commands[names[0]]
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    for word in rest:
        if word.startswith("--") and word.partition("=")[0] not in flags:
            return f"`kvgate {' '.join(words)}`: no flag {word}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_the_pages_exist(page: Path) -> None:
    assert [wrong for words in _named(page) if (wrong := _wrong(words)) is not None] == []
