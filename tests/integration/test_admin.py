"""The admin port over real HTTP, on a real router, fleet and index."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from gateway import findings
from gateway.admin.app import admin_app
from gateway.admin.guard import MOST_BODY_BYTES
from gateway.admin.state_answers import ConfigAnswer, Readiness
from gateway.admin.views import AdminSettings, AdminViews
from gateway.admission import Admission
from gateway.errors import FleetFull, WorkerTaken
from gateway.kv import KvIndex
from gateway.kv.events import Stored
from gateway.policy import make_policy
from gateway.pool import Fleet, NoSecond, WorkerState
from gateway.prefix import PromptHasher
from gateway.records import (
    Ending,
    EngineHash,
    EngineKind,
    EventSource,
    LoadSample,
    Rank,
    Result,
    StageTimes,
    Tier,
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router
from gateway.telemetry import (
    ClientReading,
    ConfigReading,
    Exposition,
    FeedReading,
    IndexReading,
    PoolReading,
    PrefixReading,
    RequestMetrics,
    SourceReading,
    WorkerReading,
)
from gateway.upstream.control import ProbeFailed

BLOCK = 16
NOW = 100.0


@dataclass
class Gateway:
    """The core with two workers, joined as the runtime joins it, and what the admin port asked of it."""

    fleet: Fleet = field(default_factory=Fleet)
    index: KvIndex = field(default_factory=KvIndex)
    added: list[WorkerSpec] = field(default_factory=list)
    resynced: list[WorkerId] = field(default_factory=list)
    expected: set[WorkerId] = field(default_factory=set)
    readiness: Readiness = field(default_factory=lambda: Readiness(ready=True))
    broken: bool = False
    late_after: float | NoSecond = NoSecond.OFF

    def __post_init__(self) -> None:
        policy = make_policy("seconds", rng=Random(1))
        self.router = Router(self.fleet, self.index, policy, rng=Random(2))
        self.requests = RequestMetrics(lambda name: name in self.fleet.pools)
        self.hasher = PromptHasher.load(None)
        for name in ("w1", "w2"):
            self.join(WorkerSpec(name=WorkerId(name), url=f"http://{name}:8000", api_key="engine-secret"))

    def join(self, spec: WorkerSpec) -> None:
        facts = WorkerFacts(
            engine=EngineKind.VLLM,
            version="0.33.0",
            models=("llama",),
            adapters={"poet": "llama"},
            block_size=BLOCK,
            kv_blocks=1000,
            max_model_len=4096,
            events=(EventSource(0, f"tcp://{spec.name}:5557", None),),
            findings=(findings.NO_REPLAY.found(),),
        )
        worker = self.fleet.add(spec, facts, NOW - 50)
        self.index.bind(worker.slot, block_size=BLOCK)
        self.fleet.load(worker.id, LoadSample(running=1, waiting=2, kv_usage=0.25), NOW - 1)

    def store(self, name: str, tokens: list[int]) -> None:
        hashes = [EngineHash(1000 + i) for i in range(len(tokens) // BLOCK)]
        slot = self.fleet.workers[WorkerId(name)].slot
        self.index.apply(slot, 0, [Stored(hashes, None, tokens, BLOCK)])

    def workers(self) -> Iterable[WorkerReading]:
        for worker in self.fleet.workers.values():
            yield WorkerReading(
                worker=worker.id,
                state=worker.state,
                states=tuple(WorkerState),
                inflight_requests=worker.inflight_requests,
                inflight_tokens=worker.inflight_tokens,
                open_streams=worker.inflight_requests,
                trust=worker.trust,
                blocks={tier: self.index.resident(worker.slot, tier) for tier in Tier},
                polls_failed=3,
            )

    def feeds(self) -> Iterable[FeedReading]:
        return [FeedReading(WorkerId("w1"), events={"stored": 2}, phases={0: "live"})]

    def pools(self) -> Iterable[PoolReading]:
        return [PoolReading(name, len(pool.ready), pool.panic, 0) for name, pool in self.fleet.pools.items()]

    def index_reading(self) -> IndexReading:
        return IndexReading(bytes=self.index.stats().estimated_bytes)

    async def add_worker(self, spec: WorkerSpec) -> None:
        if spec.name in (*self.fleet.workers, *self.expected):
            raise WorkerTaken(f"a worker named {spec.name!r} is in the fleet")
        if "nowhere" in spec.url:
            raise ProbeFailed(f"no connection to {spec.url}; is the worker running?")
        if "one-too-many" in spec.url:
            raise FleetFull("a fleet has at most 2 workers")
        self.added.append(spec)
        self.join(spec)

    async def remove_worker(self, worker_id: WorkerId) -> None:
        self.expected.discard(worker_id)
        self.fleet.remove(worker_id, NOW)

    def resync(self, worker_id: WorkerId) -> int:
        self.resynced.append(worker_id)
        return 1 if worker_id == "w1" else 0

    def config(self) -> ConfigAnswer:
        if self.broken:
            raise RuntimeError("a bug")
        settings = {"auth": {"admin_token": "**********"}}
        return ConfigAnswer(settings=settings, origins={}, needs_restart=["server.port"], problems=[])


class Readings:
    """The gateway as metrics see it."""

    def __init__(self, gateway: Gateway) -> None:
        self.workers, self.feeds, self.index = gateway.workers, gateway.feeds, gateway.index_reading
        self.pools = gateway.pools

    def replicas(self) -> None:
        return None

    def sources(self) -> Iterable[SourceReading]:
        return [
            SourceReading("config", 2, 0, 1.5, None),
            SourceReading("dns:vllm.example", 0, 0, None, "no answer"),
        ]

    def config(self) -> ConfigReading:
        return ConfigReading({}, False, 1)

    def prefixes(self) -> Iterable[PrefixReading]:
        return [PrefixReading("llama", 9, 9000, 7000, 2, 640, (64, 128), (0, 3, 1), 500)]

    def task_restarts(self) -> int:
        return 3

    def clients(self) -> ClientReading:
        return ClientReading(3, 1000, 0)


def app_of(gateway: Gateway, *, token: str | None = None, own_names: bool = False) -> FastAPI:
    readings = Readings(gateway)
    return admin_app(
        AdminViews(
            router=gateway.router,
            admission=Admission(gateway.router, lambda: None),
            readings=readings,
            exposition=Exposition(gateway.requests, readings, process=CollectorRegistry()),
            hasher=lambda model: gateway.hasher if model == "llama" else None,
            add_worker=gateway.add_worker,
            remove_worker=gateway.remove_worker,
            resync=gateway.resync,
            members=lambda: {*gateway.fleet.workers, *gateway.expected},
            late_after=lambda request, choice: gateway.late_after,
            config=gateway.config,
            ready=lambda: gateway.readiness,
            clock=lambda: NOW,
            settings=lambda: AdminSettings(token=token, own_names=own_names, max_body_bytes=100_000),
        )
    )


@contextlib.asynccontextmanager
async def admin(
    gateway: Gateway, *, token: str | None = None, own_names: bool = False
) -> AsyncIterator[httpx.AsyncClient]:
    app = app_of(gateway, token=token, own_names=own_names)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        )
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(20):
                while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                    await asyncio.sleep(0.01)
            base = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=base, timeout=30, trust_env=False) as client:
                yield client
        finally:
            server.should_exit = True
            await running


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with admin(gateway) as open_client:
        yield open_client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "code", "param"}
    error: dict[str, Any] = body["error"]
    return error


def completion(tokens: list[int], model: str = "llama") -> bytes:
    return json.dumps({"model": model, "prompt": tokens, "max_tokens": 16}).encode()


COMPLETIONS = {"path": "/v1/completions"}


# --------------------------------------------------------------------------- state


async def test_workers(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.store("w1", list(range(64)))
    workers = (await client.get("/admin/workers")).json()["workers"]
    assert [worker["id"] for worker in workers] == ["w1", "w2"]
    first = workers[0]
    assert (first["engine"], first["version"], first["models"]) == ("vllm", "0.33.0", ["llama"])
    assert (first["state"], first["state_for_s"], first["reason"]) == ("ready", 50, None)
    assert first["load"] == {
        "running": 1,
        "waiting": 2,
        "kv_usage": 0.25,
        "prefix_queries": None,
        "prefix_hits": None,
        "age_s": 1,
        "source": "poll",
    }
    assert first["index_blocks"] == {"gpu": 4, "cpu": 0, "disk": 0, "remote": 0}
    assert first["feed"]["phases"] == {"0": "live"}
    assert first["events"] == [{"rank": 0, "endpoint": "tcp://w1:5557", "replay_endpoint": None}]
    assert first["findings"] == [
        {
            "severity": "warning",
            "code": "no_replay",
            "message": "KV events have no replay",
            "fix": "add a replay_endpoint (tcp://*:5657) to --kv-events-config",
        }
    ]
    assert workers[1]["feed"] is None
    assert (await client.get("/admin/workers/w1")).json() == first


async def test_no_answer_shows_a_workers_key(client: httpx.AsyncClient) -> None:
    for path in ("/admin/workers", "/admin/workers/w1", "/admin/pools", "/admin/config", "/metrics", "/admin/index"):
        answer = await client.get(path)
        assert answer.status_code == 200
        assert "engine-secret" not in answer.text


async def test_unknown_worker(client: httpx.AsyncClient) -> None:
    answer = await client.get("/admin/workers/w9")
    assert answer.status_code == 404
    assert error_of(answer)["code"] == "worker_not_found"
    assert "w1, w2" in error_of(answer)["message"]


async def test_pools(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.fleet.leaving(WorkerId("w2"), NOW, reason="away")
    pools = {pool["name"]: pool for pool in (await client.get("/admin/pools")).json()["pools"]}
    assert list(pools) == ["llama", "poet"]
    assert (pools["poet"]["model"], pools["poet"]["adapter"]) == ("llama", "poet")
    assert (pools["llama"]["block_size"], pools["llama"]["workers"]) == (BLOCK, ["w1", "w2"])
    assert pools["llama"]["ready"] == ["w1"]
    assert pools["llama"]["not_ready"] == [{"worker": "w2", "reason": "gone"}]
    assert pools["llama"]["prefill_token_s"] > 0


async def test_index(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.store("w2", list(range(32)))
    index = (await client.get("/admin/index")).json()
    assert index["blocks"]["w2"]["gpu"] == 2
    assert index["estimated_bytes"] > 0


async def test_sessions_are_counted_and_named_only_when_asked_for(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.router.sessions.keep("alice-secret", WorkerId("w1"), NOW)
    answer = await client.get("/admin/sessions")
    assert answer.json() == {"sessions": 1, "by_worker": {"w1": 1}, "worker": None, "age_s": None}
    assert "alice" not in answer.text
    gateway.router.sessions.keep("alice-secret", WorkerId("w1"), NOW - 4)
    asked = (await client.get("/admin/sessions", params={"id": "alice-secret"})).json()
    assert (asked["worker"], asked["age_s"]) == ("w1", 4)
    assert (await client.get("/admin/sessions", params={"id": "bob"})).json()["worker"] is None
    assert [w["sessions"] for w in (await client.get("/admin/workers")).json()["workers"]] == [1, 0]


async def test_a_session_is_moved_and_forgotten(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.router.sessions.keep("alice", WorkerId("w1"), NOW)
    moved = await client.put("/admin/sessions", params={"id": "alice", "worker": "w2"})
    assert moved.json() == {"worker": "w2"}
    assert gateway.router.sessions.find("alice", NOW) == "w2"
    assert (await client.get("/admin/sessions")).json()["by_worker"] == {"w2": 1}
    unknown = await client.put("/admin/sessions", params={"id": "alice", "worker": "w9"})
    assert (unknown.status_code, error_of(unknown)["param"]) == (404, "worker")
    assert (await client.delete("/admin/sessions", params={"id": "alice"})).json() == {"worker": None}
    assert gateway.router.sessions.find("alice", NOW) is None
    again = await client.delete("/admin/sessions", params={"id": "alice"})
    assert (again.status_code, error_of(again)["code"]) == (404, "session_not_found")


async def test_prefixes_name_their_holders_and_show_no_text(client: httpx.AsyncClient, gateway: Gateway) -> None:
    shared = list(range(1000, 1640))
    gateway.store("w2", shared)
    for number in range(12):
        body = completion([*shared, *[number] * 64])
        work = gateway.hasher.begin(_parsed(body, f"r{number}"), block_size=BLOCK)
        lease = gateway.router.route(_parsed(body, f"r{number}"), work.blocks(), NOW)
        lease.settle(Ending(Result.COMPLETED, 200, NOW), started_at=NOW, stages=StageTimes())
    seen = (await client.get("/admin/prefixes")).json()
    (application,) = seen["applications"]
    assert (application["model"], application["prompts"], application["drifted"]) == ("llama", 12, 0)
    assert application["stable_tokens"] == 640
    assert seen["prefixes"][0]["workers"] == ["w2"]
    assert (seen["prefixes"][0]["tokens"], seen["prefixes"][0]["head"]) == (640, application["head"])
    assert seen["new_heads"] == {"llama": 1}
    failed = gateway.router.route(_parsed(body, "r"), work.blocks(), NOW)
    failed.settle(Ending(Result.WORKER_FAILED, 502, NOW), started_at=NOW, stages=StageTimes())
    (after,) = (await client.get("/admin/prefixes", params={"limit": 1})).json()["applications"]
    assert after["prompts"] == 12


async def test_config_is_passed_on(client: httpx.AsyncClient) -> None:
    assert (await client.get("/admin/config")).json() == {
        "settings": {"auth": {"admin_token": "**********"}},
        "origins": {},
        "needs_restart": ["server.port"],
        "problems": [],
    }


async def test_metrics_are_prometheus_text(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.store("w1", list(range(64)))
    answer = await client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    blocks = {(s.labels["worker"], s.labels["tier"]): s.value for s in families["kvgate_index_blocks"].samples}
    assert blocks["w1", "gpu"] == 4


async def test_probes(client: httpx.AsyncClient, gateway: Gateway) -> None:
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/ready")).status_code == 200
    gateway.readiness = Readiness(ready=False, reason="no worker is ready")
    answer = await client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "reason": "no worker is ready"})


# --------------------------------------------------------------------------- decisions


async def decided(gateway: Gateway, count: int) -> list[str]:
    chosen: list[str] = []
    for number in range(count):
        body = completion(list(range(64)))
        request = _parsed(body, f"r{number}")
        work = gateway.hasher.begin(request, block_size=BLOCK)
        lease = gateway.router.route(request, work.blocks(), NOW - 10 + number)
        ending = Ending(Result.COMPLETED, 200, NOW, usage=Usage(64, 16, 48))
        if number:  # the first stays open
            gateway.requests.record(lease.settle(ending, started_at=NOW - 2, stages=StageTimes()))
        chosen.append(lease.worker.id)
    return chosen


def _parsed(body: bytes, request_id: str) -> Any:
    from gateway.api import parse_request
    from gateway.records import Endpoint

    return parse_request(Endpoint.COMPLETIONS, body, request_id=request_id)


async def test_decisions_newest_first_with_their_outcome(client: httpx.AsyncClient, gateway: Gateway) -> None:
    chosen = await decided(gateway, 3)
    decisions = (await client.get("/admin/decisions")).json()["decisions"]
    assert [item["request_id"] for item in decisions] == ["r2", "r1", "r0"]
    assert [item["worker"] for item in decisions] == chosen[::-1]
    assert decisions[0]["age_s"] == 8
    assert decisions[0]["outcome"]["delivered_tokens"] == 48
    assert decisions[0]["outcome"]["duration_s"] == 2
    assert decisions[2]["outcome"] is None
    assert len(decisions[0]["candidates"]) == 2
    assert len((await client.get("/admin/decisions", params={"limit": 2})).json()["decisions"]) == 2


async def test_decisions_of_one_request_or_worker(client: httpx.AsyncClient, gateway: Gateway) -> None:
    chosen = await decided(gateway, 4)
    (only,) = (await client.get("/admin/decisions", params={"request_id": "r1"})).json()["decisions"]
    assert only["request_id"] == "r1"
    of_w1 = (await client.get("/admin/decisions", params={"worker": "w1"})).json()["decisions"]
    assert len(of_w1) == chosen.count("w1")


async def test_decisions_by_what_became_of_them(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.store("w1", list(range(64)))
    await decided(gateway, 3)  # the first still runs

    async def ids(**params: Any) -> list[str]:
        answer = await client.get("/admin/decisions", params=params)
        return [item["request_id"] for item in answer.json()["decisions"]]

    assert await ids(model="llama") == ["r2", "r1", "r0"]
    assert await ids(model="poet") == []
    assert await ids(since_s=9) == ["r2", "r1"]
    assert await ids(status=200) == ["r2", "r1"]
    assert await ids(status=500) == []
    assert await ids(result="completed", since_s=8) == ["r2"]
    assert await ids(missed="true") == []
    assert await ids(missed="false") == ["r2", "r1"]
    assert await ids(miss_cause="evicted") == []
    wrong = await client.get("/admin/decisions", params={"miss_cause": "weather"})
    assert (wrong.status_code, error_of(wrong)["param"]) == (422, "miss_cause")


@pytest.mark.parametrize("limit", ["0", "257", "many"])
async def test_a_wrong_limit_is_refused_in_openai_shape(limit: str, client: httpx.AsyncClient) -> None:
    answer = await client.get("/admin/decisions", params={"limit": limit})
    assert answer.status_code == 422
    assert error_of(answer)["param"] == "limit"


async def test_explain_shows_every_worker_and_runs_nothing(client: httpx.AsyncClient, gateway: Gateway) -> None:
    tokens = list(range(640))
    gateway.store("w2", tokens)
    before = {name: worker.inflight_requests for name, worker in gateway.fleet.workers.items()}
    answer = await client.post("/admin/explain", params=COMPLETIONS, content=completion(tokens))
    decision = answer.json()
    assert answer.status_code == 200
    assert (decision["worker"], decision["mode"], decision["block_size"]) == ("w2", "exact", BLOCK)
    assert decision["predicted_tokens"] == decision["available_tokens"] == 640 - BLOCK
    assert decision["prompt_tokens"] == 640
    assert [row["worker"] for row in decision["candidates"]] == ["w2", "w1"]
    assert decision["candidates"][0]["terms"]["cost"] < decision["candidates"][1]["terms"]["cost"]
    assert decision["candidates"][0]["terms"]["hit_s"] > 0
    assert decision["outcome"] is None
    assert {name: worker.inflight_requests for name, worker in gateway.fleet.workers.items()} == before
    assert gateway.router.open_leases == 0
    assert (await client.get("/admin/decisions")).json() == {"decisions": []}


async def test_a_client_that_leaves_in_the_middle_of_what_is_to_be_explained_is_no_bug(gateway: Gateway) -> None:
    said = iter([{"type": "http.request", "body": b'{"mod', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(said)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/admin/explain", "query_string": b"", "headers": []}
    await app_of(gateway)(scope, receive, send)  # a bug would be raised, for the log
    assert sent[0]["status"] == 499


@pytest.mark.parametrize(
    ("late_after", "told"), [(0.75, (0.75, None)), (NoSecond.UNSEEN, (None, "unseen")), (NoSecond.OFF, (None, "off"))]
)
async def test_explain_says_when_a_second_worker_would_get_the_request(
    client: httpx.AsyncClient, gateway: Gateway, late_after: float | NoSecond, told: tuple[float | None, str | None]
) -> None:
    gateway.late_after = late_after
    decision = (await client.post("/admin/explain", params=COMPLETIONS, content=completion([1, 2, 3]))).json()
    assert (decision["late_after_s"], decision["no_second"]) == told


async def test_explain_names_who_was_not_considered(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.fleet.drain(WorkerId("w2"), NOW, on=True)
    decision = (await client.post("/admin/explain", params=COMPLETIONS, content=completion([1, 2, 3]))).json()
    assert [row["worker"] for row in decision["candidates"]] == ["w1"]
    assert decision["excluded"] == [["w2", "draining"]]


async def test_an_operator_drains_and_resets(client: httpx.AsyncClient, gateway: Gateway) -> None:
    name = WorkerId("w2")
    (drained,) = (await client.post("/admin/workers/w2/drain")).json()["workers"]
    assert (drained["id"], drained["state"], drained["health"]["draining"]) == ("w2", "draining", True)
    assert [worker.id for worker in gateway.fleet.pools["llama"].ready] == ["w1"]
    (back,) = (await client.post("/admin/workers/w2/undrain")).json()["workers"]
    assert (back["state"], back["health"]["draining"]) == ("ready", False)
    for _ in range(5):
        gateway.fleet.probed(name, NOW, passed=False)
    (ejected,) = [w for w in (await client.get("/admin/workers")).json()["workers"] if w["id"] == "w2"]
    assert (ejected["state"], ejected["reason"], ejected["health"]["breaker"]) == ("ejected", "probe_failed", "open")
    assert ejected["health"]["trial_in_s"] == 10.0
    (reset,) = (await client.post("/admin/workers/w2/reset")).json()["workers"]
    assert (reset["state"], reset["health"]["breaker"], reset["health"]["limit"]) == ("ready", "closed", None)
    for what in ("drain", "undrain", "reset"):
        answer = await client.post(f"/admin/workers/w9/{what}")
        assert (answer.status_code, error_of(answer)["code"]) == (404, "worker_not_found")


async def test_the_last_changes_of_a_workers_state_are_told(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.fleet.drain(WorkerId("w2"), NOW - 3, on=True)
    gateway.fleet.drain(WorkerId("w2"), NOW - 1, on=False)
    gateway.fleet.workers[WorkerId("w2")].health.changes.clear()  # as the log does
    changes = (await client.get("/admin/workers/w2")).json()["health"]["changes"]
    assert [(one["before"], one["state"], one["age_s"]) for one in changes] == [
        ("draining", "ready", 1),
        ("ready", "draining", 3),
    ]


async def test_an_operator_has_a_worker_learned_anew(client: httpx.AsyncClient, gateway: Gateway) -> None:
    (worker,) = (await client.post("/admin/workers/w1/resync")).json()["workers"]
    assert (worker["id"], gateway.resynced) == ("w1", ["w1"])
    refused = await client.post("/admin/workers/w2/resync")  # one without a feed
    assert (refused.status_code, error_of(refused)["code"]) == (409, "nothing_to_resync")
    gateway.expected.add(WorkerId("w3"))
    joining = await client.post("/admin/workers/w3/resync")
    assert (joining.status_code, error_of(joining)["code"]) == (404, "worker_not_found")
    assert "not joined" in error_of(joining)["message"]


async def test_a_mistyped_worker_is_told_the_nearest_name(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.join(WorkerSpec(WorkerId("llama-a100-7"), "http://10.0.0.7:8000"))
    assert "did you mean 'llama-a100-7'?" in error_of(await client.post("/admin/workers/lama-a100-7/drain"))["message"]


async def test_draining_a_server_drains_its_ranks(client: httpx.AsyncClient, gateway: Gateway) -> None:
    for number in (0, 1):
        gateway.join(WorkerSpec(WorkerId(f"dp@{number}"), "http://dp:8000", rank=Rank(WorkerId("dp"), number, number)))
    drained = (await client.post("/admin/workers/dp/drain")).json()["workers"]
    assert [(worker["id"], worker["state"]) for worker in drained] == [("dp@0", "draining"), ("dp@1", "draining")]


async def test_explain_reads_the_session(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.router.sessions.keep("alice", WorkerId("w2"), NOW)
    answer = await client.post(
        "/admin/explain", params=COMPLETIONS, content=completion([1, 2, 3]), headers={"x-session-id": "alice"}
    )
    assert answer.json()["affinity"] in {"kept", "moved_busy"}


async def test_explain_without_a_tokenizer_is_honest(client: httpx.AsyncClient) -> None:
    body = {"model": "llama", "messages": [{"role": "user", "content": "hello"}]}
    decision = (await client.post("/admin/explain", json=body)).json()
    assert (decision["mode"], decision["predicted_tokens"]) == ("approximate", 0)
    assert decision["reason"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", completion([1], model="gpt-9"), 404, "model"),
        ("/v1/nothing", completion([1]), 400, "path"),
        ("/v1/completions", b'{"pad": "' + b"x" * 100_000 + b'"}', 413, None),
    ],
)
async def test_what_cannot_be_explained(
    path: str, body: bytes, status: int, param: str | None, client: httpx.AsyncClient
) -> None:
    answer = await client.post("/admin/explain", params={"path": path}, content=body)
    assert answer.status_code == status
    assert error_of(answer)["param"] == param


async def test_explain_with_no_worker_ready(client: httpx.AsyncClient, gateway: Gateway) -> None:
    for name in list(gateway.fleet.workers):
        gateway.fleet.leaving(name, NOW, reason="away")
    answer = await client.post("/admin/explain", params=COMPLETIONS, content=completion([1]))
    assert answer.status_code == 503
    assert error_of(answer)["code"] == "no_worker"


# --------------------------------------------------------------------------- members


async def test_a_worker_joins_and_leaves(client: httpx.AsyncClient, gateway: Gateway) -> None:
    answer = await client.post("/admin/workers", json={"url": "http://10.0.0.9:8000/", "name": "w9", "api_key": "k"})
    assert answer.status_code == 201
    (worker,) = answer.json()["workers"]
    assert (worker["id"], worker["url"]) == ("w9", "http://10.0.0.9:8000")
    assert gateway.added[0].api_key == "k"
    assert '"k"' not in answer.text
    assert (await client.delete("/admin/workers/w9")).status_code == 204
    assert "w9" not in gateway.fleet.workers
    assert (await client.delete("/admin/workers/w9")).status_code == 404


async def test_a_worker_without_a_name_gets_one(client: httpx.AsyncClient, gateway: Gateway) -> None:
    answer = await client.post("/admin/workers", json={"url": "http://10.0.0.9:8000"})
    assert answer.json()["workers"][0]["id"] == gateway.added[0].name


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"url": "http://10.0.0.9:8000", "name": "w1"}, 409, "worker_exists"),
        ({"url": "http://nowhere:8000"}, 502, "probe_failed"),
        ({"url": "http://\0"}, 422, "invalid_value"),
        ({"url": "http://a..b"}, 422, "invalid_value"),
        ({"url": f"http://{'a' * 64}"}, 422, "invalid_value"),
        ({"url": "http://a:0"}, 422, "invalid_value"),
        ({"url": "http://one-too-many:8000"}, 503, "fleet_full"),
        ({"url": "http://10.0.0.9:8000", "ranks": "some"}, 422, "invalid_value"),
        ({"url": "http://10.0.0.9:8000", "data_parallel_size": 0}, 422, "invalid_value"),
        ({"url": "ftp://10.0.0.9"}, 422, "invalid_value"),
        ({"url": "http://10.0.0.9:8000", "tyop": 1}, 422, "invalid_value"),
        ({}, 422, "invalid_value"),
    ],
)
async def test_a_worker_that_cannot_join(
    body: dict[str, Any], status: int, code: str, client: httpx.AsyncClient, gateway: Gateway
) -> None:
    answer = await client.post("/admin/workers", json=body)
    assert answer.status_code == status
    error = error_of(answer)
    assert error["code"] == code
    if "url: " in error["message"]:
        assert error["param"] == "url"
    assert set(gateway.fleet.workers) == {"w1", "w2"}


async def test_the_name_of_a_worker_that_has_not_joined_yet_is_taken(
    client: httpx.AsyncClient, gateway: Gateway
) -> None:
    """One of the configuration that is still loading its model must not be replaced by a newcomer without a name."""
    gateway.expected |= {WorkerId("w3")}
    assert (await client.post("/admin/workers", json={"url": "http://10.0.0.9:8000"})).json()["workers"][0][
        "id"
    ] == "w4"
    answer = await client.post("/admin/workers", json={"url": "http://10.0.0.9:8000", "name": "w3"})
    assert (answer.status_code, error_of(answer)["code"]) == (409, "worker_exists")
    assert (await client.delete("/admin/workers/w3")).status_code == 204
    assert not gateway.expected


async def test_a_web_page_cannot_add_a_worker_by_a_plain_form(client: httpx.AsyncClient, gateway: Gateway) -> None:
    body = b'{"url": "http://10.0.0.9:8000"}'
    answer = await client.post("/admin/workers", content=body, headers={"content-type": "text/plain"})
    assert answer.status_code == 422
    assert gateway.added == []


# --------------------------------------------------------------------------- access and errors


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
async def test_a_long_body_is_refused_before_it_is_read_whoever_sends_it(gateway: Gateway, chunked: bool) -> None:
    """The body of a request comes before its token is looked at."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(16):
            yield b" " * 65_536

    async with admin(gateway, token="t") as client:
        body = pieces() if chunked else b" " * 1_000_000
        answer = await client.post("/admin/workers", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert error_of(answer)["code"] == "payload_too_large"
        # `explain` has a limit of its own, behind the token.
        explained = await client.post("/admin/explain", content=b" " * 90_000)
        assert explained.status_code == 401
        auth = {"authorization": "Bearer t"}
        asked = completion([7] * 26_000)
        assert len(asked) > MOST_BODY_BYTES
        path = {"path": "/v1/completions"}
        explained = await client.post("/admin/explain", params=path, content=asked, headers=auth)
        assert explained.status_code == 200


async def test_the_token_guards_all_but_the_probes(gateway: Gateway) -> None:
    async with admin(gateway, token="s3cret") as client:
        for path in ("/health", "/ready", "/admin/openapi.json"):
            assert (await client.get(path)).status_code == 200
        schema = (await client.get("/admin/openapi.json")).json()
        guarded = [
            (method, path)
            for path, methods in schema["paths"].items()
            for method in methods
            if path not in ("/health", "/ready")
        ]
        assert len(guarded) >= 11
        for method, path in guarded:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "s3cret"}):
                answer = await client.request(method.upper(), path.replace("{worker_id}", "w1"), headers=headers)
                assert answer.status_code == 401, path
                assert error_of(answer)["code"] == "invalid_admin_token"
                assert answer.headers["www-authenticate"] == "Bearer"
        assert set(gateway.fleet.workers) == {"w1", "w2"}
        allowed = await client.get("/admin/workers", headers={"authorization": "Bearer s3cret"})
        assert allowed.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8001", "127.0.0.1.evil.example", "localhost.evil", "x:"]
)
async def test_without_a_token_the_port_has_no_foreign_name(host: str, gateway: Gateway) -> None:
    """A page of another site that has its own name point at this machine gets nothing and changes nothing."""
    async with admin(gateway, own_names=True) as client:
        for method, path in (("GET", "/metrics"), ("GET", "/health"), ("DELETE", "/admin/workers/w1")):
            answer = await client.request(method, path, headers={"host": host})
            assert (answer.status_code, error_of(answer)["code"]) == (403, "foreign_host")
        added = await client.post("/admin/workers", json={"url": "http://10.0.0.9:8000"}, headers={"host": host})
        assert added.status_code == 403
    assert set(gateway.fleet.workers) == {"w1", "w2"}
    assert gateway.added == []
    async with admin(gateway, token="s3cret") as client:
        assert (await client.get("/health", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8001", "127.0.0.1:8001", "10.1.2.3", "[::1]:8001", "::1"])
async def test_its_own_names_are_addresses_and_localhost(host: str, gateway: Gateway) -> None:
    async with admin(gateway, own_names=True) as client:
        assert (await client.get("/admin/workers", headers={"host": host})).status_code == 200


async def test_no_answer_may_be_framed_kept_or_taken_for_something_else(gateway: Gateway) -> None:
    async with admin(gateway, token="s3cret", own_names=True) as client:
        for path in ("/health", "/admin/openapi.json", "/metrics", "/admin/nothing"):
            headers = (await client.get(path)).headers
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["x-frame-options"] == "DENY"
            assert "frame-ancestors 'none'" in headers["content-security-policy"]
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in headers
        assert "x-frame-options" in (await client.get("/metrics", headers={"host": "evil.example"})).headers


async def test_paths_that_do_not_exist(client: httpx.AsyncClient) -> None:
    missing = await client.get("/admin/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    wrong = await client.put("/admin/workers")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")


async def test_a_bug_is_an_error_in_shape_and_tells_nothing(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.broken = True
    answer = await client.get("/admin/config")
    assert answer.status_code == 500
    assert error_of(answer)["message"] == "internal error: RuntimeError"


async def test_the_schema_describes_every_path(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/admin/openapi.json")).json()
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), (method, path)
            assert operation["operationId"].isidentifier(), (method, path)
    # FastAPI's documentation pages would load their viewer from the internet.
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert (await client.get(path)).status_code == 404


def _described(schema: dict[str, Any], part: dict[str, Any]) -> Draft202012Validator:
    """Checks values against a part of the schema; a field that the schema does not name is a mistake too."""
    components = schema["components"]["schemas"]
    strict = {
        name: {"additionalProperties": False} | model if "properties" in model else model
        for name, model in components.items()
    }
    return Draft202012Validator({"components": {"schemas": strict}} | part)


async def test_every_answer_is_as_the_schema_says(client: httpx.AsyncClient, gateway: Gateway) -> None:
    await decided(gateway, 3)
    gateway.fleet.drain(WorkerId("w2"), NOW, on=True)
    gateway.router.sessions.keep("alice", WorkerId("w1"), NOW)
    schema = (await client.get("/admin/openapi.json")).json()
    bodies: dict[tuple[str, str], dict[str, Any]] = {
        ("post", "/admin/workers"): {"json": {"url": "http://10.0.0.9:8000", "name": "w3"}},
        ("delete", "/admin/workers/{worker_id}"): {},
        ("post", "/admin/explain"): {"params": COMPLETIONS, "content": completion([1, 2, 3])},
        ("put", "/admin/sessions"): {"params": {"id": "alice", "worker": "w2"}},
        ("delete", "/admin/sessions"): {"params": {"id": "alice"}},
    }
    asked = [(method, path) for path, methods in schema["paths"].items() for method in methods]
    for method, path in sorted(asked, key=lambda one: one[0] == "delete"):
        target = path.replace("{worker_id}", "w3" if method == "delete" else "w1")
        answer = await client.request(method.upper(), target, **bodies.get((method, path), {}))
        described = schema["paths"][path][method]["responses"]
        assert str(answer.status_code) in described, (method, path, answer.text)
        content = described[str(answer.status_code)].get("content", {})
        if "application/json" in content:
            _described(schema, content["application/json"]["schema"]).validate(answer.json())
    refused = await client.get("/admin/workers/w9")
    _described(schema, {"$ref": "#/components/schemas/ErrorAnswer"}).validate(refused.json())


async def test_examples_are_as_the_schema_says(client: httpx.AsyncClient) -> None:
    schema = (await client.get("/admin/openapi.json")).json()
    checked = 0
    for name, model in schema["components"]["schemas"].items():
        for value in model.get("examples", ()):
            _described(schema, {"$ref": f"#/components/schemas/{name}"}).validate(value)
            checked += 1
    assert checked >= 10
    (worker,) = schema["components"]["schemas"]["WorkerSettings"].get("examples") or [
        schema["paths"]["/admin/workers"]["post"]["requestBody"]["content"]["application/json"]["schema"]["examples"][0]
    ]
    _described(schema, {"$ref": "#/components/schemas/WorkerSettings"}).validate(worker)


@pytest.mark.parametrize("value", [{"sessions": "1"}, {"sessions": 1, "by_worker": {}, "more": 1}, {"sessions": 1}])
async def test_an_answer_that_is_not_as_the_schema_says_is_found(value: Any, client: httpx.AsyncClient) -> None:
    schema = (await client.get("/admin/openapi.json")).json()
    assert not _described(schema, {"$ref": "#/components/schemas/SessionsAnswer"}).is_valid(value)
