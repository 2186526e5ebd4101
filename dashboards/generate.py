"""Writes dashboards/*.json for Grafana from the tables below.

python dashboards/generate.py            write the files
python dashboards/generate.py --check    exit 1 when a file does not agree with this one

A panel is a title, a unit, a sentence on how to read it and its queries; everything else (places, colours, data source)
is the same for all. Queries whose series appear only when something goes wrong end in `or vector(0)`: an empty panel
means that nothing is scraped, never that nothing happened.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_MODEL = 'model=~"$model"'
_WORKER = 'worker=~"$worker"'


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel; `legend` may name labels as `{{worker}}`."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is Grafana's word; `kind` is `timeseries`, `stat`, `state-timeline` or `bargauge`."""

    title: str
    unit: str
    note: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A file of its own; `rows` are headed groups of panels, `variables` are labels to choose by."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[tuple[str, str], ...]


def rate(metric: str, by: str, chosen: str = "") -> str:
    """A counter's rate a second, summed by labels."""
    total = f"sum by ({by}) (rate({metric}{{{chosen}}}[$__rate_interval]))"
    return total.replace("{}", "")


def quantile(share: float, metric: str, by: str, chosen: str = "") -> str:
    """A histogram's quantile by labels."""
    return f"histogram_quantile({share:g}, {rate(f'{metric}_bucket', f'le, {by}' if by else 'le', chosen)})"


def sometimes(expr: str) -> str:
    """For series that are not there until something happens."""
    return f"{expr} or vector(0)"


def share(part: str, whole: str, by: str, chosen: str = "") -> str:
    """One counter's growth as a share of another's."""
    return f"{rate(part, by, chosen)} / {rate(whole, by, chosen)}"


_FUNNEL = (
    ("available", "kvgate_available_tokens_total", "kvgate_prompt_tokens_total"),
    ("predicted", "kvgate_predicted_tokens_total", "kvgate_prompt_tokens_total"),
    ("delivered", "kvgate_delivered_tokens_total", "kvgate_reported_prompt_tokens_total"),
)

OVERVIEW = Dashboard(
    "kvgate-overview",
    "kvgate / overview",
    (
        (
            "Is it well?",
            (
                Panel(
                    "Hit rate",
                    "percentunit",
                    "Prompt tokens that workers took from their caches, as they report it.",
                    (
                        Query(
                            "sum(rate(kvgate_delivered_tokens_total[15m]))"
                            " / sum(rate(kvgate_reported_prompt_tokens_total[15m]))"
                        ),
                    ),
                    kind="stat",
                    most=1,
                ),
                Panel(
                    "First tokens within 2 s",
                    "percentunit",
                    "The objective of the alerts; one of the histogram's bounds.",
                    (
                        Query(
                            'sum(rate(kvgate_ttft_seconds_bucket{le="2.0"}[15m]))'
                            " / sum(rate(kvgate_ttft_seconds_count[15m]))"
                        ),
                    ),
                    kind="stat",
                    most=1,
                ),
                Panel(
                    "Requests in flight",
                    "short",
                    "Open on workers, all replicas together.",
                    (Query("sum(kvgate_worker_inflight_requests)"),),
                    kind="stat",
                ),
            ),
        ),
        (
            "Requests",
            (
                Panel(
                    "Requests by status",
                    "reqps",
                    "499: the client left before the answer.",
                    (Query(rate("kvgate_requests_total", "code", _MODEL), "{{code}}"),),
                    stacked=True,
                ),
                Panel(
                    "How they ended",
                    "reqps",
                    "worker_failed includes streams that broke after status 200.",
                    (Query(rate("kvgate_request_results_total", "result"), "{{result}}"),),
                    stacked=True,
                ),
                Panel(
                    "Time to first token",
                    "s",
                    "From the first byte of the request to the first of the answer.",
                    (
                        Query(quantile(0.5, "kvgate_ttft_seconds", "model", _MODEL), "p50 {{model}}"),
                        Query(quantile(0.99, "kvgate_ttft_seconds", "model", _MODEL), "p99 {{model}}"),
                    ),
                ),
                Panel(
                    "Time between tokens",
                    "s",
                    "Mean of each answer.",
                    (
                        Query(quantile(0.5, "kvgate_inter_token_seconds", "model", _MODEL), "p50 {{model}}"),
                        Query(quantile(0.99, "kvgate_inter_token_seconds", "model", _MODEL), "p99 {{model}}"),
                    ),
                ),
                Panel(
                    "Where the gateway's own time goes (p99)",
                    "s",
                    "Before the worker had the request. `queue` is waiting for a worker, `connect` the network.",
                    (Query(quantile(0.99, "kvgate_overhead_seconds", "stage"), "{{stage}}"),),
                ),
                Panel(
                    "Prompt tokens",
                    "short",
                    "A second, by model.",
                    (Query(rate("kvgate_prompt_tokens_total", "model", _MODEL), "{{model}}"),),
                    stacked=True,
                ),
            ),
        ),
        (
            "Cache: what was there, what was expected, what came",
            (
                Panel(
                    "Hit funnel",
                    "percentunit",
                    "Available: the best worker held it. Predicted: the chosen one did. Delivered: it said so. The"
                    " first gap is the price of balance, the second the index's error.",
                    tuple(
                        Query(share(part, whole, "model", _MODEL), f"{name} {{{{model}}}}")
                        for name, part, whole in _FUNNEL
                    ),
                    most=1,
                ),
                Panel(
                    "Route misses by cause",
                    "percentunit",
                    "Of the predictions that could be checked.",
                    (
                        Query(
                            sometimes(
                                f"{rate('kvgate_route_misses_total', 'cause')}"
                                " / on () group_left () sum(rate(kvgate_route_predictions_total[$__rate_interval]))"
                            ),
                            "{{cause}}",
                        ),
                    ),
                    stacked=True,
                    most=1,
                ),
                Panel(
                    "Hits by tier",
                    "short",
                    "Tokens a second from caches. A slower tier helps only where reading is faster than computing.",
                    (Query(rate("kvgate_hit_tokens_total", "tier"), "{{tier}}"),),
                    stacked=True,
                ),
                Panel(
                    "Lost to drift",
                    "percentunit",
                    "Prompt tokens computed because prompts part earlier than those of their application usually do.",
                    (
                        Query(
                            share("kvgate_prefix_drift_tokens_total", "kvgate_prefix_tokens_total", "model", _MODEL),
                            "{{model}}",
                        ),
                    ),
                    most=1,
                ),
                Panel(
                    "Sessions",
                    "reqps",
                    "kept: on its worker; moved: elsewhere, for a reason; new; none: no session id.",
                    (Query(rate("kvgate_affinity_total", "result"), "{{result}}"),),
                    stacked=True,
                ),
            ),
        ),
    ),
    (("model", "label_values(kvgate_requests_total, model)"),),
)

WORKERS = Dashboard(
    "kvgate-workers",
    "kvgate / workers",
    (
        (
            "State",
            (
                Panel(
                    "State",
                    "none",
                    "The state each worker is in.",
                    (Query(f"kvgate_worker_state{{{_WORKER}}} == 1", "{{worker}} {{state}}"),),
                    kind="state-timeline",
                ),
                Panel(
                    "Trust in the index",
                    "percentunit",
                    "Factor on a worker's overlap: 1 believed, 0 not at all.",
                    (Query(f"kvgate_worker_trust{{{_WORKER}}}", "{{worker}}"),),
                    most=1,
                ),
                Panel(
                    "Workers ready",
                    "short",
                    "By model.",
                    (Query("kvgate_pool_ready_workers", "{{model}}"),),
                ),
            ),
        ),
        (
            "Load",
            (
                Panel(
                    "In flight",
                    "short",
                    "Requests this gateway has open on the worker.",
                    (Query(f"sum by (worker) (kvgate_worker_inflight_requests{{{_WORKER}}})", "{{worker}}"),),
                ),
                Panel(
                    "Prompt tokens ahead",
                    "short",
                    "Uncached tokens sent and not yet computed.",
                    (Query(f"sum by (worker) (kvgate_worker_inflight_tokens{{{_WORKER}}})", "{{worker}}"),),
                ),
                Panel(
                    "Waiting in the engine",
                    "short",
                    "As the worker says; 0 is the aim: requests wait at the gateway, where they can still choose.",
                    (Query(f"max by (worker) (kvgate_worker_waiting_requests{{{_WORKER}}})", "{{worker}}"),),
                ),
                Panel(
                    "KV use",
                    "percentunit",
                    "Held by running requests; above 80 % there is no head room.",
                    (Query(f"max by (worker) (kvgate_worker_kv_usage_ratio{{{_WORKER}}})", "{{worker}}"),),
                    most=1,
                ),
                Panel(
                    "Requests",
                    "reqps",
                    "By worker.",
                    (Query(rate("kvgate_requests_total", "worker", _WORKER), "{{worker}}"),),
                    stacked=True,
                ),
                Panel(
                    "Time to first token (p99)",
                    "s",
                    "By worker.",
                    (Query(quantile(0.99, "kvgate_ttft_seconds", "worker", _WORKER), "{{worker}}"),),
                ),
            ),
        ),
        (
            "Failures",
            (
                Panel(
                    "Breaker",
                    "none",
                    "0 closed, 1 half open, 2 open.",
                    (Query(f"max by (worker) (kvgate_breaker_state{{{_WORKER}}})", "{{worker}}"),),
                ),
                Panel(
                    "Retries by reason",
                    "reqps",
                    "Further workers tried before the first byte.",
                    (Query(sometimes(rate("kvgate_retries_total", "reason")), "{{reason}}"),),
                    stacked=True,
                ),
                Panel(
                    "Second workers for late requests",
                    "reqps",
                    "By what became of the second; and late requests that got none, by reason.",
                    (
                        Query(sometimes(rate("kvgate_hedges_total", "outcome")), "{{outcome}}"),
                        Query(sometimes(rate("kvgate_hedges_refused_total", "reason")), "none: {{reason}}"),
                    ),
                ),
                Panel(
                    "Age of the load figures",
                    "s",
                    "Old ones are not used.",
                    (Query(f"max by (worker) (kvgate_worker_load_age_seconds{{{_WORKER}}})", "{{worker}}"),),
                ),
            ),
        ),
    ),
    (("worker", "label_values(kvgate_worker_state, worker)"),),
)

INDEX = Dashboard(
    "kvgate-index",
    "kvgate / index and events",
    (
        (
            "Index",
            (
                Panel(
                    "Blocks",
                    "short",
                    "By worker and tier.",
                    (Query(f"max by (worker, tier) (kvgate_index_blocks{{{_WORKER}}})", "{{worker}} {{tier}}"),),
                ),
                Panel("Memory", "bytes", "Estimated, by replica.", (Query("kvgate_index_bytes", "{{instance}}"),)),
                Panel(
                    "Left out or let go",
                    "short",
                    "Blocks a second over the limit of the index; above 0 it knows less than there is.",
                    (
                        Query(
                            "sum by (instance) (rate(kvgate_index_truncated_total[$__rate_interval]))", "{{instance}}"
                        ),
                    ),
                ),
            ),
        ),
        (
            "Events",
            (
                Panel(
                    "Events by type",
                    "short",
                    "A second.",
                    (Query(rate("kvgate_kv_events_total", "type", _WORKER), "{{type}}"),),
                    stacked=True,
                ),
                Panel(
                    "Since the last event",
                    "s",
                    "A busy worker announces with nearly every step.",
                    (Query(f"max by (worker) (kvgate_kv_event_age_seconds{{{_WORKER}}})", "{{worker}}"),),
                ),
                Panel(
                    "Gaps",
                    "short",
                    "A second; each one asks for a replay.",
                    (Query(rate("kvgate_kv_event_gaps_total", "worker", _WORKER), "{{worker}}"),),
                ),
                Panel(
                    "Replays by result",
                    "short",
                    "complete: repaired. Else blocks are forgotten and learned anew.",
                    (Query(sometimes(rate("kvgate_kv_event_replays_total", "result", _WORKER)), "{{result}}"),),
                    stacked=True,
                ),
                Panel(
                    "Restarts seen",
                    "short",
                    "A second.",
                    (Query(rate("kvgate_kv_event_resets_total", "worker", _WORKER), "{{worker}}"),),
                ),
                Panel(
                    "Unreadable messages",
                    "short",
                    "A second; should be 0.",
                    (Query(rate("kvgate_kv_event_errors_total", "worker", _WORKER), "{{worker}}"),),
                ),
            ),
        ),
        (
            "Churn",
            (
                Panel(
                    "Stored",
                    "short",
                    "Blocks a second, by tier.",
                    (Query(rate("kvgate_kv_blocks_stored_total", "tier", _WORKER), "{{tier}}"),),
                ),
                Panel(
                    "Removed, as a share of stored",
                    "percentunit",
                    "Near 1 for long: the cache is full and turns over. With few hits: scale, do not tune.",
                    (
                        Query(
                            sometimes(
                                share(
                                    "kvgate_kv_blocks_removed_total", "kvgate_kv_blocks_stored_total", "worker", _WORKER
                                )
                            ),
                            "{{worker}}",
                        ),
                    ),
                ),
                Panel(
                    "Life of blocks (p50)",
                    "s",
                    "From their announcement until they were pushed out, of one in 64.",
                    (Query(sometimes(quantile(0.5, "kvgate_kv_block_life_seconds", "tier", _WORKER)), "{{tier}}"),),
                ),
                Panel(
                    "Prompts by how they are matched",
                    "reqps",
                    "exact: token ids. engine: ids told by the engine. approximate: by text. none: not at all.",
                    (Query(rate("kvgate_prefix_mode_total", "mode"), "{{mode}}"),),
                    stacked=True,
                ),
            ),
        ),
    ),
    (("worker", "label_values(kvgate_worker_state, worker)"),),
)

REPLICAS = Dashboard(
    "kvgate-replicas",
    "kvgate / replicas and queue",
    (
        (
            "Queue",
            (
                Panel(
                    "Waiting",
                    "short",
                    "Requests held at the gateway, by pool and class.",
                    (Query("sum by (pool, class) (kvgate_queue_depth)", "{{pool}} {{class}}"),),
                    stacked=True,
                ),
                Panel(
                    "Time in the queue (p99)",
                    "s",
                    "Of requests that were held.",
                    (Query(sometimes(quantile(0.99, "kvgate_queue_seconds", "")), "p99"),),
                ),
                Panel(
                    "Turned away",
                    "reqps",
                    "429 and 503 with a Retry-After.",
                    (Query(sometimes(rate("kvgate_shed_total", "pool, reason")), "{{pool}} {{reason}}"),),
                    stacked=True,
                ),
            ),
        ),
        (
            "Replicas",
            (
                Panel("Redis", "none", "1: reached.", (Query("kvgate_store_up", "{{instance}}"),), most=1),
                Panel("Peers", "short", "Other replicas seen.", (Query("kvgate_replica_peers", "{{instance}}"),)),
                Panel(
                    "Lag",
                    "s",
                    "Age of the oldest peer's state.",
                    (Query("kvgate_replica_lag_seconds", "{{instance}}"),),
                ),
            ),
        ),
        (
            "Process",
            (
                Panel(
                    "CPU",
                    "percentunit",
                    "One core is 1: a replica is one process.",
                    (Query("rate(process_cpu_seconds_total[$__rate_interval])", "{{instance}}"),),
                ),
                Panel("Memory", "bytes", "Resident.", (Query("process_resident_memory_bytes", "{{instance}}"),)),
                Panel(
                    "Connections of clients",
                    "short",
                    "Open.",
                    (Query("kvgate_client_connections", "{{instance}}"),),
                ),
                Panel(
                    "Leases minus streams",
                    "short",
                    "Must be 0 but for moments.",
                    (Query("sum by (instance) (kvgate_accounting_drift)", "{{instance}}"),),
                ),
                Panel(
                    "Background tasks that failed",
                    "short",
                    "In ten minutes; the log has each one's traceback.",
                    (Query("increase(kvgate_task_restarts_total[10m])", "{{instance}}"),),
                ),
                Panel(
                    "Bodies in memory",
                    "bytes",
                    "Request bodies not yet sent.",
                    (Query("kvgate_client_buffered_bytes", "{{instance}}"),),
                ),
            ),
        ),
    ),
    (),
)

DASHBOARDS = (OVERVIEW, WORKERS, INDEX, REPLICAS)


def as_json(dashboard: Dashboard) -> str:
    """The file's text."""
    panels: list[dict[str, Any]] = []
    top = number = 0
    for title, row in dashboard.rows:
        number += 1
        panels.append(
            {"id": number, "type": "row", "title": title, "collapsed": False, "panels": []}
            | {"gridPos": {"x": 0, "y": top, "w": 24, "h": 1}}
        )
        top += 1
        for place, panel in enumerate(row):
            number += 1
            at = {
                "x": _WIDTH * (place % _COLUMNS),
                "y": top + _HEIGHT * (place // _COLUMNS),
                "w": _WIDTH,
                "h": _HEIGHT,
            }
            panels.append(_panel(panel, number, at))
        top += _HEIGHT * -(-len(row) // _COLUMNS)
    whole = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["kvgate"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["kvgate"], "title": "kvgate", "asDropdown": True}],
        "templating": {"list": [_source_variable(), *(_variable(*variable) for variable in dashboard.variables)]},
        "panels": panels,
    }
    return json.dumps(whole, indent=1) + "\n"


def _panel(panel: Panel, number: int, at: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        custom = {"lineWidth": 1, "fillOpacity": 20 if panel.stacked else 0, "showPoints": "never"}
        if panel.stacked:
            custom["stacking"] = {"mode": "normal"}
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": custom}
    if panel.most is not None:
        defaults["max"] = panel.most
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.note,
        "datasource": _SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}} if panel.kind == "timeseries" else {},
        "targets": [
            {"refId": chr(ord("A") + n), "datasource": _SOURCE, "expr": query.expr, "legendFormat": query.legend}
            for n, query in enumerate(panel.queries)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def stale() -> list[Path]:
    """Files that do not agree with the tables."""
    return [path for path, text in _files() if not path.is_file() or path.read_text() != text]


def _files() -> list[tuple[Path, str]]:
    return [(HERE / f"{dashboard.uid}.json", as_json(dashboard)) for dashboard in DASHBOARDS]


def main() -> int:
    """Exit code: 1 with `--check` when a file is stale."""
    old = stale()
    if "--check" in sys.argv[1:]:
        for path in old:
            sys.stderr.write(f"{path} is stale: run `make docs`\n")
        return 1 if old else 0
    for path, text in _files():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
