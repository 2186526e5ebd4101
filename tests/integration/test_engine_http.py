"""A simulated engine through the OpenAI client, and through plain HTTP where the client hides what matters."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionSystemMessageParam

from gateway.sim.server import EngineSettings, Fault, FaultKind, SimulatedWorker, Speech
from gateway.sim.speech import DEMO_MODEL

SETTINGS = EngineSettings(speed=20.0, adapters=("lora",))
SPEECH = Speech.load(DEMO_MODEL)
SYSTEM: ChatCompletionSystemMessageParam = {"role": "system", "content": "You answer questions about ships. " * 12}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    worker = SimulatedWorker(SETTINGS, wall_clock=time.time, speech=SPEECH)
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def http(worker: SimulatedWorker) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=worker.url, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
async def client(worker: SimulatedWorker) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def until(condition: Callable[[], bool], *, within_s: float = 20.0) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "condition not met in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


# --------------------------------------------------------------------------- OpenAI client


async def test_chat_answers_with_exact_usage_and_hits_its_own_cache(client: openai.AsyncOpenAI) -> None:
    first = await client.chat.completions.create(
        model="demo", messages=[SYSTEM, {"role": "user", "content": "What floats?"}], max_tokens=33
    )
    text = first.choices[0].message.content
    assert text
    assert first.choices[0].finish_reason == "length"
    assert first.usage is not None
    assert first.usage.completion_tokens == 33
    assert first.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    second = await client.chat.completions.create(
        model="demo",
        messages=[
            SYSTEM,
            {"role": "user", "content": "What floats?"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Why?"},
        ],
        max_tokens=5,
    )
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    # Prompt and answer are cached, except what does not fill a block and the newest token.
    assert cached == (first.usage.total_tokens - 1) // 16 * 16


async def test_chat_streams_role_text_finish_and_usage(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo",
        messages=[SYSTEM],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 9 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    whole = await client.chat.completions.create(model="demo", messages=[SYSTEM], max_tokens=9)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole.choices[0].message.content


async def test_the_synchronous_client_works(worker: SimulatedWorker) -> None:
    def ask() -> tuple[str | None, str]:
        with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none") as client:
            whole = client.completions.create(model="demo", prompt="Once", max_tokens=6)
            pieces = client.completions.create(model="demo", prompt="Once", max_tokens=6, stream=True)
            return whole.choices[0].text, "".join(piece.choices[0].text for piece in pieces)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed


async def test_several_prompts_and_choices_are_numbered(client: openai.AsyncOpenAI) -> None:
    done = await client.completions.create(model="demo", prompt=["One.", "Two."], n=2, max_tokens=4)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in done.choices}) == 4
    assert done.usage is not None
    assert done.usage.completion_tokens == 16
    lengths = [len(SPEECH.encode(text, special=True)) for text in ("One.", "Two.")]
    assert done.usage.prompt_tokens == sum(lengths)
    tokens = await client.completions.create(model="demo", prompt=[[5, 6, 7], [8, 9]], max_tokens=2)
    assert tokens.usage is not None
    assert tokens.usage.prompt_tokens == 5


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
async def test_a_forced_tool_is_called(client: openai.AsyncOpenAI, choice: object) -> None:
    body = {"model": "demo", "messages": [SYSTEM], "tools": TOOLS, "tool_choice": choice}
    whole = await client.chat.completions.create(**body)  # type: ignore[call-overload]
    call = whole.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "text"})
    assert whole.choices[0].finish_reason == "tool_calls"
    stream = await client.chat.completions.create(**body, stream=True)  # type: ignore[call-overload]
    deltas = [chunk.choices[0].delta async for chunk in stream]
    calls = [delta.tool_calls[0] for delta in deltas if delta.tool_calls]
    assert [call.function.name for call in calls if call.function.name] == ["weather"]
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "text"}


async def test_tools_are_part_of_the_prompt(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(model="demo", messages=[SYSTEM], max_tokens=1)
    tools = await client.chat.completions.create(model="demo", messages=[SYSTEM], max_tokens=1, tools=TOOLS)  # type: ignore[arg-type]
    assert plain.usage is not None
    assert tools.usage is not None
    assert tools.usage.prompt_tokens > plain.usage.prompt_tokens
    assert tools.choices[0].message.content


async def test_errors_reach_the_client_as_such(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=[SYSTEM])
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="demo", messages=[])


async def test_models_name_adapters_with_their_base(client: openai.AsyncOpenAI) -> None:
    models = {model.id: model async for model in client.models.list()}
    assert list(models) == ["demo", "lora"]
    assert models["lora"].model_dump()["parent"] == "demo"


# --------------------------------------------------------------------------- pages


async def test_pages_a_gateway_probes(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    assert (await http.get("/health")).status_code == 200
    assert (await http.get("/version")).json() == {"version": "0.32.0"}
    source = (await http.get("/kv_event_sources")).json()["0"]
    assert worker.events_endpoint == source["endpoint"].replace("*", "127.0.0.1")
    assert worker.replay_endpoint == source["replay_endpoint"].replace("*", "127.0.0.1")
    await http.post("/v1/completions", json={"prompt": [3] * 100, "max_tokens": 4})
    await http.post("/v1/completions", json={"prompt": [3] * 100, "max_tokens": 4})
    text = (await http.get("/metrics")).text
    assert 'vllm:prefix_cache_queries_total{engine="0",model_name="demo"} 200.0' in text
    assert 'vllm:prefix_cache_hits_total{engine="0",model_name="demo"} 96.0' in text
    assert 'vllm:num_requests_running{engine="0",model_name="demo"} 0.0' in text
    assert 'block_size="16"' in text
    assert 'num_gpu_blocks="1750"' in text
    assert (await http.get("/nothing")).status_code == 404
    assert (await http.get("/v1/completions")).status_code == 405


async def test_tokenize_agrees_with_returned_token_ids(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "messages": [SYSTEM], "max_tokens": 3, "return_token_ids": True}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    tokens = (await http.post("/tokenize", json={"messages": [SYSTEM]})).json()
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert tokens["count"] == len(tokens["tokens"])
    assert len(answer["choices"][0]["token_ids"]) == 3
    said = (await http.post("/detokenize", json={"tokens": answer["choices"][0]["token_ids"]})).json()
    assert said["prompt"] == answer["choices"][0]["message"]["content"]


async def test_salt_and_adapter_never_share_blocks(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "prompt": [7] * 64, "max_tokens": 1}
    cached = []
    for change in ({}, {"cache_salt": "a"}, {"model": "lora"}, {}, {"cache_salt": "a"}, {"model": "lora"}):
        answer = await http.post("/v1/completions", json=body | change)
        cached.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 0, 48, 48, 48]


async def test_reset_prefix_cache(http: httpx.AsyncClient) -> None:
    body = {"prompt": [7] * 64, "max_tokens": 1}
    await http.post("/v1/completions", json=body)
    assert (await http.post("/reset_prefix_cache")).json() == {"success": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_the_received_body_can_be_inspected_byte_for_byte(http: httpx.AsyncClient) -> None:
    raw = b'{"prompt" : [1,2,3],  "max_tokens":1, "max_tokens":2, "x": 12345678901234567890123}'
    answer = await http.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert (await http.get("/sim/body")).content == raw
    state = (await http.get("/sim/state")).json()
    assert (state["received"], state["last_body_sha256"]) == (1, hashlib.sha256(raw).hexdigest())


async def test_requests_with_expect_and_chunked_bodies(worker: SimulatedWorker) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(worker.url.rpartition(":")[2]))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    body = b'{"prompt":[1,2,3],"max_tokens":2}'
    for part in (body[:9], body[9:]):
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
    # A second request sent ahead on the connection waits for its turn.
    writer.write(b"0\r\n\r\nGET /version HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    rest = await reader.readuntil(b'{"version":"0.32.0"}')
    assert b'"completion_tokens":2' in rest
    writer.close()
    await writer.wait_closed()


# --------------------------------------------------------------------------- clients that leave, load


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_aborted_within_a_second(stream: bool) -> None:
    worker = SimulatedWorker(replace(SETTINGS, speed=1.0), wall_clock=time.time, speech=SPEECH)
    await worker.start()
    body = json.dumps({"prompt": [9] * 64, "max_tokens": 5000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", int(worker.url.rpartition(":")[2]))
    writer.write(head + body)
    await until(lambda: worker.state()["running"] == 1)
    writer.close()
    took_s = await until(lambda: worker.aborted == 1)
    assert took_s < 1.0
    state = worker.state()
    assert (state["running"], state["waiting"], state["in_use_blocks"]) == (0, 0, 0)
    await worker.stop()


async def test_a_thousand_requests_at_once(worker: SimulatedWorker) -> None:
    port = int(worker.url.rpartition(":")[2])

    async def ask(number: int) -> bytes:
        body = {"prompt": [number % 50] * 32, "max_tokens": 3, "stream": number % 2 == 0}
        raw = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    answers = await asyncio.gather(*(ask(number) for number in range(1000)))
    assert all(answer.startswith(b"HTTP/1.1 200 OK") for answer in answers)
    assert all(answer.count(b"data: ") == 4 for answer in answers[::2])
    state = worker.state()
    assert (state["finished"], state["running"], state["aborted"], state["in_use_blocks"]) == (1000, 0, 0, 0)


# --------------------------------------------------------------------------- faults


async def fault(http: httpx.AsyncClient, fault: Fault) -> None:
    body = {"kind": fault.kind, "times": fault.times, "after": fault.after, "code": fault.code, "count": fault.count}
    assert (await http.post("/sim/fault", json=body)).status_code == 200


STREAM = {"prompt": [4] * 20, "max_tokens": 6, "stream": True}


async def test_a_status_fault_answers_so_and_is_used_up(http: httpx.AsyncClient) -> None:
    await fault(http, Fault(FaultKind.STATUS, times=1, code=503))
    refused = await http.post("/v1/completions", json=STREAM)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, 503)
    assert (await http.post("/v1/completions", json=STREAM)).status_code == 200


async def test_a_reset_fault_drops_the_connection_unanswered(http: httpx.AsyncClient) -> None:
    await fault(http, Fault(FaultKind.RESET, times=1))
    with pytest.raises(httpx.RemoteProtocolError):
        await http.post("/v1/completions", json=STREAM)


async def test_a_cut_fault_ends_a_stream_in_the_middle(http: httpx.AsyncClient, worker: SimulatedWorker) -> None:
    await fault(http, Fault(FaultKind.CUT, times=1, after=3))
    seen = []
    with pytest.raises(httpx.RemoteProtocolError):
        async with http.stream("POST", "/v1/completions", json=STREAM) as answer:
            seen = [line async for line in answer.aiter_lines()]
    assert seen == []  # the error came out of the comprehension
    assert worker.state()["running"] == 0


async def test_a_garbled_line_is_followed_by_the_rest(http: httpx.AsyncClient) -> None:
    await fault(http, Fault(FaultKind.GARBLE, times=1, after=2))
    lines = [line for line in (await http.post("/v1/completions", json=STREAM)).text.splitlines() if line]
    assert lines[2] == 'data: {"id": "chatcmpl-'
    assert len(lines) == 6 + 1 + 1
    assert lines[-1] == "data: [DONE]"


@pytest.mark.parametrize("kind", [FaultKind.STALL, FaultKind.FREEZE])
async def test_a_silent_worker_stays_healthy_and_counts_the_client_that_leaves(
    http: httpx.AsyncClient, worker: SimulatedWorker, kind: FaultKind
) -> None:
    await fault(http, Fault(kind, times=1, after=2))
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/v1/completions", json=STREAM, timeout=httpx.Timeout(30, read=0.5))
    await until(lambda: worker.aborted == 1)
    assert (await http.get("/health")).status_code == 200


async def test_unknown_faults_are_refused(http: httpx.AsyncClient) -> None:
    assert (await http.post("/sim/fault", json={"kind": "meteor"})).status_code == 400
