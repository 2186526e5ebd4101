"""The index against real engines: what their own events say is resident, and what they then really reused.

Three proofs on recorded runs (see `ORIGIN.md` beside the captures):
1. After every batch, the engine hashes the index holds equal a set counted from the raw payloads, also when batches
   were lost on the way and had to be fetched again. Scenarios end in the content that is stated in them.
2. Before each recorded request's own events, the overlap predicted for it equals the cached tokens the engine reported.
   Where it cannot, the test says why, and by how much.
3. Each of the engines' dialects leads to the same: integer and byte hashes, arrays and maps, copies and sets.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from gateway.api import parse_request
from gateway.kv.events import KvBatch, Message, decode_batch, parse_live
from gateway.kv.feed_words import FeedPhase
from gateway.kv.index import KvIndex
from gateway.prefix import PromptHasher
from gateway.records import (
    Endpoint,
    EngineKind,
    InferenceRequest,
    PrefixBlocks,
    PrefixMode,
    Slot,
    Tier,
    TokenPrompt,
)
from tests.following import Follower

HERE = Path(__file__).parent
MODEL_FILES = HERE / "prefix" / "tiny-qwen2"
WORKER = Slot(3)

# The clear of an idle vLLM is published with the next engine step, that is, with the next request's own events: until
# then nothing but our own call of the reset could know. The prediction is what the cache held before, one block less
# than the whole prefix because the load phase had evicted the last one.
LATE_CLEAR: Final = {"chat_after_reset": (352, 0)}

# Releases before 0.17 do not say that a prompt was salted: its blocks look like those of the same prompt without salt.
# The index then never predicts a hit for a salted request, and may predict one too many for the same text unsalted.
HIDDEN_SALT: Final = {"chat_cache_salt_a_repeat": (0, 384)}


class Exchange(NamedTuple):
    name: str
    path: str
    body: dict[str, Any]
    delivered: int | None


def exchanges(capture: str) -> Iterator[Exchange]:
    """Answered requests in order, with the cached tokens the engine reported (None: it did not say)."""
    for line in (HERE / capture / "exchanges.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["status"] == 200 and row["body"] is not None:
            yield Exchange(row["name"], row["path"], row["body"], delivered(row["usage"]))


def delivered(usage: dict[str, Any] | None) -> int | None:
    if usage is None:
        return None
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
    if details is None:
        # vLLM 0.16 leaves the details out when nothing was cached; on the Messages API it never has them.
        return 0 if "prompt_tokens" in usage else None
    return int(details["cached_tokens"])


def recorded_messages(capture: str) -> list[tuple[str, Message]]:
    """Live messages in order, each with the request that was running."""
    rows = [json.loads(line) for line in (HERE / capture / "kv_events.jsonl").read_text().splitlines()]
    return [(row["step"], parse_live([bytes.fromhex(frame) for frame in row["frames"]])) for row in rows]


def messages(capture: str) -> list[tuple[str, bytes]]:
    return [(step, message.payload) for step, message in recorded_messages(capture)]


def apply(index: KvIndex, payload: bytes) -> None:
    batch = decode_batch(payload)
    assert isinstance(batch, KvBatch)
    applied = index.apply(WORKER, 0, batch.events)
    assert applied.orphans == 0
    # Only the SGLang capture began late: its engine had warmed itself up, and removes those blocks later.
    assert applied.ignored.keys() <= {"unknown_removal"}


# ---------------------------------------------------------------- what is resident


def fields(event: Any) -> tuple[str, list[Any]]:
    if isinstance(event, dict):
        return event["type"], event.get("block_hashes", [])
    return event[0], event[1] if len(event) > 1 else []


def folded(value: int | bytes) -> int:
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value % 2**64


class Announced:
    """The engine's content, counted from raw payloads with nothing of the gateway's."""

    def __init__(self, engine: EngineKind) -> None:
        self._counted = engine is not EngineKind.SGLANG
        self._copies: Counter[int] = Counter()

    def take(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            kind, hashes = fields(event)
            if kind == "AllBlocksCleared":
                self._copies.clear()
            for value in map(folded, hashes):
                if kind == "BlockRemoved":
                    self._copies[value] = max(0, self._copies[value] - 1)
                else:
                    self._copies[value] = self._copies[value] + 1 if self._counted else 1

    @property
    def held(self) -> set[int]:
        return {value for value, count in self._copies.items() if count}


CAPTURES = pytest.mark.parametrize(
    ("capture", "block_size", "engine"),
    [
        ("vllm-0.32.0", 32, EngineKind.VLLM),
        ("vllm-0.32.0/kv-bytes-sha256_cbor", 32, EngineKind.VLLM),
        ("vllm-0.16.0", 32, EngineKind.VLLM),
        ("sglang-0.5.23", 16, EngineKind.SGLANG),
    ],
)


@CAPTURES
def test_resident_blocks_after_every_batch(capture: str, block_size: int, engine: EngineKind) -> None:
    index = KvIndex()
    index.bind(WORKER, block_size=block_size, engine=engine)
    announced = Announced(engine)
    seen = 0
    for _, payload in messages(capture):
        announced.take(payload)
        apply(index, payload)
        assert index.engine_hashes(WORKER, 0, Tier.GPU) == announced.held
        seen = max(seen, len(announced.held))
    assert seen > 90


@CAPTURES
@pytest.mark.parametrize("seed", range(5))
def test_resident_blocks_where_batches_were_lost(capture: str, block_size: int, engine: EngineKind, seed: int) -> None:
    """A fifth of the batches is lost on the way, and replies are cut short; the engine has its whole history."""
    chance = Random(seed)
    history = [message for _, message in recorded_messages(capture)]
    # The SGLang engine had published before the capture began: an empty cache, and a warm-up that is of no interest.
    nothing = msgspec.msgpack.encode([1.0, [], 0])
    history = [Message(seq, nothing) for seq in range(history[0].seq)] + history
    index = KvIndex()
    index.bind(WORKER, block_size=block_size, engine=engine)
    follower = Follower(index, WORKER, can_replay=True)
    follower.connect(0.0)
    announced = Announced(engine)
    compared = 0
    for position, (seq, payload) in enumerate(history):
        announced.take(payload)
        now = float(position)
        if chance.random() > 0.2 or position == len(history) - 1:
            follower.live(seq, payload, now)
        follower.tick(now)
        if follower.asked is not None and (chance.random() < 0.7 or position == len(history) - 1):
            replies = history[follower.asked : position + 1]
            follower.answer(replies[: chance.choice([2, None])], now, end=False)
            follower.answer([], now)
        if follower.state.caught_up and follower.state.expected == seq + 1:
            assert index.engine_hashes(WORKER, 0, Tier.GPU) == announced.held
            compared += 1
    now = float(len(history))
    while follower.asked is not None:
        follower.answer(history[follower.asked :], now)
    assert index.engine_hashes(WORKER, 0, Tier.GPU) == announced.held
    assert follower.state.phase is FeedPhase.LIVE
    assert follower.state.counters.purges == {}
    assert compared > 3 or len(history) < 20


# ---------------------------------------------------------------- scenarios


class Scenario(NamedTuple):
    engine: EngineKind
    messages: list[Message]
    resident: list[set[int] | None]
    """After each message; None: not to be known without the missing one."""
    block_size: int


def scenario(name: str) -> Scenario:
    content = json.loads((HERE / "kv_events" / f"{name}.json").read_text())
    told = content["decoded_messages"]
    stored = next(e for row in told for e in row["batch"]["events"] if e["type"] == "BlockStored")
    resident = [None if row["resident_after"] is None else set(map(folded, row["resident_after"])) for row in told]
    live = [parse_live([bytes.fromhex(frame) for frame in frames]) for frames in content["messages_hex"]]
    return Scenario(EngineKind(content["engine"]), live, resident, stored["block_size"])


def follow(case: Scenario, *, can_replay: bool) -> Follower:
    index = KvIndex()
    index.bind(WORKER, block_size=case.block_size, engine=case.engine)
    follower = Follower(index, WORKER, can_replay=can_replay)
    follower.connect(0.0)
    return follower


@pytest.mark.parametrize("can_replay", [True, False])
@pytest.mark.parametrize(
    ("name", "restarts"),
    [("vllm_0.33_scenario_refcount", 0), ("vllm_0.33_scenario_restart", 1), ("sglang_0.5.23_scenario_restart", 1)],
)
def test_scenario_ends_in_the_stated_content(name: str, restarts: int, can_replay: bool) -> None:
    case = scenario(name)
    follower = follow(case, can_replay=can_replay)
    published: list[Message] = []
    for now, (message, resident) in enumerate(zip(case.messages, case.resident, strict=True), start=1):
        if published and message.seq <= published[-1].seq:
            published.clear()
        published.append(message)
        follower.live(message.seq, message.payload, float(now))
        while follower.asked is not None:
            follower.answer(published[follower.asked :], float(now))
        assert resident is not None
        assert set(follower.index.engine_hashes(WORKER, 0, Tier.GPU)) == resident
    assert follower.state.counters.resets == restarts
    assert follower.state.phase is FeedPhase.LIVE


def test_scenario_of_a_gap_without_replay_claims_nothing() -> None:
    case = scenario("vllm_0.33_scenario_gap")
    follower = follow(case, can_replay=False)
    for now, (message, resident) in enumerate(zip(case.messages, case.resident, strict=True), start=1):
        follower.live(message.seq, message.payload, float(now))
        assert follower.index.engine_hashes(WORKER, 0, Tier.GPU) == (resident or set())
    assert follower.state.counters.gaps == 1
    assert follower.state.phase is FeedPhase.LOST


def test_scenario_of_a_gap_is_repaired_by_replay() -> None:
    case = scenario("vllm_0.33_scenario_gap")
    first, clear, last = case.messages
    # What the lost batch was follows from the last one: it stored again what is removed there.
    lost = Message(2, msgspec.msgpack.encode([3.0, *msgspec.msgpack.decode(first.payload)[1:]]))
    follower = follow(case, can_replay=True)
    follower.answer([first], 1.0)
    follower.live(*clear, 2.0)
    follower.live(*last, 4.0)
    assert follower.asked == 2
    follower.answer([lost, last], 4.0)
    assert follower.index.engine_hashes(WORKER, 0, Tier.GPU) == set()
    assert follower.applied is not None
    assert follower.applied.removed == {Tier.GPU: 1}
    assert follower.state.phase is FeedPhase.LIVE


# ---------------------------------------------------------------- what is reused


def blocks_of(hasher: PromptHasher, exchange: Exchange, block_size: int) -> PrefixBlocks | None:
    """The request's blocks as the gateway finds them; None for calls that run no prompt or hide its tokens."""
    if exchange.path == "/inference/v1/generate":
        tokens = exchange.body["token_ids"]
        request = InferenceRequest(Endpoint.COMPLETIONS, "r", "tiny", TokenPrompt((tokens,)))
    elif exchange.path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        request = parse_request(Endpoint(exchange.path), json.dumps(exchange.body).encode(), request_id="r")
    else:
        return None
    work = hasher.begin(request, block_size=block_size)
    if work.pending:
        work.encode()
    blocks = work.blocks()
    return blocks if blocks.mode is PrefixMode.EXACT else None


def predictions(
    capture: str, recorded: list[Exchange], *, engine: EngineKind = EngineKind.VLLM, block_size: int = 32
) -> dict[str, int]:
    """Overlap of each exchange just before its own events, by name."""
    hasher = PromptHasher.load(MODEL_FILES, engine=engine)
    index = KvIndex()
    index.bind(WORKER, block_size=block_size, engine=engine)
    waiting = messages(capture)
    steps = {step for step, _ in waiting}
    names = [exchange.name for exchange in recorded]
    found: dict[str, int] = {}
    for position, exchange in enumerate(recorded):
        # Everything before this request: up to its own first events, or, when it has none, the events of the requests
        # before it.
        earlier = set(names[:position])
        while waiting:
            step = waiting[0][0]
            if step == exchange.name or (exchange.name not in steps and step not in earlier):
                break
            apply(index, waiting.pop(0)[1])
        blocks = blocks_of(hasher, exchange, block_size)
        if blocks is not None:
            found[exchange.name] = index.overlap(blocks, 1 << WORKER).tokens(WORKER)
    return found


@pytest.mark.parametrize(
    ("capture", "known", "compared"),
    [("vllm-0.32.0", LATE_CLEAR, 32), ("vllm-0.16.0", LATE_CLEAR | HIDDEN_SALT, 29)],
)
def test_predicted_equals_delivered(capture: str, known: dict[str, tuple[int, int]], compared: int) -> None:
    recorded = list(exchanges(capture))
    predicted = predictions(capture, recorded)
    told = {exchange.name: exchange.delivered for exchange in recorded if exchange.delivered is not None}
    both = predicted.keys() & told.keys()
    differing = {name: (predicted[name], told[name]) for name in both if predicted[name] != told[name]}
    assert differing == known
    assert len(both) == compared, sorted(both)
    assert sum(told[name] > 0 for name in both) >= 12


def test_predicted_equals_delivered_on_sglang() -> None:
    recorded = list(exchanges("sglang-0.5.23"))
    predicted = predictions("sglang-0.5.23", recorded, engine=EngineKind.SGLANG, block_size=16)
    told = {exchange.name: exchange.delivered for exchange in recorded if exchange.delivered is not None}
    both = predicted.keys() & told.keys()
    assert {name: predicted[name] for name in both} == {name: told[name] for name in both}
    assert len(both) == 29
    assert sum(told[name] > 0 for name in both) >= 12


def test_bytes_hashes_predict_the_same() -> None:
    """The second run asked the same up to the evictions, so the engine reused the same; only its hashes differ."""
    recorded = list(exchanges("vllm-0.32.0"))
    names = [exchange.name for exchange in recorded]
    first, last = names.index("chat_shared_prefix_0"), names.index("chat_session_id")
    same = recorded[first : last + 1]
    predicted = predictions("vllm-0.32.0/kv-bytes-sha256_cbor", same)
    assert predicted == {exchange.name: exchange.delivered for exchange in same}
    assert len(same) >= 10
