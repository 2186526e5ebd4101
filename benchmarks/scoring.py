"""Routing quality on real traces: the serving router on a virtual clock, 8 workers, 70 % load.

Reference figures come from an independent discrete-event simulator of the same score with perfect knowledge of every
engine: true speeds, exact KV occupancy, exact idle age of the next victim. The router here learns its speeds from
first bytes, starting from a neutral prior, and sees KV occupancy through a poll a second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gateway.admission import AdmissionSettings
from gateway.policy import OWN_EXTRA_HOLDING, Prices, make_policy
from gateway.pool import InterTokenRates, PrefillRates
from gateway.sim.engine import PRESETS, EngineModel
from gateway.sim.replay import Replay, ReplayReport
from gateway.sim.trace import arrivals, read_trace

WORKERS = 8
HOLD_S = 0.2
HOLDING = Prices(own_extra=OWN_EXTRA_HOLDING)


@dataclass(frozen=True, slots=True)
class Case:
    """A trace at a rate, and the reference for it: hit rate, mean and 99th percentile of TTFT in seconds."""

    file: str
    block_size: int
    preset: str
    rate: float
    max_rows: int | None
    hit: float
    ttft_mean_s: float
    ttft_p99_s: float


CASES = {
    "mooncake_conv_a": Case("mooncake_conversation_a.jsonl.gz", 512, "70b", 1.276, None, 0.141, 1.74, 14.04),
    "tau_a": Case("tau_airline_a.jsonl.gz", 64, "7b-a10", 15.186, 9000, 0.533, 18.55, 46.99),
    "sharegpt_a": Case("sharegpt_a.jsonl.gz", 64, "7b-a10", 10.473, 9000, 0.222, 5.78, 22.21),
    "claude_code_a": Case("claude_code_a.jsonl.gz", 512, "70b", 0.231, None, 0.951, 0.73, 11.53),
    "agents_a": Case("agents_lmcache_a.jsonl.gz", 64, "7b-a10", 17.870, 6000, 0.888, 0.10, 1.55),
}


def replay_case(
    case: Case,
    traces: Path,
    *,
    policy: str = "seconds",
    priors: tuple[PrefillRates, InterTokenRates] | None = None,
    seed: int = 1,
    hold_s: float | None = None,
) -> ReplayReport:
    """One replay; `traces` is the folder with the files. With `hold_s` requests wait at the gateway as in service,
    without they are placed on arrival. Raises OSError when there is no file."""
    rows = read_trace(traces / case.file)
    turns = arrivals(rows, block_size=case.block_size, rate=case.rate, max_rows=case.max_rows)
    chosen = make_policy(policy, rng=Random(seed), prices=Prices() if hold_s is None else HOLDING)
    replay = Replay(
        turns,
        policy=chosen,
        model=PRESETS[case.preset],
        block_size=case.block_size,
        workers=WORKERS,
        seed=seed,
        priors=priors,
        admission=None if hold_s is None else AdmissionSettings(hold_s=hold_s, queue_size=100_000, queue_timeout_s=1e9),
    )
    return replay.run()


def true_rates(model: EngineModel, *, scale: float = 1.0) -> tuple[PrefillRates, InterTokenRates]:
    """The engine's own speeds, or a multiple of them, as priors."""
    return (
        PrefillRates(model.prefill_overhead_s * scale, model.prefill_token_s * scale, model.prefill_pair_s * scale),
        InterTokenRates(model.step_s * scale, model.step_request_s * scale),
    )


def measure_scoring(traces: Path, *, names: tuple[str, ...] = tuple(CASES)) -> dict[str, dict[str, float]]:
    """For each trace: `hit`, `ttft_mean_s`, `ttft_p99_s`, the reference's figures, the mean relative to it, and the
    mean with speeds given, with speeds wrong by two either way at the start, and under round robin.

    `late_*` are with requests held at the gateway (`hold_s` 0.2), as in service, `late_ratio` their mean against that
    of deciding on arrival.
    """
    results: dict[str, dict[str, float]] = {}
    for name in names:
        case = CASES[name]
        model = PRESETS[case.preset]
        began = time.perf_counter()
        learned = replay_case(case, traces)
        figures = {
            "hit": learned.hit,
            "ttft_mean_s": learned.ttft_mean_s,
            "ttft_p99_s": learned.ttft_p99_s,
            "reference_hit": case.hit,
            "reference_ttft_mean_s": case.ttft_mean_s,
            "reference_ttft_p99_s": case.ttft_p99_s,
            "mean_ratio": learned.ttft_mean_s / case.ttft_mean_s,
            "wall_s": time.perf_counter() - began,
        }
        for label, scale in (("given", 1.0), ("half", 0.5), ("double", 2.0)):
            run = replay_case(case, traces, priors=true_rates(model, scale=scale))
            figures[f"{label}_rates_ttft_mean_s"] = run.ttft_mean_s
        late = replay_case(case, traces, hold_s=HOLD_S)
        figures |= {
            "late_hit": late.hit,
            "late_ttft_mean_s": late.ttft_mean_s,
            "late_ttft_p99_s": late.ttft_p99_s,
            "late_ratio": late.ttft_mean_s / learned.ttft_mean_s,
        }
        figures["round_robin_ttft_mean_s"] = replay_case(case, traces, policy="round_robin").ttft_mean_s
        results[name] = {key: round(value, 4) for key, value in figures.items()}
    return results
