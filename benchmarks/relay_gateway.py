"""The edge, the router and nothing else: what `benchmarks.relay` measures.

    python -m benchmarks.relay_gateway --port 9000 --worker http://127.0.0.1:9001

No tokenizer, no events, no polls, no metrics: what is beside the bytes is measured by the other benchmarks.
"""

from __future__ import annotations

import argparse
import random
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import uvicorn
import uvloop

from gateway.edge import Edge, client_app, client_protocol, request_id_maker
from gateway.kv import KvIndex
from gateway.policy import make_policy
from gateway.pool import Fleet
from gateway.records import EngineKind, Outcome, WorkerFacts, WorkerId, WorkerSpec
from gateway.router import Router
from gateway.runtime.garbage import tune_garbage_collection
from gateway.upstream.connections import Timeouts
from gateway.upstream.http import Upstream


def _ignore(_outcome: Outcome) -> None:
    """Metrics and logs are not part of the relay."""


def make_edge(workers: list[str]) -> tuple[Edge, Fleet]:
    """An edge over workers that are ready from the start."""
    rng = random.Random(1)
    fleet = Fleet()
    for number, url in enumerate(workers):
        spec = WorkerSpec(name=WorkerId(f"w{number}"), url=url)
        fleet.add(spec, WorkerFacts(EngineKind.VLLM, "0.32.0", ("fake",), block_size=16), monotonic())
    edge = Edge(
        router=Router(fleet, KvIndex(), make_policy("round_robin", rng=rng), rng=rng),
        hashers=lambda _model: None,
        # As long as nginx keeps its connections; the fake worker has no keep-alive timeout.
        upstream=Upstream(clock=monotonic, timeouts=Timeouts(pool_idle_s=60)),
        executor=ThreadPoolExecutor(1),
        clock=monotonic,
        on_outcome=_ignore,
        request_ids=request_id_maker(rng),
    )
    return edge, fleet


async def _serve(port: int, workers: list[str]) -> None:
    edge, fleet = make_edge(workers)
    config = uvicorn.Config(
        client_app(fleet, ready=lambda: True),
        host="127.0.0.1",
        port=port,
        http=client_protocol(edge),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
    tune_garbage_collection()
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker", action="append", required=True)
    args = parser.parse_args()
    uvloop.run(_serve(args.port, args.worker))
