"""Workers in Kubernetes, against an API server that speaks lists, watches, bookmarks, 410 and cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from gateway.discovery import (
    ApiServer,
    Found,
    KubeQuery,
    KubernetesSource,
    KubeTraits,
    Pods,
    Slices,
    kube_objects,
    kubernetes,
)
from gateway.discovery.kube_objects import Kind
from gateway.records import WorkerId, WorkerSpec
from gateway.sim.kube_api import PODS, SLICES, Json, Kube, endpoint, endpoint_slice, kube, pod, terminating
from tests.integration.certificates import authority
from tests.integration.rig import Rig, rig, until

LIKE = WorkerSpec(WorkerId(""), "")


class Said:
    """What the source says now."""

    def __init__(self) -> None:
        self.found: dict[str, Found] = {}
        self.error: str | None = None
        self.times = 0

    @property
    def workers(self) -> int:
        return len(self.found)

    def present(self, found: Iterable[Found]) -> None:
        self.found = {one.spec.name: one for one in found}
        self.error = None
        self.times += 1

    def failed(self, reason: str) -> None:
        self.error = reason

    @property
    def hosts(self) -> dict[str, str]:
        return {name: one.spec.url.removeprefix("http://") for name, one in self.found.items()}


@pytest_asyncio.fixture
async def api() -> AsyncIterator[Kube]:
    async with kube() as running:
        yield running


@asynccontextmanager
async def source(
    api: Kube, kind: Kind | None = None, *, selector: str = "app=vllm", token: Path | None = None, resync_s: float = 300
) -> AsyncIterator[tuple[KubernetesSource, Said]]:
    query = KubeQuery(kind or Pods(), "llm", selector, KubeTraits(LIKE), resync_s=resync_s)
    made, said = KubernetesSource(ApiServer(api.url, token), query, rng=Random(1)), Said()
    running = asyncio.create_task(made.run(said))
    try:
        yield made, said
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_list_then_what_happens(api: Kube) -> None:
    api.bookmarks = True
    api.apply(PODS, pod("a", "10.0.0.1"))
    api.apply(PODS, pod("other", "10.0.0.9") | {"metadata": {"name": "other", "labels": {"app": "web"}}})
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        assert said.hosts == {"a": "10.0.0.1:8000"}
        api.apply(PODS, pod("b", "10.0.0.2"))
        api.apply(PODS, pod("c", None))
        await until(lambda: set(said.hosts) == {"a", "b"})
        api.delete(PODS, "a")
        api.apply(PODS, pod("c", "10.0.0.3"))
        await until(lambda: said.hosts == {"b": "10.0.0.2:8000", "c": "10.0.0.3:8000"})
        assert api.lists == 1
        _, watched = next(query for query in api.asked if "watch" in query[1])
        assert (watched["allowWatchBookmarks"], watched["labelSelector"]) == ("true", "app=vllm")


async def test_events_that_come_together_are_told_together(api: Kube) -> None:
    for number in range(60):
        api.apply(PODS, pod(f"p{number}", f"10.0.0.{number}"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        times = said.times
        for number in range(60):
            api.apply(PODS, pod(f"p{number}", f"10.0.1.{number}"))
        await until(lambda: said.hosts == {f"p{number}": f"10.0.1.{number}:8000" for number in range(60)})
        assert said.times - times < 30, "one by one it would be 60; on a busy machine they may come in several parts"
        api.apply(PODS, pod("late", "10.0.2.1"))
        api.error(500, "over")
        await until(lambda: "late" in said.hosts and api.lists >= 2)


async def test_a_list_in_parts_counts_as_a_whole(api: Kube) -> None:
    api.part = 3
    for number in range(8):
        api.apply(PODS, pod(f"p{number}", f"10.0.0.{number}"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        assert (len(said.hosts), said.times) == (8, 1)
        assert sum("continue" in query for _, query in api.asked) == 2


async def test_a_list_whose_next_part_is_too_old_begins_again(api: Kube) -> None:
    api.part = 1
    for number in range(3):
        api.apply(PODS, pod(f"p{number}", f"10.0.0.{number}"))

    def too_old() -> bool:
        if not any("continue" in query for _, query in api.asked):
            api.forget()
        return api.watches == 1

    async with source(api) as (_, said):
        await until(too_old)
        assert len(said.hosts) == 3


@pytest.mark.parametrize("within", [None, "MODIFIED"], ids=["between lines", "within a line"])
async def test_a_pod_that_is_deleted_while_the_watch_is_cut_is_gone_after_one_reconnect(
    api: Kube, within: str | None
) -> None:
    api.apply(PODS, pod("a", "10.0.0.1"))
    api.apply(PODS, pod("b", "10.0.0.2"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        assert api.cut(within=within) == 1
        api.delete(PODS, "a")
        api.apply(PODS, pod("b", "10.0.0.3"))  # and another has another address
        await until(lambda: api.watches == 1)
        assert (said.hosts, said.error) == ({"b": "10.0.0.3:8000"}, None)


async def test_410_gone_in_a_watch_is_answered_by_a_new_list(api: Kube) -> None:
    """What happened meanwhile is in no watch any more."""
    api.apply(PODS, pod("a", "10.0.0.1"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        api.delete(PODS, "a", silently=True)
        api.apply(PODS, pod("b", "10.0.0.2"))
        api.error(410, "too old resource version")
        await until(lambda: said.hosts == {"b": "10.0.0.2:8000"} and api.watches == 1)


@pytest.mark.parametrize("as_event", [False, True], ids=["as an answer", "as an event"])
async def test_a_history_that_ends_between_list_and_watch(api: Kube, as_event: bool) -> None:
    api.gone_as_event, api.compactions = as_event, 2
    api.apply(PODS, pod("a", "10.0.0.1"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        assert (set(said.hosts), api.lists) == ({"a"}, 3)


async def test_a_watch_that_ends_by_itself_is_a_resync(api: Kube) -> None:
    """What no watch told is found by the next list."""
    api.apply(PODS, pod("a", "10.0.0.1"))
    async with source(api, resync_s=120) as (_, said):
        await until(lambda: api.watches == 1)
        assert 100 <= int(api.asked[-1][1]["timeoutSeconds"]) <= 140
        api.delete(PODS, "a", silently=True)
        api.end()
        await until(lambda: api.lists == 2 and said.hosts == {})


async def test_a_watch_that_the_server_never_ends_is_cut(api: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.discovery.kubernetes._SPARE_S", 0.1)
    async with source(api, resync_s=0.2):
        await until(lambda: api.lists >= 3)


@pytest.mark.parametrize("status", [401, 403, 404, 500])
async def test_a_refused_list_is_told_and_tried_again(api: Kube, status: int) -> None:
    api.apply(PODS, pod("a", "10.0.0.1"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        api.refuse = status
        api.cut()
        await until(lambda: said.error is not None)
        assert said.error is not None
        assert str(status) in said.error
        assert said.hosts == {"a": "10.0.0.1:8000"}
        api.refuse = None
        await until(lambda: said.error is None and api.watches == 1)


async def test_an_api_server_that_is_away_or_hangs_empties_nothing(api: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.discovery.kubernetes._ANSWER_S", 0.2)
    api.apply(PODS, pod("a", "10.0.0.1"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        api.hang = True
        api.cut()
        await until(lambda: said.error is not None)
        assert said.hosts == {"a": "10.0.0.1:8000"}
    away = Kube(url="http://127.0.0.1:9")
    async with source(away) as (_, said):
        await until(lambda: said.error is not None)
        assert said.times == 0


async def test_an_error_in_a_watch_and_a_line_that_is_none(api: Kube) -> None:
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        api.error(500, "etcd is away")
        await until(lambda: api.lists == 2 and api.watches == 1)
        api.apply(PODS, {"metadata": {"name": "broken", "labels": {"app": "vllm"}}, "status": {"podIP": 7}})
        await until(lambda: said.error is not None)  # the list cannot be read either
        api.apply(PODS, pod("broken", "10.0.0.1"))
        await until(lambda: said.error is None and set(said.hosts) == {"broken"})


async def test_the_token_is_read_again_for_each_request(api: Kube, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("old\n")
    api.token = "old"
    async with source(api, token=token) as (_, said):
        await until(lambda: api.watches == 1)
        api.token = "new"
        api.cut()
        await until(lambda: said.error is not None and "401" in said.error)
        token.write_text("new\n")
        await until(lambda: said.error is None and api.watches == 1)
        token.unlink()
        api.cut()
        await until(lambda: said.error is not None and "No such file" in said.error)


@pytest.mark.parametrize("content", [b"secret\nline", "s\u00e9cret".encode(), b"s\xffcret", b"\n"])
async def test_a_file_that_holds_no_token_is_told_and_not_shown(api: Kube, tmp_path: Path, content: bytes) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    async with source(api, token=token) as (_, said):
        await until(lambda: said.error is not None)
        assert said.error == f"{api.url}: {token} does not hold a token: one line of plain letters"
    assert not api.asked


async def test_authorities_that_cannot_be_read_are_told_and_looked_for_again(api: Kube, tmp_path: Path) -> None:
    """The file may be mounted later than the gateway starts."""
    api.apply(PODS, pod("a", "10.0.0.1"))
    authorities = tmp_path / "ca.crt"
    query = KubeQuery(Pods(), "llm", "app=vllm", KubeTraits(LIKE))
    made, said = KubernetesSource(ApiServer(api.url, None, authorities), query, rng=Random(1)), Said()
    running = asyncio.create_task(made.run(said))
    try:
        await until(lambda: said.error is not None)
        assert str(authorities) in (said.error or "")
        authorities.write_bytes(authority(tmp_path).ca.read_bytes())
        await until(lambda: set(said.hosts) == {"a"})
        assert said.error is None
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_selector_that_fits_too_much_is_told(api: Kube, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kubernetes, kube_objects):
        monkeypatch.setattr(module, "MOST_OBJECTS", 2)
    for name in ("a", "b"):
        api.apply(PODS, pod(name, "10.0.0.1"))
    async with source(api) as (_, said):
        await until(lambda: api.watches == 1)
        api.apply(PODS, pod("c", "10.0.0.3"))
        api.apply(PODS, pod("a", "10.0.0.9"))
        await until(lambda: said.hosts["a"] == "10.0.0.9:8000")
        assert set(said.hosts) == {"a", "b"}
        api.end()
        await until(lambda: said.error is not None and "more than 2 pods" in said.error)
        assert set(said.hosts) == {"a", "b"}, "who is known stays"


async def test_endpoint_slices_are_followed_too(api: Kube) -> None:
    api.apply(SLICES, endpoint_slice("one", [endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2")]))
    async with source(api, Slices(), selector="kubernetes.io/service-name=vllm") as (_, said):
        await until(lambda: api.watches == 1)
        assert set(said.hosts) == {"a", "b"}
        api.apply(SLICES, endpoint_slice("one", [endpoint("a", "10.0.0.1", ready=False)]))
        api.apply(SLICES, endpoint_slice("two", [endpoint("c", "10.0.0.3")]))
        await until(lambda: set(said.hosts) == {"a", "c"})
        assert said.found["a"].draining == "not_ready"
        api.delete(SLICES, "one")
        await until(lambda: set(said.hosts) == {"c"})


# --------------------------------------------------------------------------- a gateway over it


@asynccontextmanager
async def cluster(api: Kube, engines: int = 2) -> AsyncIterator[tuple[Rig, Callable[..., Json]]]:
    """A gateway that finds its workers there, and what makes the pod of an engine."""
    section = {"api_server": api.url, "namespace": "llm", "selector": "app=vllm"}
    settings = {"discovery": {"kubernetes": section}, "workers": []}
    async with rig(engines, settings=settings, wait=False) as r:

        def running(name: str, engine: int, *, ready: bool = True) -> Json:
            return pod(name, "127.0.0.1", listens=int(r.engines[engine].url.rpartition(":")[2]), ready=ready)

        await until(lambda: api.watches == 1)
        yield r, running


async def ask(r: Rig, prompt: str = "hello", *, session: str = "s", tokens: int = 2) -> str:
    body = {"model": "demo", "prompt": prompt * 50, "max_tokens": tokens}
    answer = await r.http.post("/v1/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvgate-worker"]


def serving(r: Rig) -> set[str]:
    return {worker.id for pool in r.gateway.fleet.pools.values() for worker in pool.ready}


async def metrics(r: Rig) -> str:
    return (await r.http.get(f"{r.ports.admin_url}/metrics")).text


async def test_a_fleet_follows_its_pods(api: Kube) -> None:
    """Join, not ready and back with its cache, about to end, gone: index, session and gauges are cleared."""
    async with cluster(api) as (r, running):
        assert not r.gateway.readiness().ready
        api.apply(PODS, running("pod-a", 0))
        await until(lambda: serving(r) == {"pod-a"})
        assert await ask(r) == "pod-a"
        await until(lambda: r.announced > 0)
        blocks = r.announced

        api.apply(PODS, running("pod-b", 1))
        api.apply(PODS, running("pod-a", 0, ready=False))
        await until(lambda: serving(r) == {"pod-b"})
        assert await ask(r, "other", session="t") == "pod-b"
        worker = r.gateway.fleet.workers[WorkerId("pod-a")]
        assert (worker.state.value, worker.reason) == ("draining", "not_ready")
        api.apply(PODS, running("pod-a", 0))
        await until(lambda: serving(r) == {"pod-a", "pod-b"})
        assert r.announced >= blocks
        assert await ask(r) == "pod-a"

        api.apply(PODS, terminating(running("pod-a", 0)))
        await until(lambda: serving(r) == {"pod-b"})
        api.delete(PODS, "pod-a")
        await until(lambda: set(r.gateway.fleet.workers) == {"pod-b"})
        assert 'worker="pod-a"' not in await metrics(r)
        assert await ask(r) == "pod-b"
        index = await r.admin("/admin/index")
        assert set(index["blocks"]) == {"pod-b"}


async def test_a_gone_address_is_never_used_after_one_reconnect(api: Kube) -> None:
    """The pod is deleted while the watch is cut, its engine lives on and would answer."""
    async with cluster(api) as (r, running):
        api.apply(PODS, running("pod-a", 0))
        api.apply(PODS, running("pod-b", 1))
        await until(lambda: serving(r) == {"pod-a", "pod-b"})
        api.cut()
        api.delete(PODS, "pod-a")
        await until(lambda: api.watches == 1)
        await until(lambda: serving(r) == {"pod-b"})
        served = r.engines[0].state()["finished"]
        for number in range(20):
            assert await ask(r, f"{number}", session=f"{number}") == "pod-b"
        assert r.engines[0].state()["finished"] == served


async def test_a_name_with_another_address_is_another_worker(api: Kube) -> None:
    """A pod of a StatefulSet begins anew elsewhere; in between it has no address."""
    async with cluster(api) as (r, running):
        api.apply(PODS, running("pod-0", 0))
        await until(lambda: serving(r) == {"pod-0"})
        assert await ask(r) == "pod-0"
        await until(lambda: r.announced > 0)
        api.apply(PODS, pod("pod-0", None, ready=False))
        await until(lambda: not r.gateway.fleet.workers)
        assert r.announced == 0
        api.apply(PODS, running("pod-0", 1))
        await until(lambda: serving(r) == {"pod-0"})
        assert await ask(r, "new") == "pod-0"
        assert r.gateway.fleet.workers[WorkerId("pod-0")].spec.url == r.engines[1].url


async def test_a_stream_outlives_its_terminating_pod(api: Kube) -> None:
    async with cluster(api) as (r, running):
        api.apply(PODS, running("pod-a", 0))
        await until(lambda: serving(r) == {"pod-a"})
        stream = asyncio.create_task(ask(r, "long", tokens=300))
        await until(lambda: r.gateway.router.open_leases == 1)
        api.apply(PODS, running("pod-b", 1))
        api.apply(PODS, terminating(running("pod-a", 0)))
        await until(lambda: serving(r) == {"pod-b"})
        assert await ask(r, "next", session="n") == "pod-b"
        api.delete(PODS, "pod-a")
        await until(lambda: set(r.gateway.fleet.workers) == {"pod-b"})
        assert await stream == "pod-a"
        await until(r.quiet)


async def test_traffic_waits_for_the_first_word_of_each_source(api: Kube) -> None:
    """One worker is configured; those of the cluster are not known yet, and one worker must not take all of it."""
    api.refuse = 500
    section = {"api_server": api.url, "namespace": "llm", "selector": "app=vllm"}
    async with rig(1, settings={"discovery": {"kubernetes": section}}, wait=False) as r:
        await until(lambda: serving(r) == {"w1"})
        readiness = r.gateway.readiness()
        assert (readiness.ready, readiness.reason) == (False, "workers are still looked for: kubernetes")
        api.refuse = None
        await until(lambda: r.gateway.readiness().ready)
