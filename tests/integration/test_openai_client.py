"""The official client, against a gateway and simulated engines: what people's programs do works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from gateway.sim.releases import Dialect
from tests.integration.rig import Rig, fast, rig

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather?"}]


@pytest.fixture(params=list(Dialect))
async def r(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with rig(2, engine=fast(dialect=request.param)) as running:
        yield running


@pytest.fixture
async def client(r: Rig) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=r.ports.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=7)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.choices[0].message.content


async def test_stream_without_usage_shows_none(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=7, stream=True)
    chunks = [chunk async for chunk in stream]
    assert all(chunk.choices for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_stream_with_usage_shows_it(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=MESSAGES, max_tokens=7, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


async def test_tools(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=30
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].type == "function"
    assert calls[0].function.name == "get_weather"
    follow_up = [
        *MESSAGES,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
    ]
    final = await client.chat.completions.create(model="demo", messages=follow_up, tools=TOOLS, max_tokens=5)
    assert final.choices[0].message.content


async def test_completions_of_every_prompt_form(client: openai.AsyncOpenAI) -> None:
    forms: list[Any] = ["one text", ["a text", "another text"], [400, 401, 402], [[400, 401], [500, 501, 502]]]
    for prompt in forms:
        answer = await client.completions.create(model="demo", prompt=prompt, max_tokens=3)
        assert len(answer.choices) == (2 if prompt in (forms[1], forms[3]) else 1)
        stream = await client.completions.create(model="demo", prompt=prompt, max_tokens=3, stream=True)
        assert {choice.index async for chunk in stream for choice in chunk.choices} == set(range(len(answer.choices)))


async def test_models_are_merged(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["demo"]


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nope"):
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="messages"):
        await client.chat.completions.create(model="demo", messages=[])
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="demo", messages=MESSAGES, temperature=-1)


async def test_the_synchronous_client(r: Rig) -> None:
    def talk() -> tuple[int, int]:
        with openai.OpenAI(base_url=r.ports.url + "/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4)
            chunks = list(client.chat.completions.create(model="demo", messages=MESSAGES, max_tokens=4, stream=True))
            assert answer.usage is not None
            return answer.usage.completion_tokens, len(chunks)

    tokens, chunks = await asyncio.to_thread(talk)
    assert tokens == 4
    assert chunks >= 2
