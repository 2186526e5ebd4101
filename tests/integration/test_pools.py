"""Pools through a whole gateway: other names, versions, shadows, tenants' workers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gateway.credentials import key_hash
from gateway.records import WorkerId
from tests.integration.rig import Rig, fast, rig, until
from tests.integration.test_gateway import chat

KEYS = {tenant: f"kvg-{tenant}-0123456789abcdef" for tenant in ("acme", "zeta", "guest")}


async def ask(r: Rig, model: str, user: str = "hello", **headers: str) -> Any:
    answer = await r.http.post(
        "/v1/chat/completions",
        json=chat(user) | {"model": model, "max_tokens": 2},
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )
    assert answer.status_code == 200, answer.text
    return answer


async def test_an_alias_and_a_route_reach_workers_under_their_own_names_and_are_listed() -> None:
    models = [
        {"name": "demo", "aliases": ["gpt-4o"]},
        {"name": "chat", "versions": [{"model": "demo", "weight": 3}, {"model": "next", "weight": 1}]},
    ]
    each: list[dict[str, Any]] = [{}, {"model": "next"}]
    async with rig(2, each=each, settings={"models": models}) as r:
        listed = (await r.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["chat", "demo", "gpt-4o", "next"]
        answer = await ask(r, "gpt-4o")
        assert (answer.headers["x-kvgate-worker"], answer.json()["model"]) == ("w1", "demo")

        counts = Counter([(await ask(r, "chat", x_session_id=f"s{n}")).json()["model"] for n in range(40)])
        assert set(counts) == {"demo", "next"}
        assert counts["demo"] > counts["next"]
        kept = {(await ask(r, "chat", user, x_session_id="one")).headers["x-kvgate-worker"] for user in "abcde"}
        assert len(kept) == 1

        decision = await r.http.post(f"{r.ports.admin_url}/admin/explain", json=chat("x") | {"model": "gpt-4o"})
        assert decision.json()["worker"] == "w1"
        await until(r.quiet)


async def test_a_shadow_gets_copies_that_no_client_notices() -> None:
    models = [{"name": "demo", "shadow": {"model": "next", "share": 1.0}}]
    each: list[dict[str, Any]] = [{}, {"model": "next"}]
    async with rig(2, each=each, settings={"models": models}) as r:
        shadows = r.gateway.edge.shadows
        assert shadows is not None
        for user in ("one", "two", "three"):
            assert (await ask(r, "demo", user)).headers["x-kvgate-worker"] == "w1"
        await until(lambda: shadows.results["answered"] == 3)
        assert {a.state()["finished"] for a in r.engines} == {3}
        page = (await r.http.get(f"{r.ports.admin_url}/metrics")).text
        assert 'kvgate_requests_total{model="next",pool="default",worker="w2",code="200"} 3' in page

        await r.engine("w2").stop()  # the shadow dies: nobody hears of it
        for user in ("four", "five"):
            assert (await ask(r, "demo", user)).json()["model"] == "demo"
        await until(lambda: shadows.results["failed"] + shadows.results["unplaced"] == 2)
        await until(lambda: r.gateway.router.open_leases == 0)
        assert r.gateway.upstream.open_streams() == 0


async def test_tenants_have_workers_of_their_own_and_keys_their_labels() -> None:
    keys: list[dict[str, Any]] = [{"hash": key_hash(key), "tenant": tenant} for tenant, key in KEYS.items()]
    keys[2]["pools"] = ["spare"]
    labels: list[dict[str, Any]] = [{"tenants": ["acme"]}, {"pool": "spare"}, {}]
    async with rig(3, labels=labels, settings={"auth": {"keys": keys}}) as r:

        async def answer(tenant: str, user: str) -> Any:
            headers = {"authorization": f"Bearer {KEYS[tenant]}"}
            return await r.http.post("/v1/chat/completions", json=chat(user), headers=headers)

        async def workers(tenant: str) -> set[str]:
            answers = [await answer(tenant, f"{tenant} {number}") for number in range(6)]
            return {found.headers["x-kvgate-worker"] for found in answers}

        assert await workers("guest") == {"w2"}
        assert await workers("zeta") <= {"w2", "w3"}
        for name in ("w2", "w3"):
            r.gateway.fleet.drain(WorkerId(name), r.gateway.clock(), on=True)
        assert await workers("acme") == {"w1"}
        for tenant in ("zeta", "guest"):
            refused = await answer(tenant, "later")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        await r.http.delete(f"{r.ports.admin_url}/admin/workers/w2")
        refused = await answer("guest", "never")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_adapter_is_used_where_its_worker_says_that_it_is_loaded() -> None:
    """Some other client has loaded it: the gateway learns that from the worker's metrics alone."""
    async with rig(3, engine=fast(adapters=("poet",)), settings={"load": {"poll_s": 0.05}}) as r:
        direct = chat("loads it") | {"model": "poet", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with r.http.stream("POST", f"{r.engine('w3').url}/v1/chat/completions", json=direct) as answer:
            assert answer.status_code == 200
            await until(lambda: r.gateway.fleet.workers[WorkerId("w3")].adapters.loaded == ("poet",))
        await until(r.quiet)
        shown = await r.admin("/admin/workers")
        assert {w["id"]: w["adapters_loaded"] for w in shown["workers"]} == {"w1": [], "w2": [], "w3": ["poet"]}
        for number in range(3):
            assert (await ask(r, "poet", f"poem {number}")).headers["x-kvgate-worker"] == "w3"
        decision = await r.http.post(f"{r.ports.admin_url}/admin/explain", json=chat("x") | {"model": "poet"})
        prices = {row["worker"]: row["terms"]["adapter_s"] for row in decision.json()["candidates"]}
        assert prices == {"w1": 0.05, "w2": 0.05, "w3": 0.0}
        await until(r.quiet)
