"""One replica without its sockets: the core, its journal, and what it knows of its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from gateway import keys
from gateway.kv import ApproximateSettings, KvIndex
from gateway.kv.events import Stored
from gateway.leases import Lease
from gateway.policy import make_policy
from gateway.pool import Fleet, Worker
from gateway.records import (
    Chain,
    Ending,
    Endpoint,
    EngineHash,
    EngineKind,
    InferenceRequest,
    NoPrompt,
    PrefixBlocks,
    Result,
    StageTimes,
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.replicas import Journal, Peers
from gateway.replicas.messages import Message, decode, encode
from gateway.router import Router

SIZE = 16
TTL_S = 2.0


def blocks_of(tokens: Sequence[int]) -> PrefixBlocks:
    """The blocks of one prompt of token ids."""
    return PrefixBlocks((Chain(keys.chain(keys.namespace(), tokens, SIZE), len(tokens)),), len(tokens), SIZE)


@dataclass
class Site:
    """`announcing` workers have told one block of nobody's, so what they hold is read from events. `names` are its own
    for the same addresses."""

    number: int
    workers: int = 2
    announcing: bool = True
    names: str = "w"
    woken: int = 0
    leases: list[Lease] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = Fleet()
        self.index = KvIndex(approximate=ApproximateSettings())
        self.router = Router(
            self.fleet, self.index, make_policy("seconds", rng=Random(self.number)), rng=Random(self.number)
        )
        self.journal = Journal(self.number, self.fleet, self.index, on_change=self.wake)
        self.peers = Peers(self.number, self.fleet, self.index, self.router.sessions, ttl_s=TTL_S)
        self.router.watch(self.journal)
        for at in range(self.workers):
            self.join(at)

    def wake(self) -> None:
        """There is news."""
        self.woken += 1

    def join(self, at: int, *, size: int = SIZE) -> Worker:
        """Worker number `at` joins."""
        spec = WorkerSpec(WorkerId(f"{self.names}{at}"), f"http://10.0.0.{at}:8000")
        facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=size, kv_blocks=4096)
        worker = self.fleet.add(spec, facts, 0.0)
        self.index.bind(worker.slot, block_size=size)
        if self.announcing:
            self.index.apply(worker.slot, 0, [Stored([EngineHash(at + 1)], None, [9_000 + at] * size, size)])
        return worker

    def worker(self, at: int) -> Worker:
        return self.fleet.workers[WorkerId(f"{self.names}{at}")]

    def ask(self, tokens: Sequence[int], *, session: str | None = None) -> tuple[InferenceRequest, PrefixBlocks]:
        """A request and its blocks."""
        request = InferenceRequest(
            Endpoint.COMPLETIONS, f"r{len(self.leases)}", "m", NoPrompt("test"), stream=True, session=session
        )
        return request, blocks_of(tokens)

    def send(self, tokens: Sequence[int], now: float, *, session: str | None = None) -> Lease:
        """Place a request."""
        lease = self.router.route(*self.ask(tokens, session=session), now)
        self.leases.append(lease)
        return lease

    def end(self, lease: Lease, now: float, result: Result = Result.COMPLETED) -> None:
        """A request is over."""
        usage = Usage(64, 4, 0) if result is Result.COMPLETED else None
        lease.settle(Ending(result, 200, now, usage, 0), started_at=now, stages=StageTimes())
        self.leases.remove(lease)

    def held(self, tokens: Sequence[int], at: int) -> int:
        """Tokens of a prompt that worker `at` is taken to hold."""
        slot = self.worker(at).slot
        return self.index.overlap(blocks_of(tokens), 1 << slot).tokens(slot)

    def news(self, now: float) -> list[bytes]:
        return [encode(message) for message in self.journal.news(now)]

    def state(self, now: float, *, again: bool = True) -> list[bytes]:
        return [encode(message) for message in self.journal.state(now, again=again)]

    def hear(self, messages: Sequence[bytes], now: float) -> list[Message]:
        """Apply messages; returns them decoded."""
        decoded = [decode(payload) for payload in messages]
        for message in decoded:
            self.peers.hear(message, now)
        return decoded
