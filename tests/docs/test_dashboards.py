"""Dashboards are what their generator writes, and ask for what the gateway exposes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gateway.telemetry.metrics import METRICS, Kind
from gateway.telemetry.requests import TTFT_BOUNDS

ROOT = Path(__file__).parents[2]
DASHBOARDS = sorted((ROOT / "dashboards").glob("*.json"))
RULES = (ROOT / "deploy" / "alerts" / "kvgate.yaml").read_text()
KNOWN = {spec.name for spec in METRICS} | {
    f"{spec.name}_{part}" for spec in METRICS if spec.kind is Kind.HISTOGRAM for part in ("bucket", "count", "sum")
}


def test_the_files_are_what_the_generator_writes() -> None:
    subprocess.run([sys.executable, ROOT / "dashboards" / "generate.py", "--check"], check=True)


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_asks_for_metrics_that_exist(path: Path) -> None:
    used = set(re.findall(r"\bkvgate_\w+", path.read_text()))
    assert used - KNOWN == set()


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_places_of_their_own_and_words(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"].endswith("."), panel["title"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_limits_of_time_are_bounds_of_the_histogram() -> None:
    asked = re.findall(
        r'kvgate_ttft_seconds_bucket\{le=\\?"([\d.]+)', RULES + "".join(p.read_text() for p in DASHBOARDS)
    )
    assert asked
    assert set(asked) <= {repr(float(bound)) for bound in TTFT_BOUNDS}


def test_the_chart_carries_the_same_files() -> None:
    files = ROOT / "deploy" / "helm" / "kvgate" / "files"
    assert (files / "alerts" / "kvgate.yaml").read_text() == RULES
    assert sorted(path.name for path in (files / "dashboards").glob("*.json")) == [path.name for path in DASHBOARDS]
    assert yaml.safe_load(RULES)["groups"]
