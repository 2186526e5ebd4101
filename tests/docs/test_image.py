"""The image's recipe and the examples: linted, their paths exist, their steps work, and what they start is valid."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from gateway.config import load

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
EXAMPLES = ROOT / "deploy" / "examples"
BIN = Path(sys.executable).parent


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([BIN / "hadolint", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_what_is_copied_exists_and_is_let_in() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
        for name in line.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)


def test_the_image_runs_as_nobody_and_says_how_it_is() -> None:
    last = DOCKERFILE.read_text().split("\nFROM ")[-1]
    assert re.search(r"^USER 65532:65532$", last, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["kvgate"\]$', last, re.MULTILINE)
    assert "HEALTHCHECK" in last
    assert "pip install" not in last, "the last stage installs nothing"


def test_the_package_holds_what_it_needs_without_the_checkout(tmp_path: Path) -> None:
    """The last build step: a wheel of the code alone, started elsewhere."""
    source = tmp_path / "src"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "gateway", source / "gateway", ignore=shutil.ignore_patterns("__pycache__"))
    # As pip does it, without the environment of its own that pip fetches for each build.
    build = [sys.executable, "-c", "import setuptools.build_meta as b; print(b.build_wheel('..'))"]
    wheel = subprocess.run(build, check=True, capture_output=True, text=True, cwd=source).stdout.split()[-1]
    target = tmp_path / "site"
    with zipfile.ZipFile(tmp_path / wheel) as packed:
        packed.extractall(target)
    shutil.rmtree(source)
    run = (
        "import gateway, sys; assert gateway.__file__.startswith(sys.argv.pop(1)); from gateway.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", run, str(target), "engine", "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"},
    )
    assert "simulated" in done.stdout, done.stderr
    assert (target / "gateway" / "sim" / "model" / "tokenizer.json").is_file()


def test_what_a_build_compiles_exists_and_a_wrong_wish_is_named(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    listed = "import setuptools; setuptools.setup = lambda **_: None; import setup; print(*setup.compiled_paths())"
    paths = subprocess.run([sys.executable, "-c", listed], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "gateway/router.py" in paths.stdout.split()
    assert all((ROOT / path).is_file() for path in paths.stdout.split())
    wrong = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={"KVGATE_COMPILED": "yes"},
    )
    assert (wrong.returncode, wrong.stderr.strip()) == (1, "KVGATE_COMPILED is 'yes'; it can be 1 or quick")


def _documents() -> list[tuple[str, dict[str, Any]]]:
    found = []
    for path in sorted(EXAMPLES.rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if "apiVersion" in document and isinstance(document["apiVersion"], str) and "kind" in document:
                found.append((str(path.relative_to(EXAMPLES)), document))
    return found


@pytest.mark.parametrize(("path", "document"), _documents(), ids=lambda value: value if isinstance(value, str) else "")
def test_manifests_of_the_examples_are_valid(path: str, document: dict[str, Any]) -> None:
    if document["kind"] == "Cluster":
        assert document["apiVersion"].startswith("kind.x-k8s.io/"), path
    else:
        kubernetes_validate.validate(document, "1.31", strict=True)


def test_compose_mounts_what_there_is_and_starts_what_is_valid() -> None:
    folder = EXAMPLES / "compose"
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            assert (folder / volume.split(":")[0]).exists(), f"{name}: {volume}"
    settings = load(folder / "kvgate.yaml", environ={})
    assert {str(worker.url) for worker in settings.workers} == {
        f"http://{name}:9001" for name in compose["services"] if name.startswith("engine")
    }
    scraped = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    assert scraped["targets"] == [f"kvgate:{settings.server.admin_port}"]
