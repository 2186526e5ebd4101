"""What shards cost and what they save: traces on a large fleet, whole and split, and the time of a decision.

`gain` is how much of what the whole pool gains over round robin is kept: in hit rate, and in mean TTFT. Decisions of
64, 256 and 1024 workers are timed as in `decision`, in CPU time.

    python -m benchmarks.shards TRACES [decisions] [trace ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from benchmarks.decision import measure_decisions
from benchmarks.scoring import CASES, WORKERS, Case
from gateway.policy import make_policy
from gateway.pool import ShardSettings
from gateway.router import RouterSettings
from gateway.runtime.interpreter import tune_interpreter
from gateway.sim.engine import PRESETS
from gateway.sim.replay import Replay, ReplayReport
from gateway.sim.trace import arrivals, read_trace

FLEET = 32
SCALE = FLEET // WORKERS
_WHOLE = ShardSettings(shards=1)


def replay_large(
    case: Case, traces: Path, sharding: ShardSettings, *, margin_s: float, policy: str = "seconds", rows: float = 1.0
) -> tuple[ReplayReport, float]:
    """One replay on `FLEET` workers at the load of `scoring`; and the share of requests that left their home shard.
    `rows` scales how many requests a trace with sessions draws."""
    most = int(case.max_rows * rows) if case.max_rows is not None else None
    turns = arrivals(read_trace(traces / case.file), block_size=case.block_size, rate=case.rate * SCALE, max_rows=most)
    replay = Replay(
        turns,
        policy=make_policy(policy, rng=Random(1)),
        model=PRESETS[case.preset],
        block_size=case.block_size,
        workers=FLEET,
        seed=1,
        settings=RouterSettings(spill_margin_s=margin_s),
        sharding=sharding,
    )
    report = replay.run()
    return report, sum(pool.spilled for pool in replay.fleet.pools.values()) / report.requests


def compare(case: Case, traces: Path, shapes: list[tuple[int, float]]) -> dict[str, dict[str, float]]:
    """Round robin, the whole pool, and each of `shapes` (shards, margin in seconds)."""
    blind, _ = replay_large(case, traces, _WHOLE, margin_s=0.0, policy="round_robin")
    whole, _ = replay_large(case, traces, _WHOLE, margin_s=0.0)
    found = {"round_robin": _figures(blind), "whole": _figures(whole)}
    for shards, margin_s in shapes:
        sharding = ShardSettings(shards=shards, least_workers=1)
        report, spilled = replay_large(case, traces, sharding, margin_s=margin_s)
        found[f"{shards} shards, {margin_s:g} s"] = _figures(report) | {
            "hit_gain": round((report.hit - blind.hit) / (whole.hit - blind.hit), 3),
            "ttft_gain": round((blind.ttft_mean_s - report.ttft_mean_s) / (blind.ttft_mean_s - whole.ttft_mean_s), 3),
            "spilled": round(spilled, 3),
        }
    return found


def _figures(report: ReplayReport) -> dict[str, float]:
    return {
        "requests": report.requests,
        "hit": round(report.hit, 4),
        "ttft_mean_s": round(report.ttft_mean_s, 3),
        "ttft_p99_s": round(report.ttft_p99_s, 2),
        "imbalance": round(report.imbalance, 2),
    }


def main(traces: Path, names: list[str]) -> None:
    """Prints both tables."""
    for workers in (64, 256, 1024) if "decisions" in names else ():
        for shards in (1, 4, 16):
            sharding = ShardSettings(shards=shards, least_workers=1)
            for state, figures in measure_decisions(workers=workers, rounds=1000, sharding=sharding).items():
                print(workers, shards, state, figures["route_p50_us"], figures["route_p99_us"], flush=True)
    shapes = [(2, 0.5), (4, 0.5), (8, 0.5), (4, 0.1), (4, 2.0)]
    for name in sorted(CASES.keys() & set(names)):
        for label, figures in compare(CASES[name], traces, shapes).items():
            print(name, label, figures, flush=True)


if __name__ == "__main__":
    tune_interpreter()  # as `kvgate serve` does
    main(Path(sys.argv[1]), sys.argv[2:] or ["decisions", *CASES])
