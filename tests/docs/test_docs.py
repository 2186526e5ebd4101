"""Docs agree with the code: generated pages are current, links lead somewhere, examples are valid."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import yaml

from gateway import errors
from gateway.admin.decision_answers import TermsAnswer
from gateway.settings import Settings, json_schema

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


def test_yaml_examples_are_valid_settings_also_for_an_editor() -> None:
    schema = json_schema()
    checked = 0
    for page in PAGES:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            tree = yaml.safe_load(block)
            Settings(**tree)
            jsonschema.validate(tree, schema, cls=jsonschema.Draft202012Validator)
            checked += 1
    assert checked >= 2


def test_the_guide_to_a_decision_has_every_term() -> None:
    page = (ROOT / "docs" / "guides" / "reading-a-decision.md").read_text()
    terms = {f"{name.removesuffix('_s')} s" for name in TermsAnswer.model_fields}
    assert {term for term in terms if f"`{term}`" not in page} == set()
    (heads,) = re.findall(r"^worker  overlap  (.*)$", page, re.MULTILINE)
    assert re.split(r"  +", heads) == ["trust", *(f"{name.removesuffix('_s')} s" for name in TermsAnswer.model_fields)]


def test_decisions_have_a_number_each_and_stand_in_the_list() -> None:
    folder = ROOT / "docs" / "adr"
    pages = sorted(page.name for page in folder.glob("[0-9]*.md"))
    assert [int(page[:4]) for page in pages] == list(range(1, len(pages) + 1))
    listed = re.findall(r"^\| \[(\d+)\]\((\S+)\) \| (.*) \|$", (folder / "README.md").read_text(), re.MULTILINE)
    assert [page for _, page, _ in listed] == pages
    for number, page, _ in listed:
        assert page.startswith(number)


def test_tests_that_a_page_names_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", page.read_text())}
    assert len(named) > 30
    for path, test in (name.split("::") for name in named):
        assert re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{test}"


def test_commands_that_the_readme_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_no_file_names_a_place_of_this_machine_or_a_registry() -> None:
    forbidden = re.compile("|".join(("pypi" + r"\.org", "files.python" + "hosted", "deb.debian" + r"\.org")))
    for page in [*PAGES, ROOT / "constraints.txt", ROOT / "pyproject.toml", ROOT / ".ci" / "run", ROOT / "Makefile"]:
        assert not forbidden.search(page.read_text()), page


def _tables(page: Path) -> dict[str, list[list[str]]]:
    """Rows of each table of a page, by the first two heads."""
    tables: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in page.read_text().splitlines():
        if not line.startswith("|"):
            rows = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not rows:
            tables[" | ".join(cells[:2])] = rows = [cells]
        elif not line.startswith("|---"):
            rows.append(cells)
    return {name: rows[1:] for name, rows in tables.items()}


LIFE = ROOT / "docs" / "concepts" / "life-of-a-request.md"


def test_every_limit_of_a_request_is_told_with_its_default() -> None:
    settings = Settings(_env_file=None)
    told = set()
    for _, key, default, _ in _tables(LIFE)["phase | limit"]:
        section, name = key.strip("`").split(".")
        told.add((section, name))
        assert f"{getattr(getattr(settings, section), name):g} s" == default, key
    of_requests = {("timeouts", name) for name in type(settings.timeouts).model_fields if name.endswith("_s")}
    of_requests |= {("server", name) for name in type(settings.server).model_fields if name.endswith("_timeout_s")}
    of_requests.add(("admission", "queue_timeout_s"))
    assert told == of_requests - {("server", "ready_timeout_s")}


def test_every_error_of_a_request_is_told_as_it_is(generator: ModuleType) -> None:
    generator.errors_page()  # imports the modules with errors of their own
    classes: dict[str, type[errors.GatewayError]] = {cls.__name__: cls for cls in generator._tree(errors.GatewayError)}
    told = set()
    for _, name, status, codes, elsewhere in _tables(LIFE)["phase | error"]:
        cls = classes[name]
        told.add(name)
        assert (str(cls.status), "elsewhere" if cls.retryable else "no") == (status, elsewhere), name
        assert f"`{cls.code}`" in codes.split(", "), name
        narrower = set(re.findall(r"`(\w+)`", codes)) - {cls.code}
        source = "".join(path.read_text() for path in (ROOT / "gateway").rglob("*.py"))
        assert all(f'"{code}"' in source for code in narrower), name
    on_the_way = {
        name
        for name, cls in classes.items()
        if cls.__module__ in ("gateway.errors", "gateway.edge.responses", "gateway.edge.auth")
    }
    of_operators = {"FleetFull", "WorkerTaken"}
    abstract = {"ClientError", "WorkerError"}
    assert told == on_the_way - of_operators - abstract
