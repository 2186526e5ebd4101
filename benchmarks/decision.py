"""Time of one routing decision: `Router.route` with 64 workers and a prompt of 8,192 tokens (512 blocks of 16).

The budget is 300 us at the 99th percentile, the overlap over the index and the speculative entries included. Times are
CPU time of the thread, so that other processes on the machine do not count; collections of garbage do.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from random import Random

from gateway import keys
from gateway.kv import KvIndex
from gateway.kv.events import Stored
from gateway.leases import Lease
from gateway.policy import make_policy
from gateway.pool import Fleet, FleetSettings, ShardSettings
from gateway.records import (
    BlockKey,
    Chain,
    Ending,
    Endpoint,
    EngineHash,
    EngineKind,
    InferenceRequest,
    LoadSample,
    NoPrompt,
    PrefixBlocks,
    Result,
    Slot,
    StageTimes,
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router
from gateway.runtime.interpreter import tune_interpreter

MODEL = "bench"
BLOCK = 16
BLOCKS = 512
OPEN_LEASES = 256
"""Requests in flight while one is timed: four on each worker."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: list[int]
    blocks: PrefixBlocks


def _prompt(start: list[int], rng: Random) -> _Prompt:
    tokens = start + [rng.randrange(1 << 17) for _ in range(BLOCK * BLOCKS - len(start))]
    chain: list[BlockKey] = keys.chain(keys.namespace(), tokens, BLOCK)
    return _Prompt(tokens, PrefixBlocks((Chain(chain, len(tokens)),), len(tokens), BLOCK))


def _unseen(rng: Random) -> _Prompt:
    """A prompt nobody ever sent: keys alone are enough."""
    chain = [BlockKey(rng.getrandbits(64)) for _ in range(BLOCKS)]
    return _Prompt([], PrefixBlocks((Chain(chain, BLOCK * BLOCKS),), BLOCK * BLOCKS, BLOCK))


def _announce(index: KvIndex, worker: int, prompt: _Prompt, blocks: int) -> None:
    hashes = [EngineHash(int(key)) for key in prompt.blocks.chains[0].keys[:blocks]]
    index.apply(Slot(worker), 0, [Stored(hashes, None, prompt.tokens[: blocks * BLOCK], BLOCK)])


def measure_decisions(
    *, workers: int = 64, rounds: int = 2000, seed: int = 1, sharding: ShardSettings | None = None
) -> dict[str, dict[str, float]]:
    """p50 and p99 in microseconds, by state of the index: `route` alone and `route` with `settle`.

    States: `cold` (nobody holds anything of the prompt), `shared` (all hold its first 128 blocks), `held` (every
    worker holds another length of it), `sibling` (half of it is speculative on one worker). `sharding` says when
    the pool is split.
    """
    rng = Random(seed)
    fleet, index = Fleet(FleetSettings(sharding=sharding or ShardSettings())), KvIndex()
    for number in range(workers):
        facts = WorkerFacts(EngineKind.VLLM, "", (MODEL,), block_size=BLOCK, kv_blocks=28_000, max_model_len=131_072)
        worker = fleet.add(WorkerSpec(WorkerId(f"w{number}"), f"http://10.0.0.{number}:8000"), facts, 0.0)
        index.bind(worker.slot, block_size=BLOCK)
        sample = LoadSample(running=4, waiting=0, kv_usage=0.6)
        fleet.load(worker.id, sample, 0.0)
    router = Router(fleet, index, make_policy("seconds", rng=rng), rng=rng)

    shared = _prompt([], rng)
    held = _prompt([], rng)
    for number in range(workers):
        _announce(index, number, shared, 128)
        _announce(index, number, held, 1 + rng.randrange(BLOCKS))
    prompts = {
        "cold": [_unseen(rng) for _ in range(rounds)],
        "shared": [_prompt(shared.tokens[: 128 * BLOCK], rng) for _ in range(64)],
        "held": [held],
        "sibling": [_prompt(_prompt([], rng).tokens[: 256 * BLOCK], rng) for _ in range(2)],
    }
    return {state: _time(router, choices, rounds, rng) for state, choices in prompts.items()}


def _time(router: Router, prompts: list[_Prompt], rounds: int, rng: Random) -> dict[str, float]:
    route: list[float] = []
    both: list[float] = []
    leases: list[Lease] = []
    gc.collect()
    now = 1.0
    for number in range(rounds):
        now += 0.001
        prompt = prompts[number % len(prompts)]
        request = InferenceRequest(
            Endpoint.CHAT, f"r{number}", MODEL, NoPrompt("bench"), stream=True, session=f"s{number % 97}"
        )
        began = time.thread_time()
        lease = router.route(request, prompt.blocks, now)
        routed = time.thread_time()
        leases.append(lease)
        settled = 0.0
        if len(leases) > OPEN_LEASES:
            oldest = leases.pop(rng.randrange(len(leases)))
            oldest.first_byte(now)
            ending = Ending(
                Result.COMPLETED, 200, now, Usage(BLOCK * BLOCKS, 200, oldest.decision.predicted_tokens), 200, now, now
            )
            before = time.thread_time()
            oldest.settle(ending, started_at=now - 1.0, stages=StageTimes())
            settled = time.thread_time() - before
        route.append(routed - began)
        both.append(routed - began + settled)
        if number % 100 == 0:
            router.expire(now)
    for lease in leases:
        lease.settle(Ending(Result.CLIENT_GONE, 499, now), started_at=now, stages=StageTimes())
    router.expire(now + 10.0)
    return {
        "route_p50_us": _quantile_us(route, 0.5),
        "route_p99_us": _quantile_us(route, 0.99),
        "route_settle_p50_us": _quantile_us(both, 0.5),
        "route_settle_p99_us": _quantile_us(both, 0.99),
    }


def _quantile_us(seconds: list[float], share: float) -> float:
    ordered = sorted(seconds)
    return round(ordered[int(share * len(ordered))] * 1e6, 1)


if __name__ == "__main__":
    tune_interpreter()  # as `kvgate serve` does
    for state, figures in measure_decisions().items():
        print(state, figures)
