"""The alert rules: each one fires on what it is for, and stays silent when all is calm. promtool's own unit tests."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gateway.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "alerts" / "kvgate.yaml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def grows(per_minute: float, minutes: int, then: float | None = None, more: int = 0) -> str:
    """Samples of a counter, one a minute: `minutes` at one rate, then `more` at another."""
    series = f"0+{per_minute:g}x{minutes}"
    if then is not None:
        start = per_minute * minutes + then
        series += f" {start:g}+{then:g}x{more - 1}"
    return series


def stays(value: float, minutes: int, then: float | None = None, more: int = 0) -> str:
    """Samples of a gauge."""
    return f"{value:g}x{minutes}" + ("" if then is None else f" {then:g}x{more}")


class Case(NamedTuple):
    """`fault` and `calm` are series by name; `at_min` is when to look; `labels` are those of the alert that fires."""

    alert: str
    fault: dict[str, str]
    calm: dict[str, str]
    at_min: int
    labels: dict[str, str]


def ttft(
    share_slow: float, minutes: int, then: float | None = None, more: int = 0, *, label: str = 'model="m"'
) -> dict[str, str]:
    """600 first tokens a minute, `share_slow` of them between 2 and 20 s."""

    def at(share: float) -> dict[str, float]:
        return {"2.0": 600 * (1 - share), "20": 600, "+Inf": 600}

    before, after = at(share_slow), at(then if then is not None else share_slow)
    found = {
        f'kvgate_ttft_seconds_bucket{{{label},le="{le}"}}': grows(
            before[le], minutes, after[le] if then is not None else None, more
        )
        for le in before
    }
    found[f"kvgate_ttft_seconds_count{{{label}}}"] = grows(600, minutes + more)
    return found


def hits(
    share: float, minutes: int, then: float | None = None, more: int = 0, *, label: str = 'model="m"'
) -> dict[str, str]:
    """60,000 prompt tokens a minute, `share` of them from the cache."""
    return {
        f"kvgate_reported_prompt_tokens_total{{{label}}}": grows(60_000, minutes + more),
        f"kvgate_delivered_tokens_total{{{label}}}": grows(
            60_000 * share, minutes, None if then is None else 60_000 * then, more
        ),
    }


def slow(share: float, minutes: int, then: float | None = None, more: int = 0) -> dict[str, str]:
    """30,000 tokens a minute from a cache, `share` of them from a slower tier."""
    return {
        f'kvgate_hit_tokens_total{{worker="w1",tier="{tier}"}}': grows(
            30_000 * before, minutes, None if then is None else 30_000 * after, more
        )
        for tier, before, after in (("gpu", 1 - share, 1 - (then or 0)), ("cpu", share, then or 0))
    }


M, W = {"model": "m"}, {"worker": "w1"}
CASES = [
    Case("KvgateHitRateDropped", hits(0.6, 400, 0.1, 40), hits(0.6, 400, 0.55, 40), 440, M),
    Case(
        "KvgateRouteMissRateHigh",
        {
            'kvgate_route_predictions_total{worker="w1"}': grows(60, 40),
            'kvgate_route_misses_total{worker="w1",cause="evicted"}': grows(12, 40),
        },
        {
            'kvgate_route_predictions_total{worker="w1"}': grows(60, 40),
            'kvgate_route_misses_total{worker="w1",cause="evicted"}': grows(1, 40),
        },
        40,
        W,
    ),
    Case("KvgateMissBudgetBurning", hits(0.2, 90), hits(0.75, 90), 90, M),
    Case(
        "KvgateTtftWithSlowTierHits",
        {**ttft(0.0, 150, 0.1, 40, label='worker="w1"'), **slow(0.05, 150, 0.6, 40)},
        {**ttft(0.0, 150, 0.1, 40, label='worker="w1"'), **slow(0.05, 150, 0.05, 40)},
        190,
        W,
    ),
    Case(
        "KvgateTransferBandwidthLow",
        {
            'vllm:kv_offload_load_bytes_total{instance="e"}': grows(6e9, 40),
            'vllm:kv_offload_load_time_total{instance="e"}': grows(30, 40),
        },
        {
            'vllm:kv_offload_load_bytes_total{instance="e"}': grows(6e11, 40),
            'vllm:kv_offload_load_time_total{instance="e"}': grows(30, 40),
        },
        40,
        {"instance": "e"},
    ),
    Case(
        "KvgateKvUsageHigh",
        {'kvgate_worker_kv_usage_ratio{worker="w1"}': stays(0.9, 40)},
        {'kvgate_worker_kv_usage_ratio{worker="w1"}': stays(0.9, 5, 0.6, 35)},
        40,
        W,
    ),
    Case(
        "KvgateCacheChurnHigh",
        {
            'kvgate_kv_blocks_stored_total{worker="w1",tier="gpu"}': grows(3000, 60),
            'kvgate_kv_blocks_removed_total{worker="w1",tier="gpu"}': grows(2950, 60),
            **hits(0.05, 60, label='worker="w1"'),
        },
        {
            'kvgate_kv_blocks_stored_total{worker="w1",tier="gpu"}': grows(3000, 60),
            'kvgate_kv_blocks_removed_total{worker="w1",tier="gpu"}': grows(2950, 60),
            **hits(0.5, 60, label='worker="w1"'),
        },
        60,
        W,
    ),
    Case(
        "KvgateIndexBlind",
        {'kvgate_worker_trust_state{worker="w1",state="blind"}': stays(1, 30)},
        {'kvgate_worker_trust_state{worker="w1",state="blind"}': stays(1, 5, 0, 25)},
        30,
        W,
    ),
    Case(
        "KvgateIndexUncertain",
        {'kvgate_worker_trust_state{worker="w1",state="uncertain"}': stays(1, 30)},
        {'kvgate_worker_trust_state{worker="w1",state="uncertain"}': stays(1, 5, 0, 25)},
        30,
        W,
    ),
    Case(
        "KvgateGapsUnrepaired",
        {
            'kvgate_kv_event_gaps_total{worker="w1"}': grows(1, 30),
            'kvgate_kv_event_replays_total{worker="w1",result="timed_out"}': grows(1, 30),
        },
        {
            'kvgate_kv_event_gaps_total{worker="w1"}': grows(1, 30),
            'kvgate_kv_event_replays_total{worker="w1",result="complete"}': grows(1, 30),
        },
        30,
        W,
    ),
    Case("KvgateTtftBudgetBurningFast", ttft(0.3, 90), ttft(0.005, 90), 90, M),
    Case("KvgateTtftBudgetBurningSlowly", ttft(0.1, 420), ttft(0.005, 420), 420, M),
    Case(
        "KvgateWorkerEjected",
        {'kvgate_worker_state{worker="w1",state="ejected"}': stays(1, 10)},
        {'kvgate_worker_state{worker="w1",state="ejected"}': stays(0, 10)},
        10,
        W,
    ),
    Case(
        "KvgateNoWorkerReady",
        {'kvgate_pool_ready_workers{model="m"}': stays(0, 10)},
        {'kvgate_pool_ready_workers{model="m"}': stays(2, 10)},
        10,
        M,
    ),
    Case(
        "KvgateQueueShedding",
        {'kvgate_shed_total{pool="m",reason="queue_full"}': grows(30, 20)},
        {'kvgate_shed_total{pool="m",reason="queue_full"}': stays(7, 20)},
        20,
        {"pool": "m", "reason": "queue_full"},
    ),
    Case(
        "KvgateAccountingDrift",
        {'kvgate_accounting_drift{worker="w1"}': stays(1, 20)},
        {'kvgate_accounting_drift{worker="w1"}': "1 0x20"},
        20,
        W,
    ),
    Case(
        "KvgateStoreDown",
        {'kvgate_store_up{instance="a"}': stays(0, 10)},
        {'kvgate_store_up{instance="a"}': stays(1, 10)},
        10,
        {"instance": "a"},
    ),
    Case(
        "KvgateTasksFailing",
        {'kvgate_task_restarts_total{instance="a"}': grows(1, 20)},
        {'kvgate_task_restarts_total{instance="a"}': stays(5, 20)},
        20,
        {"instance": "a"},
    ),
]


def _promtool(case: Case, series: dict[str, str], folder: Path) -> tuple[int, str]:
    """promtool's code and words on the claim that nothing fires."""
    test: dict[str, Any] = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [
                    {"alertname": case.alert, "eval_time": f"{case.at_min}m", "exp_alerts": []},
                ],
            }
        ],
    }
    file = folder / "test.yaml"
    file.write_text(yaml.safe_dump(test))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_on_its_fault_and_not_when_all_is_calm(case: Case, tmp_path: Path) -> None:
    # promtool compares annotations too, which hold the value: so it is told that nothing fires, and says what does.
    _, said = _promtool(case, case.fault, tmp_path)
    fired = re.search(r"got:\s*\[.*?Labels:\{([^}]*)\}", said, re.DOTALL)
    assert fired, f"did not fire: {said}"
    wanted = {"alertname": case.alert, **case.labels, **ALERTS[case.alert]["labels"]}
    assert dict(re.findall(r'(\w+)="([^"]*)"', fired[1])) == wanted
    code, said = _promtool(case, case.calm, tmp_path)
    assert code == 0, said


def test_every_alert_has_a_case() -> None:
    assert sorted(case.alert for case in CASES) == sorted(ALERTS)


def test_promtool_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", RULES], check=True, capture_output=True)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_it_means_and_what_to_do(name: str) -> None:
    notes = ALERTS[name]["annotations"]
    assert set(notes) == {"summary", "description", "action", "runbook_url"}
    page = ROOT / notes["runbook_url"]
    assert name in page.read_text(), "the page names the alert"


def test_every_metric_of_the_rules_exists() -> None:
    known = {spec.name for spec in METRICS}
    histograms = {f"{spec.name}_{part}" for spec in METRICS for part in ("bucket", "count", "sum")}
    used = set(re.findall(r"\bkvgate_\w+", " ".join(rule["expr"] for rule in ALERTS.values())))
    assert used - known - histograms == set()
