"""What the tests of the index's truth have in common: prompts of whole blocks, and what gateway and engines say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import pytest

from gateway.records import Slot, Tier, WorkerId
from gateway.sim.releases import Dialect
from gateway.sim.server import SimulatedWorker, Speech
from gateway.upstream.load_text import read_series
from tests.integration.publisher import Engine, engine
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until

BLOCK = 16

DIALECTS = pytest.mark.parametrize("dialect", list(Dialect))

COMPLETIONS = "/v1/completions"


class Answered(NamedTuple):
    """One request's worker, and the tokens predicted and delivered."""

    worker: str
    predicted: int
    delivered: int


def prompt(seed: int, blocks: int, *, after: list[int] | None = None) -> list[int]:
    """Random token ids: `blocks` whole blocks behind `after`, and no token more."""
    chance = Random(seed)
    return (after or []) + [chance.randrange(300, 4000) for _ in range(blocks * BLOCK)]


def body(tokens: list[int], **more: Any) -> dict[str, Any]:
    """A completion of these tokens and three more, so that every block of them is usable."""
    return {"model": "demo", "prompt": [*tokens, 7, 8, 9], "max_tokens": 1, **more}


async def ask(r: Rig, tokens: list[int], **more: Any) -> Answered:
    """Send a prompt through the gateway."""
    answer = await r.http.post(COMPLETIONS, json=body(tokens, **more))
    assert answer.status_code == 200, answer.text
    cached = (answer.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answered(answer.headers["x-kvgate-worker"], int(answer.headers["x-kvgate-predicted-tokens"]), cached)


async def warm(r: Rig, engine: SimulatedWorker, tokens: list[int], **more: Any) -> None:
    """Send a prompt past the gateway: only events can tell of it."""
    # A connection of its own: an engine that restarts drops those that are kept.
    answer = await r.http.post(engine.url + COMPLETIONS, json=body(tokens, **more), headers={"connection": "close"})
    assert answer.status_code == 200, answer.text


async def predicted(r: Rig, tokens: list[int], **more: Any) -> dict[str, int]:
    """What each worker is believed to hold of a prompt, in tokens."""
    url = f"{r.ports.admin_url}/admin/explain?path={COMPLETIONS}"
    answer = await r.http.post(url, json=body(tokens, **more))
    assert answer.status_code == 200, answer.text
    return {row["worker"]: row["overlap_tokens"] for row in answer.json()["candidates"]}


async def believed(r: Rig, tokens: list[int], expected: dict[str, int]) -> None:
    """Wait until `predicted` says so."""
    async with asyncio.timeout(PATIENCE_S):
        while await predicted(r, tokens) != expected:  # noqa: ASYNC110  the gateway is asked
            await asyncio.sleep(0.01)


async def metric(r: Rig, name: str, **labels: str) -> float:
    """Sum of the samples with these labels; 0 when there is none."""
    text = (await r.http.get(r.ports.admin_url + "/metrics")).content
    return sum(s.value for s in read_series(text, name) if labels.items() <= s.labels.items())


def resident(r: Rig, name: str, tier: Tier = Tier.GPU) -> int:
    """Blocks the index knows of a worker."""
    return r.gateway.index.resident(slot(r, name), tier)


def slot(r: Rig, name: str) -> Slot:
    """The worker's slot."""
    return r.gateway.fleet.workers[WorkerId(name)].slot


def caught_up(r: Rig) -> bool:
    """No feed has anything to do."""
    return all(member.caught_up for member in r.gateway.membership.members.values())


async def in_step(r: Rig, *names: str) -> None:
    """Wait until the index has as many blocks of each engine as the engine itself."""
    engines = [e for e in r.engines if not names or e.settings.name in names]
    await until(
        lambda: caught_up(r) and all(resident(r, e.settings.name) == e.state()["resident_blocks"] for e in engines)
    )


class Told(NamedTuple):
    """A gateway whose workers' events are told by the test: publishers in order of the workers w1, w2, ..."""

    rig: Rig
    events: list[Engine]


@asynccontextmanager
async def told(
    workers: int = 1,
    *,
    layout: str = "new",
    history: Sequence[bytes] = (),
    wait: bool = True,
    settings: dict[str, Any] | None = None,
) -> AsyncIterator[Told]:
    """Workers that answer and are silent otherwise; publishers speak for them. `history` are payloads each published
    before the gateway began."""
    model = fast(events=False)
    speech = Speech.load(model.tokenizer)
    async with AsyncExitStack() as stack:
        publishers, specs = [], []
        for number in range(1, workers + 1):
            worker = SimulatedWorker(fast(events=False, name=f"w{number}"), wall_clock=time.time, speech=speech)
            await worker.start()
            stack.push_async_callback(worker.stop)
            publisher = stack.enter_context(engine(layout=layout))
            publisher.buffer.extend(enumerate(history))
            publisher.seq = len(history)
            source = publisher.source()
            publishers.append(publisher)
            specs.append(
                {
                    "url": worker.url,
                    "name": worker.settings.name,
                    "kv_events": source.endpoint,
                    "kv_replay": source.replay_endpoint or "off",
                }
            )
        made = await stack.enter_async_context(rig(0, settings={"workers": specs} | (settings or {}), wait=wait))
        for publisher in publishers:
            await publisher.subscriber()
        yield Told(made, publishers)


def stored(
    names: list[int], tokens: list[int], parent: int | None = None, *, size: int = BLOCK, **more: Any
) -> dict[str, Any]:
    """An event of vLLM 0.24 and later: `names` stand for the blocks of `tokens`."""
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(names),
    } | more


def removed(*names: int, medium: str = "GPU", **more: Any) -> dict[str, Any]:
    """The removal of blocks from one medium."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium} | more
