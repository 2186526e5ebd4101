"""Models that are tokenised by their workers: exact from the second turn on, and never waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway import keys
from gateway.api import parse_request
from gateway.config import ConfigError, load
from gateway.prefix import KnownPrompts, PromptHasher
from gateway.records import Endpoint, EngineKind, InferenceRequest, PrefixMode, WorkerId, WorkerSpec
from gateway.sim.http_server import HttpRequest, HttpServer, Reply
from gateway.upstream.control import open_control_client
from gateway.upstream.tokenizing import EngineTokenizing, TokenizingSettings, Untold
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until
from tests.integration.test_approximate import announcing, explain, turns
from tests.integration.test_gateway import cached

AT_WORKER: dict[str, Any] = {"models": [{"name": "demo", "tokenize_at": "worker"}]}
BLOCK = 16


def told(r: Rig, count: int) -> bool:
    return r.gateway.tokenizing.results["told"] >= count


async def told_and_announced(r: Rig, count: int) -> None:
    await until(partial(told, r, count))
    await until(partial(announcing, r))


async def test_tokens_come_from_the_worker_and_overlaps_from_its_events() -> None:
    async with rig(3, settings=AT_WORKER) as r:
        first, predicted, _ = await cached(r, turns("one?"))
        assert predicted == 0
        await told_and_announced(r, 1)
        questions = ["one?"]
        for number, question in enumerate(("And which pump?", "And which tyre?", "And which lock?"), 2):
            questions.append(question)
            worker, predicted, delivered = await cached(r, turns(*questions))
            assert worker == first
            # The turn before is known token by token; its answer, which the engine has cached too, is not.
            assert 0.85 * delivered < predicted <= delivered
            await told_and_announced(r, number)
        decision = (await r.admin("/admin/decisions?limit=1"))["decisions"][0]
        assert (decision["mode"], decision["reason"]) == ("engine", None)


async def test_an_eviction_is_seen_although_the_tokens_are_told() -> None:
    """What text learned from routing could not know."""
    async with rig(1, settings=AT_WORKER) as r:
        await cached(r, turns("one?"))
        await told_and_announced(r, 1)
        assert (await explain(r, turns("one?", "two?"), "/v1/chat/completions"))["predicted_tokens"] > 200
        assert (await r.http.post(r.engines[0].url + "/reset_prefix_cache")).status_code == 200
        r.gateway.router.expire(r.gateway.clock() + 10.0)  # promises of the first turn have ended
        await cached(r, {"model": "demo", "prompt": [7] * 64, "max_tokens": 1}, "/v1/completions")  # sends the event
        async with asyncio.timeout(PATIENCE_S):
            while (await explain(r, turns("one?", "two?"), "/v1/chat/completions"))["predicted_tokens"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def test_a_worker_without_events_is_learned_by_text_meanwhile() -> None:
    async with rig(2, engine=fast(events=False), settings=AT_WORKER) as r:
        first, _, _ = await cached(r, turns("one?"))
        await until(partial(told, r, 1))
        worker, predicted, delivered = await cached(r, turns("one?", "two?"))
        assert worker == first
        assert 0.6 * delivered < predicted < 1.1 * delivered


async def test_siblings_of_a_new_prompt_stay_together_before_anything_is_told() -> None:
    async with rig(3, engine=fast(speed=1.0), settings=AT_WORKER) as r:
        answers = await asyncio.gather(*(cached(r, turns(f"{number}?")) for number in range(4)))
        assert max(predicted for _, predicted, _ in answers) > 100


async def test_salts_stay_apart() -> None:
    async with rig(1, settings=AT_WORKER) as r:
        await cached(r, turns("one?", cache_salt="a"))
        await told_and_announced(r, 1)
        assert (await cached(r, turns("one?", cache_salt="b")))[1:] == (0, 0)
        _, predicted, delivered = await cached(r, turns("one?", cache_salt="a"))
        assert predicted > 200 < delivered


async def test_a_silent_tokeniser_holds_nobody_up_and_prompts_go_by_their_text() -> None:
    async with serving({"/v1/chat/completions/render": None}) as url:
        settings = {"models": [{"name": "demo", "tokenize_at": url}]}
        async with rig(1, settings=settings) as r:
            for number in range(5):
                await cached(r, turns(f"{number}?"))
            await until(lambda: r.gateway.tokenizing.results["failed"] >= 3)
            _, predicted, delivered = await cached(r, turns("9?"))
            _, predicted, delivered = await cached(r, turns("9?", "two?"))
            decision = (await r.admin("/admin/decisions?limit=1"))["decisions"][0]
            assert decision["mode"] == "approximate"
            assert 0.6 * delivered < predicted < 1.1 * delivered


# --------------------------------------------------------------------------- the shell alone


@asynccontextmanager
async def serving(pages: dict[str, object], *, asked: list[tuple[str, Any]] | None = None) -> AsyncIterator[str]:
    """A server that answers these paths: a value as JSON, a number as that status, None never."""

    def handle(request: HttpRequest, reply: Reply) -> None:
        if asked is not None:
            asked.append((request.path, msgspec.json.decode(request.body)))
        page = pages.get(request.path, 404)
        if type(page) is int:
            reply.send(page, b"{}")
        elif page is not None:
            reply.send(200, msgspec.json.encode(page))

    server = HttpServer(handle)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await server.stop()


def question(number: int = 0, **fields: Any) -> InferenceRequest:
    messages = [{"role": "user", "content": f"{number} " + "word " * 200}]
    return parse_request(
        Endpoint.CHAT, msgspec.json.encode({"model": "m", "messages": messages, **fields}), request_id="r"
    )


def untold(known: KnownPrompts, request: InferenceRequest) -> Untold:
    blocks = PromptHasher(None, known=known).begin(request, block_size=BLOCK).blocks()
    assert blocks.mode is PrefixMode.ENGINE
    assert blocks.text is not None
    return Untold(request, blocks.text, known, None, BLOCK)


def spec(url: str) -> WorkerSpec:
    return WorkerSpec(WorkerId("w1"), url, EngineKind.VLLM)


@asynccontextmanager
async def asker(**settings: Any) -> AsyncIterator[EngineTokenizing]:
    async with open_control_client() as control:
        made = EngineTokenizing(control, time.monotonic, TokenizingSettings(**settings))
        task = asyncio.create_task(made.run())
        yield made
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_render_server_is_asked_with_all_that_decides_the_tokens() -> None:
    asked: list[tuple[str, Any]] = []
    ids = list(range(300))
    pages: dict[str, object] = {"/v1/chat/completions/render": {"token_ids": ids, "features": None}}
    async with serving(pages, asked=asked) as url, asker() as tokenizing:
        known = KnownPrompts(server=url)
        tools = [{"type": "function", "function": {"name": "f"}}]
        request = question(tools=tools, reasoning_effort="low", cache_salt="s")
        tokenizing.ask(untold(known, request), spec("http://127.0.0.1:1"))
        await until(lambda: tokenizing.results["told"] == 1)
        blocks = PromptHasher(None, known=known).begin(request, block_size=BLOCK).blocks()
        expected = keys.chain(keys.namespace(None, "s"), ids, BLOCK)
        assert list(blocks.chains[0].keys) == expected
    ((path, body),) = asked
    assert path == "/v1/chat/completions/render"
    assert (body["tools"], body["reasoning_effort"], body["model"]) == (tools, "low", "m")
    assert body["messages"] == question().prompt.messages  # type: ignore[union-attr]


async def test_completions_are_rendered_too() -> None:
    async with serving({"/v1/completions/render": [{"token_ids": list(range(200))}]}) as url, asker() as tokenizing:
        known = KnownPrompts()
        body = msgspec.json.encode({"model": "m", "prompt": "word " * 300})
        request = parse_request(Endpoint.COMPLETIONS, body, request_id="r")
        tokenizing.ask(untold(known, request), spec(url))
        await until(lambda: tokenizing.results["told"] == 1)
        blocks = PromptHasher(None, known=known).begin(request, block_size=BLOCK).blocks()
        assert len(blocks.chains[0].keys) == 12


async def test_tokenise_is_asked_where_nothing_renders_and_only_for_what_it_knows() -> None:
    asked: list[tuple[str, Any]] = []
    pages: dict[str, object] = {"/tokenize": {"tokens": list(range(300)), "count": 300}}
    async with serving(pages, asked=asked) as url, asker() as tokenizing:
        known = KnownPrompts()
        for number in range(2):
            tokenizing.ask(untold(known, question(number)), spec(url))
        await until(lambda: tokenizing.results["told"] == 2)
        tokenizing.ask(untold(known, question(3, reasoning_effort="high")), spec(url))
        await until(lambda: tokenizing.results["skipped"] == 1)
    # What a server has not is asked for once.
    assert [path for path, _ in asked] == ["/v1/chat/completions/render", "/tokenize", "/tokenize"]


@pytest.mark.parametrize(
    "page", [500, 200, None, {"tokens": "x"}, {"tokens": [-1] * 64}, {"tokens": None}, [1]], ids=str
)
async def test_bad_answers_teach_nothing_and_leave_the_server_alone(page: object) -> None:
    pages = {"/tokenize": page, "/v1/chat/completions/render": 404}
    async with serving(pages) as url, asker(timeout_s=0.1) as tokenizing:
        known = KnownPrompts()
        for number in range(3):
            tokenizing.ask(untold(known, question(number)), spec(url))
        await until(lambda: tokenizing.results["failed"] == 3)
        assert not known.usable
        assert known.stats().entries == 0
        # Prompts go by their text now, and the server is not asked for a while.
        text = PromptHasher(None, known=known).begin(question(9), block_size=BLOCK).blocks()
        assert text.mode is PrefixMode.APPROXIMATE
        tokenizing.ask(Untold(question(9), text, known, None, BLOCK), spec(url))
        await until(lambda: tokenizing.results["skipped"] == 1)


async def test_a_server_that_answers_again_is_used_again() -> None:
    pages: dict[str, object] = {"/tokenize": 500}
    async with serving(pages) as url, asker() as tokenizing:
        known = KnownPrompts()
        waiting = [untold(known, question(number)) for number in range(4)]
        for each in waiting[:3]:
            tokenizing.ask(each, spec(url))
        await until(lambda: not known.usable)
        pages["/tokenize"] = {"tokens": list(range(300))}
        now = time.monotonic()
        tokenizing.clock = lambda: now + 11.0
        tokenizing.ask(waiting[3], spec(url))
        await until(lambda: known.usable)
        assert tokenizing.results["told"] == 1


async def test_a_prompt_that_no_utf8_can_hold_is_skipped_and_ends_no_task() -> None:
    """JSON lets a client write half of a pair of surrogates; no engine can cut that either."""
    asked: list[tuple[str, Any]] = []
    async with serving({"/tokenize": {"tokens": list(range(300))}}, asked=asked) as url, asker() as tokenizing:
        known = KnownPrompts()
        body = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800 ' + b"word " * 200 + b'"}]}'
        half = parse_request(Endpoint.CHAT, body, request_id="r")
        tokenizing.ask(untold(known, half), spec(url))
        tokenizing.ask(untold(known, question(1)), spec(url))
        await until(lambda: tokenizing.results["told"] == 1)
        assert tokenizing.results["skipped"] == 1
        assert known.usable
    assert len(asked) == 2


async def test_the_queue_is_bounded_and_the_newest_stay() -> None:
    async with open_control_client() as control:
        tokenizing = EngineTokenizing(control, time.monotonic, TokenizingSettings(queue_size=3))
        known = KnownPrompts()
        for number in range(10):
            tokenizing.ask(untold(known, question(number)), spec("http://127.0.0.1:1"))
        assert tokenizing.results == {"pushed_out": 7}


def test_a_tokenizer_and_an_engine_exclude_each_other() -> None:
    for entry, said in (
        ({"name": "m", "tokenize_at": "worker", "tokenizer": "/models/m"}, "leave one of them out"),
        ({"name": "m", "tokenize_at": "ftp://x"}, "is no worker URL"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(None, overrides={"models": [entry]}, environ={})
    assert load(None, overrides={"models": [{"name": "m", "tokenize_at": "http://r:8"}]}, environ={})
