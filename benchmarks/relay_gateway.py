"""Temporary stub."""

import argparse, asyncio, random, sys
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
import types

sys.path.insert(0, "/work/main")
kv = types.ModuleType("gateway.kv")
import uvloop, uvicorn
import gateway.kv as kvm

for n in ("KvIndex", "Overlaps", "Speculation"):
    if not hasattr(kvm, n):
        setattr(kvm, n, object)
from gateway.edge import *
from gateway.pool import Fleet
from gateway.records import *
from gateway.upstream.http import Upstream


class NoSpec:
    pass


class Index:
    def resident(self, *a):
        return 0


async def main(port, worker):
    from gateway.router import Router
    from gateway.policy import make_policy

    fleet = Fleet()
    rng = random.Random(1)
    for i, w in enumerate(worker):
        fleet.add(WorkerSpec(name=WorkerId(f"w{i}"), url=w), WorkerFacts(EngineKind.VLLM, "1", ("fake",)), monotonic())
    router = Router(fleet, Index(), make_policy("round_robin", rng=rng), rng=rng)
    up = Upstream(clock=monotonic)
    outs = []
    edge = Edge(
        router=router,
        hashers=lambda m: None,
        upstream=up,
        executor=ThreadPoolExecutor(2),
        clock=monotonic,
        on_outcome=lambda o: None,
        request_ids=request_id_maker(rng),
    )
    cfg = uvicorn.Config(
        client_app(fleet, ready=lambda: True),
        host="127.0.0.1",
        port=port,
        http=client_protocol(edge),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        loop="uvloop",
        backlog=2048,
    )
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(50000, 20, 50)
    await uvicorn.Server(cfg).serve()


a = argparse.ArgumentParser()
a.add_argument("--port", type=int)
a.add_argument("--worker", action="append")
a = a.parse_args()
if __name__ == "__main__":
    uvloop.run(main(a.port, a.worker))
