"""Asking one worker everything the checks judge. All I/O with workers is here and in `sockets`.

Rules:
1. Every step has its own limit and the worker a deadline over all; what was asked until then is judged.
2. Test prompts are token ids nobody used before, some hundred tokens, `max_tokens` 1: three a worker, and one for each
   further rank that can be named. The subscriptions stand before the first is sent, so that no event can be missed.
3. Nothing of answers is kept beyond what `checks.Seen` names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from random import Random

import msgspec
import zmq.asyncio

from gateway import findings as table
from gateway.doctor.checks import FeedSeen, Heard, LoadSeen, Reach, Seen, Tried, outside
from gateway.doctor.sockets import Subscription, load_reach, replay_reach, subscribed
from gateway.errors import UNREADABLE
from gateway.kv.events import KvBatch, MalformedMessage, Stored, decode_batch
from gateway.prefix import PromptHasher
from gateway.records import EventSource, Finding, LoadEndpoint, WorkerFacts, WorkerSpec
from gateway.upstream.control import Answer, ControlClient, ProbeFailed
from gateway.upstream.discovery import probe
from gateway.upstream.parity import token_differences
from gateway.upstream.ranks import RANK_HEADER

_LEAST_TOKENS = 200
"""Of a test prompt: some blocks, whatever the worker says its block size is."""
_TOKEN_IDS = (5, 250)
"""Ids of test prompts: every vocabulary has them."""
_SUBSCRIBED_S = 0.1
"""A subscription is in force once the publisher has read it, a moment after the handshake."""
_SALT_S = 1.0
"""The salted prompt comes last; its events follow those of the first this soon."""
_PROBLEM_CHARS = 200
_HEARD_ENOUGH = 4096
"""Messages looked through for the test prompt before a feed counts as silent."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with each worker. `prompt` are random token ids, the same for all workers of a run, and `salt` a
    random word; without `send_prompts` no prompt is sent. `models_known`: the caller knows the gateway's tokenizers, so
    that a missing one is the gateway's and not just ours."""

    prompt: tuple[int, ...]
    salt: str
    send_prompts: bool = True
    models_known: bool = False
    deadline_s: float = 30.0
    reach_s: float = 3.0
    listen_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Tools:
    """What asking needs of the process. `hasher_of` makes the gateway's tokenizer for a worker's model ready; None
    when token ids are not to be compared. `wall` gives Unix seconds."""

    client: ControlClient
    context: zmq.asyncio.Context
    hasher_of: Callable[[WorkerSpec, WorkerFacts], Awaitable[PromptHasher | None]] | None
    wall: Callable[[], float]


def new_prompt(rng: Random) -> tuple[int, ...]:
    """Token ids for `Plan.prompt`: enough for twice the largest block in use, and one."""
    return tuple(rng.randrange(*_TOKEN_IDS) for _ in range(2 * 1024 + 1))


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Completed(msgspec.Struct):
    usage: _Usage | None = None


class Examination:
    """One worker being asked; `seen` grows step by step."""

    def __init__(self, spec: WorkerSpec, tools: Tools, plan: Plan, on_step: Callable[[str], None]) -> None:
        self.seen = Seen(spec)
        self._tools = tools
        self._plan = plan
        self._on_step = on_step
        self._step = ""

    async def run(self) -> Seen:
        """Ask until everything is known or the deadline passes; never raises for what the worker does."""
        try:
            async with asyncio.timeout(self._plan.deadline_s):
                await self._run()
        except ProbeFailed as error:
            self._say(table.UNREACHABLE.found(problem=error.message))
        except TimeoutError:
            self._say(table.UNFINISHED.found(deadline_s=self._plan.deadline_s, step=self._step))
        return self.seen

    async def _run(self) -> None:
        spec, tools = self.seen.spec, self._tools
        self._begin("asking what it is")
        asked_at = tools.wall()
        answer = await tools.client.get(f"{spec.url}/v1/models", api_key=spec.api_key)
        skew_s = _date_skew(answer.date, (asked_at, tools.wall()))
        if answer.status in (401, 403):
            key = "an API key" if spec.api_key is None else "another API key than the one given"
            self._say(table.NEEDS_KEY.found(status=answer.status, key=key))
            return
        facts = await probe(spec, tools.client)
        self.seen = replace(self.seen, facts=facts, skew_s=skew_s)
        self._begin("comparing token ids")
        await self._compare_tokens(facts)
        async with AsyncExitStack() as stack:
            feeds = [
                await stack.enter_async_context(subscribed(tools.context, source.endpoint, source.topic))
                for source in facts.events
            ]
            self._begin("connecting to its events")
            reached, loads = await asyncio.gather(
                asyncio.gather(*map(self._reach, facts.events, feeds)), asyncio.gather(*map(self._hear, facts.loads))
            )
            self.seen = replace(self.seen, feeds=tuple(reached), loads=tuple(loads))
            if self._plan.send_prompts:
                await asyncio.sleep(_SUBSCRIBED_S)
                await self._try(facts, feeds)

    def _begin(self, step: str) -> None:
        self._step = step
        self._on_step(step)

    def _say(self, finding: Finding) -> None:
        self.seen = replace(self.seen, said=(*self.seen.said, finding))

    # ------------------------------------------------------------------ token ids

    async def _compare_tokens(self, facts: WorkerFacts) -> None:
        spec, tools = self.seen.spec, self._tools
        if tools.hasher_of is None:
            return
        hasher = await tools.hasher_of(spec, facts)
        model = next(iter(spec.models or facts.models), "")
        if hasher is None or (hasher.tokenizer is None and not self._plan.models_known):
            self._say(table.TOKENS_UNCHECKED.found(reason=f"no tokenizer for model {model} was given"))
            return
        try:
            for finding in await token_differences(spec, model, hasher, tools.client):
                self._say(finding)
        except ProbeFailed as error:
            self._say(table.TOKENS_UNCHECKED.found(reason=error.message))

    # ------------------------------------------------------------------ events

    async def _reach(self, source: EventSource, feed: Subscription) -> FeedSeen:
        within_s, context = self._plan.reach_s, self._tools.context
        if source.replay_endpoint is None:
            return FeedSeen(source, await feed.reach(within_s), None)
        events, answers = await asyncio.gather(
            feed.reach(within_s), replay_reach(context, source.replay_endpoint, within_s)
        )
        return FeedSeen(source, events, answers)

    async def _hear(self, source: LoadEndpoint) -> LoadSeen:
        plan = self._plan
        reach = await load_reach(self._tools.context, source, reach_s=plan.reach_s, listen_s=plan.listen_s)
        return LoadSeen(source, reach)

    async def _try(self, facts: WorkerFacts, feeds: Sequence[Subscription]) -> None:
        plan, tools = self._plan, self._tools
        prompt = list(plan.prompt[: _prompt_tokens(facts)])
        self._begin("sending test prompts")
        began = tools.wall()
        self.seen = replace(self.seen, tried=await self._send(facts, prompt))
        if self.seen.tried is None or self.seen.tried.status != 200:
            return
        self._begin("waiting for events")
        heard = await asyncio.gather(
            *(
                self._listen(feed, prompt, began) if seen.events is Reach.OPEN else _nothing()
                for feed, seen in zip(feeds, self.seen.feeds, strict=True)
            )
        )
        told = tuple(replace(seen, heard=one) for seen, one in zip(self.seen.feeds, heard, strict=True))
        self.seen = replace(self.seen, feeds=told, listened_s=plan.listen_s)

    async def _send(self, facts: WorkerFacts, prompt: list[int]) -> Tried:
        spec, client = self.seen.spec, self._tools.client
        model = next(iter(spec.models or facts.models), "")
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}

        async def ask(more: dict[str, object], *, rank: int = 0) -> Answer:
            raw = msgspec.json.encode(body | more)
            named = {RANK_HEADER: str(rank)} if facts.rank_routing else {}
            return await client.post(f"{spec.url}/v1/completions", raw, api_key=spec.api_key, headers=named)

        cached: list[int | None] = []
        for _ in range(2):
            answer = await ask({})
            if answer.status != 200:
                return Tried(len(prompt), status=answer.status, problem=_text(answer))
            cached.append(_cached_tokens(answer))
        for rank in range(1, len(facts.ranks) if facts.rank_routing else 1):
            await ask({}, rank=rank)
        # An engine that knows no salts may refuse the field: then there is nothing to say about them.
        salted = await ask({"cache_salt": self._plan.salt})
        first, second = cached
        return Tried(len(prompt), first, second, _cached_tokens(salted) if salted.status == 200 else None)

    async def _listen(self, feed: Subscription, prompt: list[int], began: float) -> Heard:
        """Until the events of both test prompts have come, or the time is over."""
        heard, tools = Heard(), self._tools
        loop = asyncio.get_running_loop()
        until = loop.time() + self._plan.listen_s
        salt = self._plan.salt.encode()
        for _ in range(_HEARD_ENOUGH):
            payload = await feed.next(max(0.0, until - loop.time()))
            if payload is None:
                break
            heard = _hear(heard, payload, prompt, salt, (began, tools.wall()))
            if heard.hashes:
                until = min(until, loop.time() + _SALT_S)
                if heard.salt_shown:
                    break
        return heard


def _hear(heard: Heard, payload: bytes, prompt: list[int], salt: bytes, window: tuple[float, float]) -> Heard:
    """What one message adds."""
    heard = replace(heard, batches=heard.batches + 1, salt_shown=heard.salt_shown or salt in payload)
    try:
        batch = decode_batch(payload)
    except MalformedMessage:
        return heard
    if not isinstance(batch, KvBatch):
        return heard
    for event in batch.events:
        if not isinstance(event, Stored) or event.parent is not None or event.salt or event.block_size < 1:
            continue
        if event.tokens and event.tokens[: event.block_size] == prompt[: event.block_size]:
            heard = replace(
                heard,
                hashes=heard.hashes | {int(event.hashes[0])} if event.hashes else heard.hashes,
                block_sizes=heard.block_sizes | {event.block_size},
                skew_s=outside(batch.ts, batch.ts, window=window),
            )
    return heard


async def _nothing() -> None:
    """Stands for a feed that cannot be listened to."""


def _prompt_tokens(facts: WorkerFacts) -> int:
    wanted = max(_LEAST_TOKENS, 2 * (facts.block_size or 0) + 1)
    return min(wanted, facts.max_model_len - 1) if facts.max_model_len else wanted


def _cached_tokens(answer: Answer) -> int | None:
    try:
        usage = msgspec.json.decode(answer.body, type=_Completed).usage
    except UNREADABLE:
        return None
    details = usage.prompt_tokens_details if usage is not None else None
    return details.cached_tokens if details is not None else None


def _text(answer: Answer) -> str:
    return " ".join(answer.body.decode("utf-8", "replace").split())[:_PROBLEM_CHARS]


def _date_skew(date: str | None, window: tuple[float, float]) -> float | None:
    """An HTTP date is the second's beginning."""
    if date is None:
        return None
    try:
        said = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    return outside(said, said + 1.0, window=window)
