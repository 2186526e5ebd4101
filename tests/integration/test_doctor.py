"""`kvgate doctor` against engines that are set up wrongly, one fault each; real HTTP, real ZeroMQ."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import zmq
import zmq.asyncio

from gateway.doctor import Checked, Plan, Tools, check_fleet, new_prompt, worst
from gateway.prefix import PromptHasher
from gateway.records import EngineKind, Severity, WorkerFacts, WorkerId, WorkerSpec
from gateway.sim.publisher import Replay
from gateway.sim.releases import Dialect
from gateway.sim.speech import DEMO_MODEL
from gateway.upstream.control import open_control_client
from tests.integration.lying import Change, Worker, lying, renaming

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture
async def tools() -> AsyncIterator[Tools]:
    hasher = PromptHasher.load(DEMO_MODEL)

    async def hasher_of(spec: WorkerSpec, facts: WorkerFacts) -> PromptHasher:
        return hasher

    context = zmq.asyncio.Context()
    async with open_control_client(timeout_s=20) as client:
        yield Tools(client, context, hasher_of, wall=time.time)
    context.destroy(linger=0)


def plan(*, run: int = 1, **more: Any) -> Plan:
    """Each run of the doctor has a prompt and a salt of its own. What must come may take long on a busy machine."""
    patient = {"reach_s": 15.0, "listen_s": 15.0, "deadline_s": 100.0} | more
    return Plan(prompt=new_prompt(Random(run)), salt=f"salt-of-run-{run}", models_known=True, **patient)


def spec(worker: Worker, **more: Any) -> WorkerSpec:
    return WorkerSpec(name=WorkerId("w1"), url=worker.url, **more)


async def checked(tools: Tools, worker: WorkerSpec, **more: Any) -> Checked:
    steps: list[tuple[str, str]] = []
    (result,) = await check_fleet([worker], tools, plan(**more), on_step=lambda name, step: steps.append((name, step)))
    assert steps[0] == ("w1", "asking what it is")
    assert steps[-1] == ("w1", "done")
    return result


def codes(result: Checked) -> list[str]:
    return [found.code for found in result.findings]


def patched(**changes: Any) -> Change:
    """The rank's event settings, changed."""
    return lambda said: {"0": said["0"] | changes}


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# --------------------------------------------------------------------------- nothing wrong


async def test_a_worker_as_it_should_be(tools: Tools) -> None:
    """Its events show salts, but on this machine only."""
    async with lying() as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == []


async def test_without_prompts_only_what_can_be_seen_is_judged(tools: Tools) -> None:
    async with lying({"/v1/completions": lambda said: (500, "no prompt was to be sent")}) as worker:
        result = await checked(tools, spec(worker), send_prompts=False)
        assert worker.engine.received == 0
    assert codes(result) == []


async def test_prompts_are_few_and_tiny(tools: Tools) -> None:
    async with lying() as worker:
        await checked(tools, spec(worker))
        sent = [body for path, body in worker.asked if path == "/v1/completions"]
    assert [body["max_tokens"] for body in sent] == [1, 1, 1]
    assert max(len(body["prompt"]) for body in sent) == 200
    assert [body.get("cache_salt") for body in sent] == [None, None, "salt-of-run-1"]


async def test_sglang_as_it_should_be(tools: Tools) -> None:
    async with lying(dialect=Dialect.SGLANG, decode_log_interval=5) as worker:
        result = await checked(tools, spec(worker))
    assert (result.facts and result.facts.engine, codes(result)) == (EngineKind.SGLANG, [])


async def test_the_smallest_pages_and_the_usual_interval_of_sglang(tools: Tools) -> None:
    async with lying(dialect=Dialect.SGLANG, block_size=1) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["page_size_1", "decode_log_interval"]


@pytest.mark.parametrize("dialect", Dialect)
async def test_each_rank_is_asked_for_its_events(dialect: Dialect, tools: Tools) -> None:
    async with lying(dialect=dialect, data_parallel_size=2, decode_log_interval=5) as worker:
        assert codes(await checked(tools, spec(worker))) == []
        sent = [body for path, body in worker.asked if path == "/v1/completions"]
    assert len(sent) == 4


async def test_a_rank_whose_events_are_not_its_own(tools: Tools) -> None:
    async with lying(data_parallel_size=2) as worker:
        worker.changes["/kv_event_sources"] = lambda said: said | {"1": said["1"] | {"topic": "kv@elsewhere"}}
        result = await checked(tools, spec(worker), listen_s=6.0)
    (found,) = [found for found in result.findings if found.code == "events_silent"]
    assert found.message.count("tcp://") == 1


# --------------------------------------------------------------------------- the event feed


async def test_events_off(tools: Tools) -> None:
    async with lying(events=False) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["events_off"]
    assert "--kv-events-config" in result.findings[0].fix


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5557", "tcp://127.0.0.1:5557"])
async def test_an_event_socket_that_connects_instead_of_binding(endpoint: str, tools: Tools) -> None:
    async with lying({"/kv_event_sources": patched(endpoint=endpoint)}) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["events_connect"]
    assert "tcp://*:5557" in result.findings[0].fix


async def test_events_that_do_not_leave_the_machine(tools: Tools) -> None:
    async with lying({"/kv_event_sources": patched(endpoint="inproc://kv")}) as worker:
        assert codes(await checked(tools, spec(worker))) == ["events_local"]


async def test_an_event_port_where_nobody_listens(tools: Tools) -> None:
    async with lying({"/kv_event_sources": patched(endpoint=f"tcp://*:{closed_port()}")}) as worker:
        result = await checked(tools, spec(worker), reach_s=0.5)
    assert codes(result) == ["events_unreachable"]
    assert "nobody listens there" in result.findings[0].message


async def test_an_event_port_of_another_service(tools: Tools) -> None:
    """It accepts the connection and never makes the handshake."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with lying({"/kv_event_sources": patched(endpoint=f"tcp://*:{port}")}) as worker:
            result = await checked(tools, spec(worker), reach_s=1.0)
    assert codes(result) == ["events_unreachable"]
    assert "does not answer as the engine's socket would" in result.findings[0].message


async def test_the_replay_port_given_for_events(tools: Tools) -> None:
    async with lying() as worker:
        worker.changes["/kv_event_sources"] = lambda said: {"0": said["0"] | {"endpoint": said["0"]["replay_endpoint"]}}
        result = await checked(tools, spec(worker), reach_s=1.0)
    assert "replay_overlaps" in codes(result)
    assert "events_unreachable" in codes(result)


async def test_an_endpoint_that_is_no_address(tools: Tools) -> None:
    async with lying() as worker:
        result = await checked(tools, spec(worker, kv_events="tcp://127.0.0.1:port"))
    assert codes(result) == ["events_unreachable"]
    assert "no address" in result.findings[0].message


async def test_events_of_another_engine(tools: Tools) -> None:
    """The endpoint is open and speaks ZeroMQ, and tells nothing of this worker."""
    async with lying() as other, lying() as worker:
        assert other.engine.events_endpoint is not None
        port = other.engine.events_endpoint.rpartition(":")[2]
        worker.changes["/kv_event_sources"] = patched(endpoint=f"tcp://*:{port}")
        result = await checked(tools, spec(worker), listen_s=0.5)
    assert codes(result) == ["events_silent"]


async def test_a_topic_nothing_is_published_under(tools: Tools) -> None:
    async with lying({"/kv_event_sources": patched(topic="kv@elsewhere")}) as worker:
        assert codes(await checked(tools, spec(worker), listen_s=0.5)) == ["events_silent"]


async def test_no_replay(tools: Tools) -> None:
    async with lying(replay=Replay.OFF) as worker:
        assert codes(await checked(tools, spec(worker))) == ["no_replay"]


async def test_no_replay_of_a_configured_feed(tools: Tools) -> None:
    async with lying({"/kv_event_sources": lambda said: (404, said)}) as worker:
        configured = spec(worker, kv_events=worker.engine.events_endpoint)
        assert codes(await checked(tools, configured)) == ["no_replay"]


async def test_a_replay_port_where_nobody_answers(tools: Tools) -> None:
    async with lying({"/kv_event_sources": patched(replay_endpoint=f"tcp://*:{closed_port()}")}) as worker:
        result = await checked(tools, spec(worker), reach_s=4.0)
    assert codes(result) == ["replay_unreachable"]


PUBLISHING: dict[str, Any] = {"dialect": Dialect.SGLANG, "decode_log_interval": 5, "load_publish_endpoint": "auto"}


async def test_load_that_is_heard_where_it_is_said_to_be(tools: Tools) -> None:
    async with lying(data_parallel_size=2, **PUBLISHING) as worker:
        result = await checked(tools, spec(worker))
        assert result.facts is not None
        assert (len(result.facts.loads), codes(result)) == (2, [])


def load_port(port: int, **more: Any) -> Change:
    return lambda said: said | {"kv_events": said["kv_events"] | {"load_endpoint_port_base": port} | more}


async def test_a_load_port_where_nobody_listens(tools: Tools) -> None:
    async with lying({"/server_info": load_port(closed_port())}, **PUBLISHING) as worker:
        result = await checked(tools, spec(worker), reach_s=0.5)
    assert codes(result) == ["load_unheard"]
    assert "nobody listens there" in result.findings[0].message
    assert "--load-publish-endpoint" in result.findings[0].fix


async def test_a_load_port_that_says_nothing_under_the_topic(tools: Tools) -> None:
    async with lying(**PUBLISHING) as worker:
        assert worker.engine.load_endpoint is not None
        port = int(worker.engine.load_endpoint.rpartition(":")[2])
        worker.changes["/server_info"] = load_port(port, load_topic="elsewhere")
        result = await checked(tools, spec(worker), listen_s=1.5)
    assert codes(result) == ["load_unheard"]
    assert "says nothing" in result.findings[0].message


async def test_a_load_port_of_another_rank(tools: Tools) -> None:
    async with lying(data_parallel_size=2, **PUBLISHING) as worker:
        assert worker.engine.load_endpoint is not None
        port = int(worker.engine.load_endpoint.rpartition(":")[2])
        worker.changes["/server_info"] = load_port(port - 1)
        result = await checked(tools, spec(worker), reach_s=2.0, listen_s=2.0)
    assert set(codes(result)) == {"load_unheard"}
    assert "does not answer as the engine's socket would" in " ".join(found.message for found in result.findings)


@pytest.mark.parametrize("replay", [Replay.OLD, Replay.NEW])
async def test_replay_of_both_layouts_is_fine(replay: Replay, tools: Tools) -> None:
    async with lying(replay=replay) as worker:
        assert codes(await checked(tools, spec(worker))) == []


# --------------------------------------------------------------------------- blocks, hits, salts, clocks


async def test_a_block_size_that_is_not_the_one_of_the_events(tools: Tools) -> None:
    def lie(said: str) -> str:
        return said.replace('block_size="16"', 'block_size="32"')

    async with lying({"/metrics": lie}) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["block_size_wrong"]
    assert "blocks have 16 tokens" in result.findings[0].message


async def test_a_configured_block_size_that_is_not_the_workers(tools: Tools) -> None:
    async with lying() as worker:
        result = await checked(tools, spec(worker, block_size=64))
    assert codes(result) == ["block_size_wrong"]
    assert "block_size 64 is configured" in result.findings[0].message


async def test_hits_not_reported(tools: Tools) -> None:
    async with lying(prompt_tokens_details=False) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["hits_not_reported"]
    assert "--enable-prompt-tokens-details" in result.findings[0].fix


def without_hits(said: dict[str, Any]) -> dict[str, Any]:
    said["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
    return said


async def test_a_prompt_that_is_no_hit_when_it_comes_again(tools: Tools) -> None:
    async with lying({"/v1/completions": without_hits}) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["repeat_missed"]
    assert "200 tokens twice" in result.findings[0].message


async def test_prefix_caching_off_is_said_once(tools: Tools) -> None:
    def lie(said: str) -> str:
        return said.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"')

    silent: dict[str, Change] = {"/metrics": lie, "/v1/completions": without_hits, "/kv_event_sources": lambda said: {}}
    async with lying(silent) as worker:
        assert codes(await checked(tools, spec(worker))) == ["prefix_caching_off", "events_off"]


async def test_salts_that_separate_nothing(tools: Tools) -> None:
    def lie(said: dict[str, Any]) -> dict[str, Any]:
        said["usage"]["prompt_tokens_details"] = {"cached_tokens": 192}
        return said

    async with lying({"/v1/completions": lie}) as worker:
        result = await checked(tools, spec(worker))
    assert "salt_ignored" in codes(result)


async def test_a_worker_that_completes_nothing(tools: Tools) -> None:
    refusal = {"error": {"message": "The model does not support Completions API", "code": 400}}
    async with lying({"/v1/completions": lambda said: (400, refusal)}) as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["probe_refused"]
    assert "does not support" in result.findings[0].message
    assert worst(result.findings) is Severity.INFO


@pytest.mark.parametrize(("ahead_s", "direction"), [(30.0, "ahead"), (-30.0, "behind")])
async def test_a_clock_that_is_off(ahead_s: float, direction: str, tools: Tools) -> None:
    async with lying(clock_ahead_s=ahead_s) as worker:
        result = await checked(tools, spec(worker))
        assert codes(result) == ["clock_skew"]
        assert direction in result.findings[0].message
        assert "date of its answers" in result.findings[0].message
        worker.clock_ahead_s = 0.0  # a proxy in between has the right time: the events have not
        result = await checked(tools, spec(worker), run=2)
    assert codes(result) == ["clock_skew"]
    assert "its events" in result.findings[0].message


# --------------------------------------------------------------------------- token ids


async def test_another_tokenizer(tools: Tools) -> None:
    async with lying(tokenizer=GOLDEN / "prefix" / "tiny-qwen2") as worker:
        result = await checked(tools, spec(worker))
    assert codes(result) == ["tokenizer_differs"]


async def test_another_chat_template(tools: Tools) -> None:
    async with lying() as worker:
        plain = worker.changes

        def lie(said: dict[str, Any]) -> dict[str, Any]:
            asked = worker.asked[-1][1]
            return said | {"tokens": [1, *said["tokens"]]} if "messages" in asked else said

        plain["/tokenize"] = lie
        assert codes(await checked(tools, spec(worker))) == ["template_differs"]


async def test_no_tokenizer_here(tools: Tools) -> None:
    async def none(spec: WorkerSpec, facts: WorkerFacts) -> PromptHasher:
        return PromptHasher.load(None)

    bare = Tools(tools.client, tools.context, none, tools.wall)
    async with lying() as worker:
        assert "no_tokenizer" in codes(await checked(bare, spec(worker)))
        (result,) = await check_fleet(
            [spec(worker)], bare, Plan(prompt=new_prompt(Random(2)), salt="s2"), on_step=lambda name, step: None
        )
    assert "tokens_unchecked" in codes(result)


# --------------------------------------------------------------------------- SGLang's settings, from a real answer


def sglang(**info: Any) -> dict[str, Change]:
    recorded = json.loads((GOLDEN / "engines" / "sglang-0.5.23" / "answers.json").read_text())
    said = json.loads(recorded["/server_info"]["body"]) | {"decode_log_interval": 1, "kv_events": None} | info
    return {"/server_info": lambda _: (200, said), "/version": lambda _: (404, {})}


@pytest.mark.parametrize(
    ("info", "code", "flag"),
    [
        ({"page_size": 1}, "page_size_1", "--page-size"),
        ({"decode_log_interval": 40}, "decode_log_interval", "--decode-log-interval"),
        ({"enable_cache_report": False}, "hits_not_reported", "--enable-cache-report"),
        ({"disable_radix_cache": True}, "prefix_caching_off", "--disable-radix-cache"),
        ({}, "events_off", "--kv-events-config"),
    ],
)
async def test_settings_of_sglang(info: dict[str, Any], code: str, flag: str, tools: Tools) -> None:
    async with lying(sglang(**info)) as worker:
        result = await checked(tools, spec(worker))
    (found,) = [found for found in result.findings if found.code == code]
    assert flag in found.fix


@pytest.mark.parametrize(("version", "code"), [("0.5.4", "hashes_not_chained"), ("0.5.12", "salt_hidden")])
async def test_releases_of_sglang_whose_events_say_too_little(version: str, code: str, tools: Tools) -> None:
    async with lying(sglang(version=version)) as worker:
        result = await checked(tools, spec(worker, kv_events=worker.engine.events_endpoint, kv_replay=""))
    assert code in codes(result)


# --------------------------------------------------------------------------- workers that cannot be asked


async def test_nobody_at_the_address(tools: Tools) -> None:
    worker = WorkerSpec(name=WorkerId("w1"), url=f"http://127.0.0.1:{closed_port()}")
    result = await checked(tools, worker)
    assert (codes(result), result.facts) == (["unreachable"], None)
    assert worst(result.findings) is Severity.ERROR


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_worker_that_wants_a_key(key: str | None, tools: Tools) -> None:
    async with lying({"/v1/models": lambda said: (401, {"error": "Unauthorized"})}) as worker:
        result = await checked(tools, spec(worker, api_key=key))
    assert codes(result) == ["needs_key"]
    assert ("another API key" in result.findings[0].message) is (key is not None)


async def test_a_worker_without_metrics(tools: Tools) -> None:
    async with lying({"/metrics": lambda said: (404, {})}) as worker:
        assert "metrics_off" in codes(await checked(tools, spec(worker)))


async def test_a_server_that_is_neither_engine(tools: Tools) -> None:
    changes: dict[str, Change] = {
        "/version": lambda said: (404, {}),
        "/v1/models": lambda said: said | {"data": [said["data"][0] | {"owned_by": "someone"}]},
    }
    async with lying(changes) as worker:
        assert "engine_unknown" in codes(await checked(tools, spec(worker)))


async def test_a_worker_that_hangs_ends_at_the_deadline_and_holds_up_no_other(tools: Tools) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stuck = WorkerSpec(name=WorkerId("stuck"), url=f"http://127.0.0.1:{listener.getsockname()[1]}")
        async with lying() as worker:
            began = time.monotonic()
            results = await check_fleet([stuck, spec(worker)], tools, plan(deadline_s=8.0), on_step=lambda *_: None)
            took_s = time.monotonic() - began
    assert codes(results[0]) == ["unfinished"]
    assert "asking what it is" in results[0].findings[0].message
    assert codes(results[1]) == []
    assert took_s < 30


# --------------------------------------------------------------------------- several workers


async def test_workers_that_name_the_same_block_differently(tools: Tools) -> None:
    """As vLLM up to 0.28 without a common PYTHONHASHSEED: here the second engine's events say other hashes."""
    async with lying() as first, lying() as second, renaming(second):
        specs = [spec(first), WorkerSpec(name=WorkerId("w2"), url=second.url)]
        results = await check_fleet(specs, tools, plan(), on_step=lambda *_: None)
    assert [codes(result) for result in results] == [[], ["hashes_unseeded"]]
    assert "those of w1" in results[1].findings[0].message
    assert "PYTHONHASHSEED" in results[1].findings[0].fix


async def test_workers_that_name_blocks_alike(tools: Tools) -> None:
    async with lying() as first, lying() as second:
        specs = [spec(first), WorkerSpec(name=WorkerId("w2"), url=second.url)]
        results = await check_fleet(specs, tools, plan(), on_step=lambda *_: None)
    assert [codes(result) for result in results] == [[], []]
