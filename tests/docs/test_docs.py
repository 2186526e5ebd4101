"""Docs agree with the code: generated pages are current, links lead somewhere, examples are valid."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from gateway.config import Settings

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_what_the_code_says(generator: ModuleType) -> None:
    assert generator.stale() == [], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_yaml_examples_are_valid_settings() -> None:
    checked = 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            Settings(**yaml.safe_load(block))
            checked += 1
    assert checked >= 2


def test_commands_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_no_file_names_a_place_of_this_machine_or_a_registry() -> None:
    forbidden = re.compile("|".join(("pypi" + r"\.org", "files.python" + "hosted", "deb.debian" + r"\.org")))
    for page in [*PAGES, ROOT / "constraints.txt", ROOT / "pyproject.toml", ROOT / ".ci" / "run", ROOT / "Makefile"]:
        assert not forbidden.search(page.read_text()), page
