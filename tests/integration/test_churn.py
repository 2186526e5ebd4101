"""Churn and tiers of a real gateway over a simulated engine with a small GPU cache above a larger CPU tier."""

from __future__ import annotations

from gateway.records import Tier, WorkerId
from tests.integration.rig import fast, rig, until


async def test_blocks_that_are_pushed_out_have_lives_and_hits_have_tiers() -> None:
    async with rig(1, engine=fast(kv_tokens=4096, host_tokens=65_536)) as r:
        prompts = [[number + 7] * 1024 for number in range(12)]
        w1 = WorkerId("w1")

        def hits(tier: Tier) -> int:
            return r.gateway.metrics.counts.hits.get((w1, tier), 0)

        for prompt in prompts:  # three times what the GPU holds
            body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
            assert (await r.http.post("/v1/completions", json=body)).status_code == 200
            again = await r.http.post("/v1/completions", json=body)
            assert again.status_code == 200
        assert hits(Tier.GPU) > 0
        slot = r.gateway.fleet.workers[w1].slot
        await until(lambda: r.gateway.index.resident(slot, Tier.CPU) >= 12 * 60)
        r.gateway.router.expire(r.gateway.clock())  # from now on slower tiers are looked at
        first = await r.http.post("/v1/completions", json={"model": "demo", "prompt": prompts[0], "max_tokens": 2})
        assert int(first.headers["x-kvgate-predicted-tokens"]) >= 960
        await until(lambda: hits(Tier.CPU) > 0)
        worker = await r.admin("/admin/workers/w1")
        gpu, cpu = worker["tiers"]["gpu"], worker["tiers"]["cpu"]
        assert gpu["stored"] > gpu["removed"] > 0
        assert gpu["held"] <= 4096 // 16
        assert cpu["held"] == cpu["stored"] - cpu["removed"]
        assert gpu["hit_tokens"] == hits(Tier.GPU)
        assert cpu["hits_per_stored"] == cpu["hit_tokens"] / (cpu["stored"] * 16)
        assert 0 < worker["slow_share"] < 1
        assert gpu["life_s"] is not None  # some of a hundred blocks pushed out are in the sample
        page = (await r.http.get(r.ports.admin_url + "/metrics")).text
        assert 'kvgate_hit_tokens_total{worker="w1",tier="cpu"}' in page
        assert 'kvgate_kv_block_life_seconds_count{worker="w1",tier="gpu"}' in page
