"""Facts from answers: what each engine says, what is configured, what is missing, and what the operator is told."""

from __future__ import annotations

import json

import httpx
import pytest

from gateway.records import EngineKind, EventSource, Severity, WorkerFacts
from gateway.upstream.control import ControlClient, ProbeFailed
from gateway.upstream.discovery import probe
from tests.unit.upstream_probe.probing import Answers, answers_of, probed, source, spec, with_sources

# --------------------------------------------------------------------------- the three recorded engines


async def test_vllm() -> None:
    facts = await probed(answers_of("vllm-0.32.0"), spec())
    assert facts == WorkerFacts(
        engine=EngineKind.VLLM,
        version="0.32.0",
        models=("tiny",),
        adapters={},
        block_size=32,
        kv_blocks=128,
        max_model_len=2048,
        events=(
            EventSource(
                rank=0,
                endpoint="tcp://127.0.0.1:18101",
                replay_endpoint="tcp://127.0.0.1:18201",
                topic="kv@127.0.0.1:18001@tiny",
            ),
        ),
        start_time_unix=1.79596383357e9,
        findings=(),
        root="tiny-qwen2",
        needs_key=False,
    )


async def test_older_vllm_cannot_say_where_its_events_are() -> None:
    facts = await probed(answers_of("vllm-0.16.0"), spec())
    assert (facts.engine, facts.version, facts.block_size, facts.kv_blocks) == (EngineKind.VLLM, "0.16.0", 32, 128)
    assert facts.events == ()
    (finding,) = facts.findings
    assert finding.code == "events_unannounced"
    assert "set kv_events of this worker" in finding.fix


async def test_sglang() -> None:
    facts = await probed(answers_of("sglang-0.5.23"), spec())
    assert (facts.engine, facts.version, facts.models) == (EngineKind.SGLANG, "0.5.23", ("tiny",))
    assert (facts.block_size, facts.kv_blocks, facts.max_model_len) == (16, 512, 2048)
    assert facts.events == (EventSource(0, "tcp://127.0.0.1:18401", "tcp://127.0.0.1:18501", "kv"),)
    assert ([finding.code for finding in facts.findings], facts.root) == (["decode_log_interval"], "tiny-qwen2")


async def test_old_path_of_sglang_server_info() -> None:
    answers = answers_of("sglang-0.5.23")
    answers["/get_server_info"] = answers.pop("/server_info")
    assert (await probed(answers, spec())).block_size == 16


async def test_what_is_unknown_of_an_sglang_without_metrics() -> None:
    """It tells load and cache size elsewhere."""
    answers = answers_of("sglang-0.5.23")
    del answers["/metrics"]
    facts = await probed(answers, spec())
    (finding,) = [finding for finding in facts.findings if finding.code == "metrics_off"]
    assert "load" not in finding.message
    assert "hits" in finding.message
    assert facts.kv_blocks is not None


async def test_another_openai_server_serves_without_cache_knowledge() -> None:
    answers: Answers = {"/v1/models": (200, '{"data": [{"id": "m"}]}')}
    facts = await probed(answers, spec())
    assert (facts.engine, facts.version, facts.models, facts.block_size) == (EngineKind.UNKNOWN, "", ("m",), None)
    assert [finding.code for finding in facts.findings] == ["metrics_off", "engine_unknown"]


async def test_behind_a_proxy_the_owner_of_the_model_tells_the_engine() -> None:
    answers: Answers = {"/v1/models": (200, '{"data": [{"id": "m", "owned_by": "sglang"}]}')}
    assert (await probed(answers, spec())).engine is EngineKind.SGLANG


async def test_a_foreign_server_info_is_not_sglang() -> None:
    answers: Answers = {
        "/v1/models": (200, '{"data": [{"id": "m"}]}'),
        "/server_info": (200, '{"vllm_config": {}}'),
    }
    assert (await probed(answers, spec())).engine is EngineKind.UNKNOWN


# --------------------------------------------------------------------------- models


async def test_adapters_and_their_bases() -> None:
    answers = answers_of("vllm-0.32.0")
    cards = [
        {"id": "base", "parent": None, "max_model_len": 4096},
        {"id": "poet", "parent": "base"},
        {"id": "lawyer", "parent": "/models/elsewhere"},
    ]
    answers["/v1/models"] = (200, json.dumps({"data": cards}))
    facts = await probed(answers, spec())
    assert facts.models == ("base",)
    assert facts.adapters == {"poet": "base", "lawyer": "base"}
    assert facts.max_model_len == 4096


async def test_configured_models_narrow_what_is_served() -> None:
    answers = answers_of("vllm-0.32.0")
    cards = [{"id": name, "owned_by": "vllm", "parent": base} for name, base in (("a", None), ("b", None), ("x", "a"))]
    answers["/v1/models"] = (200, json.dumps({"data": cards}))
    facts = await probed(answers, spec(models=("b",)))
    assert (facts.models, facts.adapters) == (("b",), {})
    with pytest.raises(ProbeFailed, match="serves a, b, x, but models says c"):
        await probed(answers, spec(models=("c",)))


async def test_sglang_serves_any_configured_name() -> None:
    assert (await probed(answers_of("sglang-0.5.23"), spec(models=("other",)))).models == ("other",)


# --------------------------------------------------------------------------- event endpoints


@pytest.mark.parametrize(
    ("url", "endpoint", "expected"),
    [
        ("http://10.0.0.7:8000", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("http://worker.local:8000", "tcp://[::]:5557", "tcp://worker.local:5557"),
        ("http://[2001:db8::7]:8000", "tcp://*:5557", "tcp://[2001:db8::7]:5557"),
        ("http://10.0.0.7:8000", "tcp://[2001:db8::9]:5557", "tcp://[2001:db8::9]:5557"),
        ("http://127.0.0.1:8000", "ipc:///tmp/kv.sock", "ipc:///tmp/kv.sock"),
    ],
)
async def test_where_events_are_reached(url: str, endpoint: str, expected: str) -> None:
    facts = await probed(with_sources({"0": source(endpoint)}), spec(url))
    assert [item.endpoint for item in facts.events] == [expected]
    assert facts.findings == ()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557", "tcp://10.0.0.1:5557"])
async def test_a_socket_that_connects_is_no_source(endpoint: str) -> None:
    facts = await probed(with_sources({"0": source(endpoint)}), spec("http://10.0.0.7:8000"))
    assert facts.events == ()
    (finding,) = facts.findings
    assert (finding.severity, finding.code) == (Severity.ERROR, "events_connect")
    assert endpoint in finding.message
    assert "tcp://*:5557" in finding.fix


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/kv.sock", "inproc://kv"])
async def test_a_transport_that_does_not_leave_the_machine(endpoint: str) -> None:
    facts = await probed(with_sources({"0": source(endpoint)}), spec("http://10.0.0.7:8000"))
    assert facts.events == ()
    assert facts.findings[0].code == "events_local"


@pytest.mark.parametrize(("replay", "said"), [("tcp://127.0.0.1:5657", "replay_local"), (None, "no_replay")])
async def test_replay_out_of_reach_leaves_the_events(replay: str | None, said: str) -> None:
    facts = await probed(with_sources({"0": source("tcp://*:5557", replay)}), spec("http://10.0.0.7:8000"))
    assert facts.events == (EventSource(0, "tcp://10.0.0.7:5557", None, ""),)
    assert said == facts.findings[0].code


async def test_data_parallel_ranks_of_vllm() -> None:
    resolved = {str(rank): source(f"tcp://*:{5557 + rank}", f"tcp://*:{5657 + rank}") for rank in (1, 0)}
    base = {str(rank): source("tcp://*:5557", "tcp://*:5657") for rank in (0, 1)}
    for sources in (resolved, base):
        facts = await probed(with_sources(sources), spec())
        assert facts.events == (
            EventSource(0, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5657"),
            EventSource(1, "tcp://127.0.0.1:5558", "tcp://127.0.0.1:5658"),
        )


async def test_data_parallel_ranks_of_sglang() -> None:
    answers = answers_of("sglang-0.5.23")
    info = json.loads(answers["/server_info"][1])
    info["dp_size"] = info["kv_events"]["dp_size"] = 2
    answers["/server_info"] = (200, json.dumps(info))
    facts = await probed(answers, spec("http://10.0.0.7:8000"))
    assert facts.events == (
        EventSource(0, "tcp://10.0.0.7:18401", "tcp://10.0.0.7:18501", "kv"),
        EventSource(1, "tcp://10.0.0.7:18402", "tcp://10.0.0.7:18502", "kv"),
    )
    assert facts.kv_blocks == 2 * 512


@pytest.mark.parametrize("sources", [{}, {"0": source("tcp://*:5557", publisher="null")}])
async def test_events_switched_off(sources: object) -> None:
    facts = await probed(with_sources(sources), spec())
    assert facts.events == ()
    assert facts.findings[0].code == "events_off"
    assert "--kv-events-config" in facts.findings[0].fix


async def test_configured_endpoints_win() -> None:
    worker = spec("http://10.0.0.7:8000", kv_events="tcp://*:7000", kv_replay="tcp://10.0.0.8:7100")
    facts = await probed(answers_of("vllm-0.32.0"), worker)
    assert facts.events == (EventSource(0, "tcp://10.0.0.7:7000", "tcp://10.0.0.8:7100", "kv@127.0.0.1:18001@tiny"),)


async def test_configured_endpoint_of_an_engine_that_cannot_say_its_own() -> None:
    answers = answers_of("vllm-0.16.0")
    second = next(line for line in answers["/metrics"][1].splitlines() if line.startswith("vllm:cache_config_info"))
    answers["/metrics"] = (200, answers["/metrics"][1] + second.replace('engine="0"', 'engine="1"') + "\n")
    facts = await probed(answers, spec(kv_events="tcp://*:5557"))
    assert [item.endpoint for item in facts.events] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5558"]
    assert [finding.code for finding in facts.findings] == ["salt_hidden"]


async def test_events_can_be_switched_off() -> None:
    assert (await probed(answers_of("vllm-0.32.0"), spec(kv_events=""))).events == ()
    without_replay = await probed(answers_of("vllm-0.32.0"), spec(kv_replay=""))
    assert without_replay.events[0].replay_endpoint is None


# --------------------------------------------------------------------------- configuration and findings


async def test_a_configured_block_size_wins_and_a_wrong_one_is_told() -> None:
    facts = await probed(answers_of("vllm-0.32.0"), spec(block_size=16))
    assert facts.block_size == 16
    assert facts.findings[0].code == "block_size_wrong"
    assert "have 32 tokens" in facts.findings[0].message


async def test_a_configured_engine_is_not_guessed() -> None:
    seen: list[httpx.Request] = []
    facts = await probed(answers_of("sglang-0.5.23"), spec(engine=EngineKind.SGLANG), seen)
    assert facts.engine is EngineKind.SGLANG
    assert {request.url.path for request in seen} == {"/v1/models", "/server_info", "/metrics"}


async def test_vllm_is_not_asked_for_what_sglang_says_of_itself() -> None:
    """In its development mode it has that path, and takes seconds to answer."""
    seen: list[httpx.Request] = []
    answers = answers_of("vllm-0.32.0")
    answers["/server_info"] = (0, "")
    assert (await probed(answers, spec(), seen)).engine is EngineKind.VLLM
    assert "/server_info" not in {request.url.path for request in seen}


async def test_prefix_caching_off_is_told() -> None:
    answers = answers_of("vllm-0.32.0")
    answers["/metrics"] = (200, answers["/metrics"][1].replace('_caching="True"', '_caching="False"'))
    assert "--enable-prefix-caching" in (await probed(answers, spec())).findings[0].fix


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"enable_cache_report": False}, "--enable-cache-report"),
        ({"kv_events": None}, "--kv-events-config"),
        ({"kv_events": None, "page_size": 1}, "--page-size"),
    ],
)
async def test_findings_of_sglang(changes: dict[str, object], fix: str) -> None:
    answers = answers_of("sglang-0.5.23")
    answers["/server_info"] = (200, json.dumps({**json.loads(answers["/server_info"][1]), **changes}))
    assert any(fix in finding.fix for finding in (await probed(answers, spec())).findings)


@pytest.mark.parametrize(
    ("version", "codes"),
    [
        ("0.4.6", {"hashes_not_chained"}),
        ("0.4.8.post1", {"hashes_not_chained"}),
        ("0.5.5", {"hashes_not_chained"}),
        ("0.5.6", {"salt_hidden"}),
        ("0.5.18", set()),
        ("0.5.23", set()),
        ("0.1.dev1+gabc", set()),
        ("main", set()),
    ],
)
async def test_what_the_events_of_an_sglang_release_leave_out(version: str, codes: set[str]) -> None:
    answers = answers_of("sglang-0.5.23")
    info = {**json.loads(answers["/server_info"][1]), "version": version, "decode_log_interval": 1}
    answers["/server_info"] = (200, json.dumps(info))
    facts = await probed(answers, spec())
    assert {finding.code for finding in facts.findings} == codes
    assert bool(facts.events) == ("hashes_not_chained" not in codes)


@pytest.mark.parametrize(
    ("version", "codes"),
    [("0.13.0", {"salt_hidden", "adapter_hidden"}), ("0.16.0", {"salt_hidden"}), ("0.17.1", set())],
)
async def test_what_the_events_of_a_vllm_release_leave_out(version: str, codes: set[str]) -> None:
    answers = answers_of("vllm-0.16.0")
    answers["/version"] = (200, json.dumps({"version": version}))
    cards = [{"id": "base", "parent": None}, {"id": "poet", "parent": "base"}]
    answers["/v1/models"] = (200, json.dumps({"data": cards}))
    facts = await probed(answers, spec(kv_events="tcp://*:5557"))
    assert {finding.code for finding in facts.findings} == codes
    assert (await probed(answers, spec(kv_events=""))).findings == ()


@pytest.mark.parametrize("gone", [404, 500, 0])
async def test_without_metrics_the_worker_serves_and_the_loss_is_told(gone: int) -> None:
    answers = answers_of("vllm-0.32.0")
    answers["/metrics"] = (gone, "")
    facts = await probed(answers, spec())
    assert (facts.engine, facts.models, facts.block_size) == (EngineKind.VLLM, ("tiny",), None)
    assert any("/metrics" in finding.message for finding in facts.findings)


async def test_the_key_is_sent_and_stays_out_of_the_facts() -> None:
    answers = answers_of("sglang-0.5.23")
    info = {**json.loads(answers["/server_info"][1]), "api_key": "engine-secret"}
    answers["/server_info"] = (200, json.dumps(info))
    seen: list[httpx.Request] = []
    facts = await probed(answers, spec(api_key="our-secret"), seen)
    keyed = [request.headers.get("authorization") for request in seen]
    assert keyed.count("Bearer our-secret") == len(keyed) - 1  # once without: does it need one?
    assert "secret" not in repr(facts)


@pytest.mark.parametrize(("without", "needs"), [(401, True), (403, True), (200, False), (500, None)])
async def test_whether_a_worker_needs_its_key_is_asked_once(without: int, needs: bool | None) -> None:
    answers = answers_of("vllm-0.32.0")
    seen: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        status, body = answers.get(request.url.path, (404, ""))
        keyless = "authorization" not in request.headers
        return httpx.Response(without if keyless else status, text=body)

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
        client = ControlClient(http)
        facts = await probe(spec(api_key="k"), client)
        again = await probe(spec(api_key="k"), client, known=facts)
    assert (facts.needs_key, again.needs_key) == (needs, needs)
    assert sum("authorization" not in request.headers for request in seen) == 1


async def test_without_a_key_none_is_sent() -> None:
    seen: list[httpx.Request] = []
    await probed(answers_of("vllm-0.32.0"), spec(), seen)
    assert not any("authorization" in request.headers for request in seen)


# --------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (401, "", "set api_key"),
        (404, "", "no OpenAI-compatible server"),
        (503, "", "still loading"),
        (500, "", "answered 500"),
        (200, "<html>", "unexpected"),
        (200, '{"data": "x"}', "unexpected"),
        (200, '{"data": []}', "names no model"),
        (0, "", "broke off"),
    ],
)
async def test_what_a_failed_probe_says(status: int, body: str, said: str) -> None:
    with pytest.raises(ProbeFailed, match=said):
        await probed({"/v1/models": (status, body)}, spec())


async def test_an_engine_that_cannot_be_told_for_now_is_tried_again_later() -> None:
    answers = answers_of("vllm-0.32.0")
    answers["/version"] = (0, "")
    with pytest.raises(ProbeFailed, match="/version"):
        await probed(answers, spec())


# --------------------------------------------------------------------------- asked again


@pytest.mark.parametrize("silence", [0, 500, 503])
@pytest.mark.parametrize("path", ["/metrics", "/kv_event_sources"])
async def test_a_busy_worker_keeps_what_it_said_before(path: str, silence: int) -> None:
    """Else one time-out would cost it, and its whole pool, the index."""
    answers = answers_of("vllm-0.32.0")
    before = await probed(answers, spec())
    answers[path] = (silence, "")
    after = await probed(answers, spec(), known=before)
    assert (after.block_size, after.kv_blocks, after.events) == (before.block_size, before.kv_blocks, before.events)
    assert after.start_time_unix == before.start_time_unix
    assert any(path in finding.message for finding in after.findings) or path == "/kv_event_sources"


async def test_what_is_answered_or_of_another_version_is_news() -> None:
    answers = answers_of("vllm-0.32.0")
    before = await probed(answers, spec())
    answers["/kv_event_sources"] = (200, "{}")
    assert (await probed(answers, spec(), known=before)).events == ()
    answers["/kv_event_sources"] = (500, "")
    answers["/version"] = (200, '{"version": "0.33.0"}')
    assert (await probed(answers, spec(), known=before)).events == ()


@pytest.mark.parametrize("field", ["topic", "load_topic"])
async def test_a_topic_that_would_end_the_process_is_none(field: str) -> None:
    """zmq lets a subscription go by recursion over its bytes."""
    long = "x" * 200_000
    facts = await probed(with_sources({"0": source("tcp://*:5557", topic=long)}), spec())
    assert facts.events == ()
    answers = answers_of("sglang-0.5.23")
    info = json.loads(answers["/server_info"][1])
    events = {"endpoint_port_base": 5557, "load_endpoint_port_base": 6000}
    for topic, sources in (("x" * 1024, 1), (long, 0)):
        answers["/server_info"] = (200, json.dumps(info | {"kv_events": events | {field: topic}}))
        facts = await probed(answers, spec())
        assert (len(facts.events), len(facts.loads)) == (sources, sources)


DEEP = "[" * 3000 + "]" * 3000


async def test_what_is_nested_without_end_is_unreadable() -> None:
    answers = answers_of("sglang-0.5.23")
    for path in ("/server_info", "/v1/models"):
        status, body = answers[path]
        answers[path] = (status, body.rstrip()[:-1] + f', "zz": {DEEP}}}')
        if path == "/server_info":
            assert (await probed(answers, spec())).events == (), "as if it were not there"
    with pytest.raises(ProbeFailed, match="something unexpected"):
        await probed(answers, spec())


@pytest.mark.parametrize("said", [-16, 0, 1 << 40, 10**30])
async def test_a_block_size_that_can_be_none_is_not_known(said: int) -> None:
    """The keys of all its pool's workers would be cut by it, and nobody could join any more."""
    answers = answers_of("sglang-0.5.23")
    info = json.loads(answers["/server_info"][1]) | {"page_size": said, "max_total_num_tokens": 1000}
    info["kv_events"]["block_size"] = said
    answers["/server_info"] = (200, json.dumps(info))
    facts = await probed(answers, spec())
    assert (facts.block_size, facts.kv_blocks) == (None, None)


@pytest.mark.parametrize("said", [-5, 10**300])
async def test_a_cache_size_that_can_be_none_is_not_known(said: int) -> None:
    answers = answers_of("sglang-0.5.23")
    info = json.loads(answers["/server_info"][1]) | {"page_size": 16, "max_total_num_tokens": said}
    answers["/server_info"] = (200, json.dumps(info))
    assert (await probed(answers, spec())).kv_blocks is None


async def test_a_worker_that_names_more_models_than_can_be_pools_is_told_to_choose() -> None:
    answers = answers_of("vllm-0.32.0")
    names = [f"m{number}" for number in range(5000)]
    answers["/v1/models"] = (200, json.dumps({"data": [{"id": name, "owned_by": "vllm"} for name in names]}))
    with pytest.raises(ProbeFailed, match="names 5000 models, more than 4096; set models of this worker"):
        await probed(answers, spec())
    assert (await probed(answers, spec(models=("m7", "m8")))).models == ("m7", "m8")
    with pytest.raises(ProbeFailed, match=r"serves m0, m1, .*, m19, \.\.\., but models says other") as told:
        await probed(answers, spec(models=("other",)))
    assert len(str(told.value)) < 500
