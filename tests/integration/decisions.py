"""A long seeded life of routers, written line by line: what is compiled must decide as its source does.

    python -m tests.integration.decisions [--steps N]

Workers of both engines join and leave, announce, evict, fail and tell their load; requests of every kind of prompt are
routed, moved, doubled and settled with what workers may say of them, numbers beyond any sense among it. Every line is a
decision with all its terms, or what was counted by then.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from itertools import count
from random import Random

from gateway import keys
from gateway.api import parse_request
from gateway.errors import GatewayError
from gateway.kv import ApproximateSettings, KvIndex
from gateway.kv.events import Cleared, KvEvent, Removed, Stored
from gateway.leases import Lease
from gateway.policy import POLICY_NAMES, Weights, make_policy
from gateway.pool import Fleet, FleetSettings, ShardSettings, Worker
from gateway.prefix import PromptHasher
from gateway.records import (
    Ending,
    Endpoint,
    EngineHash,
    EngineKind,
    InferenceRequest,
    LoadSample,
    PrefixBlocks,
    Result,
    StageTimes,
    Tier,
    TrustState,
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router, RouterSettings

_SIZE = 16
_ENDS = (Result.COMPLETED,) * 8 + (Result.WORKER_FAILED, Result.TIMED_OUT, Result.CLIENT_GONE)
_TOKENS = (0, 1, 7, 100, 4096, 1 << 20, 1 << 40)


def _tell(*what: object) -> None:
    sys.stdout.write(" ".join(map(str, what)) + "\n")


class Life:
    """One router with its fleet, and what may happen to it."""

    def __init__(self, policy: str, seed: int, *, workers: int, shards: int) -> None:
        self.rng = Random(seed)
        settings = FleetSettings(
            sharding=ShardSettings(shards=shards, least_workers=4),
            max_inflight=None if seed % 3 else 12,
        )
        self.fleet = Fleet(settings)
        self.index = KvIndex(
            orphan_limit=64, approximate=ApproximateSettings(ttl_s=20.0, limit=4000), max_bytes=224 * 3000
        )
        weights = Weights(self.rng.choice((1.0, 2.0)), 1.0, 1.0)
        routing = Random(seed)
        self.router = Router(
            self.fleet,
            self.index,
            make_policy(policy, rng=routing, weights=weights),
            rng=routing,
            settings=RouterSettings(speculative_ttl_s=0.5, session_ttl_s=30.0),
        )
        self.hasher = PromptHasher(None)
        self.now = 0.0
        self.open: deque[tuple[Lease, InferenceRequest, PrefixBlocks]] = deque()
        self.names = count()
        self.prompts = [[self.rng.randrange(50_000) for _ in range(self.rng.randrange(8, 900))] for _ in range(12)]
        for _ in range(workers):
            self.join()

    def join(self) -> None:
        number = next(self.names)
        rng = self.rng
        facts = WorkerFacts(
            rng.choice((EngineKind.VLLM, EngineKind.SGLANG)),
            "1",
            ("m",),
            adapters={"a": "m"} if number % 4 == 0 else {},
            block_size=_SIZE * rng.choice((1, 1, 1, 2)),
            kv_blocks=rng.choice((None, 64, 4096)),
            max_model_len=rng.choice((None, 8192)),
        )
        spec = WorkerSpec(WorkerId(f"w{number}"), f"http://w{number}:80", weight=rng.choice((1, 0.5, 0.0, 3)))
        worker = self.fleet.add(spec, facts, self.now)
        self.index.bind(worker.slot, block_size=self.fleet.key_block_size(worker), engine=facts.engine)

    def some(self) -> Worker:
        return self.rng.choice(list(self.fleet.workers.values()))

    def leave(self) -> None:
        if len(self.fleet.workers) > 3:
            worker = self.some()
            self.fleet.remove(worker.id, self.now)
            self.index.release(worker.slot)

    def announce(self) -> None:
        worker, rng = self.some(), self.rng
        tokens = self._tokens()
        found = keys.chain(keys.namespace(), tokens, _SIZE)
        hashes = [EngineHash(key ^ worker.slot << 60) for key in found]
        tier = rng.choice((Tier.GPU, Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE))
        events: list[KvEvent] = []
        match rng.randrange(8):
            case 0:
                events = [Removed(hashes[rng.randrange(len(hashes) + 1) :], tier)]
            case 1 if rng.random() < 0.05:
                events = [Cleared()]
            case 2:  # its parent comes later, or never; tokens as wide as 64 bits
                wide = [(1 << 64) - 1 - token for token in tokens[:_SIZE]]
                events = [Stored([EngineHash(rng.getrandbits(64))], hashes[-1] if hashes else None, wide, _SIZE, tier)]
            case _:
                first = rng.randrange(len(hashes) + 1) if rng.random() < 0.2 else 0
                parent = hashes[first - 1] if first else None
                part = tokens[first * _SIZE : len(hashes) * _SIZE]
                events = [Stored(hashes[first:], parent, part, _SIZE, tier, fleeting=tier is Tier.REMOTE)]
        _tell("events", worker.id, self.index.apply(worker.slot, 0, events))

    def _tokens(self) -> list[int]:
        rng = self.rng
        base = rng.choice(self.prompts)
        return base[: rng.randrange(1, len(base) + 1)] + [rng.randrange(50_000) for _ in range(rng.randrange(80))]

    def tell_load(self) -> None:
        rng = self.rng
        usage = rng.choice((None, 0, 1, 0.3, 0.97, -4.0, 1e300))
        queries = rng.choice((None, 0, 100, 1e18))
        sample = LoadSample(
            rng.choice((0, 1, 3.0, 40)), rng.choice((0, 0, 1, 9.0)), usage, queries, queries and queries / 2,
            kv_blocks=rng.choice((None, 2048)), kv_tokens=rng.choice((None, -5, 1 << 70)),
            start_time_unix=rng.choice((None, 1, 2.5)), adapters=rng.choice(((), ("a", "b"))),
            adapter_slots=rng.choice((None, 0, 2, 1 << 70)),
        )  # fmt: skip
        self.fleet.load(self.some().id, sample, self.now)

    def ask(self) -> None:
        rng = self.rng
        endpoint, body = self._body()
        try:
            request = parse_request(
                endpoint, body, request_id="r", session=rng.choice((None, None, "s1", "s2", "\udcff")),
                least_priority=rng.choice((None, 0)),
            )  # fmt: skip
            pool = self.router.pool(request.model)
            work = self.hasher.begin(
                request, block_size=pool.block_size, adapter=pool.adapter, bytes_a_token=pool.rates.bytes_a_token
            )
            blocks = work.blocks()
            lease = self.router.route(request, blocks, self.now)
        except GatewayError as error:
            _tell("refused", error.code, error.message)
            return
        self._show(lease)
        self.open.append((lease, request, blocks))
        if rng.random() < 0.1:
            self.double(lease, request, blocks)

    def double(self, lease: Lease, request: InferenceRequest, blocks: PrefixBlocks) -> None:
        try:
            choice = self.router.consider(request, blocks, self.now, frozenset({lease.worker.id}))
        except GatewayError as error:
            _tell("refused", error.code)
            return
        second = self.router.reserve(choice, request, blocks, self.now, beside=lease)
        self._show(second)
        self.open.append((second, request, blocks))

    def _body(self) -> tuple[Endpoint, bytes]:
        rng = self.rng
        model = rng.choice(("m", "m", "m", "m", "a", "nobody's"))
        extra = rng.choice(("", ',"stream":true', f',"max_tokens":{10**30}', f',"n":{10**25}', ',"priority":-9'))
        tokens = self._tokens()
        match rng.randrange(4):
            case 0:
                text = " ".join(map(str, tokens))
                body = f'{{"model":"{model}","messages":[{{"role":"user","content":"{text}"}}]{extra}}}'
                return Endpoint.CHAT, body.encode()
            case 1:
                return Endpoint.EMBEDDINGS, f'{{"model":"{model}","input":[{tokens},{tokens[:40]}]}}'.encode()
            case _:
                return Endpoint.COMPLETIONS, f'{{"model":"{model}","prompt":{tokens}{extra}}}'.encode()

    def _show(self, lease: Lease) -> None:
        decision = lease.decision
        _tell("routed", decision, lease.kind, lease.expected_s())

    def go_on(self) -> None:
        """The oldest open request begins to be answered, ends, or is moved."""
        if not self.open:
            return
        rng = self.rng
        lease, request, blocks = self.open.popleft()
        if rng.random() < 0.8:
            lease.first_byte(self.now)
            self.now += rng.choice((0.0, 0.001, 0.3))
        if rng.random() < 0.1:
            try:
                tried = frozenset({lease.worker.id})
                other = self.router.route(request, blocks, self.now, excluded=tried, instead_of=lease)
            except GatewayError as error:
                _tell("stays", error.code)
            else:
                self._show(other)
                self.open.append((other, request, blocks))
        result = rng.choice(_ENDS)
        usage = None
        if result is Result.COMPLETED and rng.random() < 0.8:
            prompt = rng.choice((lease.decision.prompt_tokens, *_TOKENS))
            cached = rng.choice((None, 0, lease.decision.predicted_tokens, *_TOKENS))
            usage = Usage(prompt, rng.choice(_TOKENS), cached)
        ending = Ending(
            result, 200 if result is Result.COMPLETED else 502, self.now, usage, rng.randrange(4),
            last_byte_at=self.now if rng.random() < 0.5 else None,
        )  # fmt: skip
        _tell("ended", lease.settle(ending, started_at=lease.sent_at, stages=StageTimes()))

    def something(self) -> None:
        rng, now = self.rng, self.now
        match rng.randrange(10):
            case 0:
                self.fleet.drain(self.some().id, now, on=rng.random() < 0.3)
            case 1:
                self.fleet.probed(self.some().id, now, passed=rng.random() < 0.7)
            case 2:
                self.fleet.tried(self.some().id, now, passed=True)
            case 3:
                self.join()
            case 4:
                self.leave()
            case 5:
                worker = self.some()
                worker.follow(rng.choice(list(TrustState)), now)
            case 6:
                steps = self.index.purging(self.some().slot, most=3)
                next(steps, None)
                steps.close()
            case 7:
                steps = self.index.forgetting(self.some().slot, most=3)
                next(steps, None)
                steps.close()
            case _:
                self.fleet.reset(self.some().id, now)

    def counted(self) -> None:
        _tell("index", self.index.stats(), [self.index.mark(w.slot) for w in self.fleet.workers.values()])
        for worker in self.fleet.workers.values():
            standing = tuple(map(float, worker.standing))  # a load told as a whole number stays one in the source
            _tell("worker", worker.id, standing, worker.trust, worker.state, worker.reason, worker.findings)
        for pool in self.fleet.pools.values():
            _tell("pool", pool.name, pool.rates.learned(), pool.retries.retried, pool.spilled)

    def step(self) -> None:
        chance = self.rng.random()
        self.now += self.rng.choice((0.0, 0.01, 0.2))
        if chance < 0.4:
            self.ask()
        elif chance < 0.72:
            self.go_on()
        elif chance < 0.86:
            self.announce()
        elif chance < 0.93:
            self.tell_load()
        elif chance < 0.97:
            self.something()
        else:
            self.router.expire(self.now)


def main() -> None:
    """Write one life for each policy, and longer ones of the policy that counts: with few workers, in shards, and with
    more workers than a machine word has bits."""
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=600)
    steps = options.parse_args().steps
    sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    lives = [(name, 5, 1, 1) for name in POLICY_NAMES]
    lives += [("seconds", 8, 1, 2), ("seconds", 24, 4, 2), ("seconds", 90, 1, 1)]
    for seed, (policy, workers, shards, longer) in enumerate(lives):
        life = Life(policy, seed, workers=workers, shards=shards)
        _tell("life", policy, workers)
        for at in range(steps * longer):
            life.step()
            if at % 100 == 99:
                life.counted()


if __name__ == "__main__":
    main()
