"""What a client's name for a model stands for: aliases, versions by weight, shadows."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from gateway.pool import Fleet, Route, Routes, Shadow, Version
from gateway.pool.fleet import ServedModel
from gateway.records import EngineKind, WorkerFacts, WorkerId, WorkerSpec


def fleet(*models: str) -> Fleet:
    made = Fleet()
    for model in models:
        spec = WorkerSpec(WorkerId(f"on-{model}"), f"http://{model}")
        made.add(spec, WorkerFacts(EngineKind.VLLM, "1", (model,), max_model_len=len(model)), 0.0)
    return made


def target(routes: Routes, model: str, served: Fleet, session: str | None = None, *, seed: int = 0) -> str:
    return routes.target(model, session, pools=served.pools, rng=Random(seed))


CANARY = Routes({"chat": Route((Version("v1", 9), Version("v2", 1)))})


def test_a_name_that_is_no_route_stands_for_itself() -> None:
    assert target(CANARY, "other", fleet("v1")) == "other"
    assert not Routes()
    assert not CANARY.shadowing


def test_an_alias_is_sent_on_unless_a_worker_serves_it() -> None:
    routes = Routes({"gpt": Route((Version("llama"),))})
    assert target(routes, "gpt", fleet("llama")) == "llama"
    assert target(routes, "gpt", fleet("llama", "gpt")) == "gpt"


def test_versions_get_their_weights_and_a_session_keeps_to_one() -> None:
    served = fleet("v1", "v2")
    rng = Random(1)
    drawn = Counter(CANARY.target("chat", None, pools=served.pools, rng=rng) for _ in range(4000))
    assert 0.08 < drawn["v2"] / 4000 < 0.12
    by_session = Counter(target(CANARY, "chat", served, f"s{number}") for number in range(4000))
    assert 0.08 < by_session["v2"] / 4000 < 0.12
    for number in range(50):
        assert len({target(CANARY, "chat", served, f"s{number}", seed=seed) for seed in range(5)}) == 1


def test_a_larger_weight_moves_sessions_to_the_canary_only() -> None:
    served = fleet("v1", "v2")
    more = Routes({"chat": Route((Version("v1", 7), Version("v2", 3)))})
    sessions = [f"s{number}" for number in range(1000)]
    before = {session: target(CANARY, "chat", served, session) for session in sessions}
    after = {session: target(more, "chat", served, session) for session in sessions}
    moved = [session for session in sessions if before[session] != after[session]]
    assert {after[session] for session in moved} == {"v2"}
    assert 0.13 < len(moved) / 1000 < 0.27


def test_a_version_without_a_ready_worker_costs_nobody_an_answer() -> None:
    assert {target(CANARY, "chat", fleet("v1"), f"s{number}") for number in range(200)} == {"v1"}
    served = fleet("v1", "v2")
    served.drain(WorkerId("on-v1"), 1.0, on=True)
    assert {target(CANARY, "chat", served, f"s{number}") for number in range(50)} == {"v2"}
    assert target(CANARY, "chat", fleet("x"), "s") in ("v1", "v2")  # nobody: the error names a version


def test_a_weight_of_nothing_gets_nothing() -> None:
    routes = Routes({"chat": Route((Version("v1", 1), Version("v2", 0)))})
    assert {target(routes, "chat", fleet("v1", "v2"), f"s{number}") for number in range(200)} == {"v1"}
    assert target(routes, "chat", fleet("v2"), "s") == "v1"


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 1000, 1000), (0.25, 200, 300)])
def test_a_share_of_requests_has_a_shadow(share: float, least: int, most: int) -> None:
    routes = Routes({"chat": Route((Version("chat"),), Shadow("next", share))})
    assert routes.shadowing
    rng = Random(2)
    copied = [routes.shadow("chat", rng) for _ in range(1000)]
    assert least <= copied.count("next") <= most
    assert routes.shadow("other", rng) is None


def test_names_of_routes_are_shown_where_something_serves_them() -> None:
    routes = Routes({"chat": Route((Version("v1", 1), Version("version2", 1))), "gone": Route((Version("nobody"),))})
    shown = routes.models(fleet("v1", "version2").models())
    assert shown == [ServedModel("chat", None, 2), ServedModel("v1", None, 2), ServedModel("version2", None, 8)]
