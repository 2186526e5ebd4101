"""The data-parallel ranks behind one URL, and which of them are workers of their own.

Rules:
1. A rank has its own KV cache, so where a request can name its rank, each rank is a worker: own slot, load, feed and
   trust, all with the URL of their server. Its name is the server's, `@` and its number: `w1@0`, `w1@1`. No configured
   name holds an `@`, and it is plain in headers, labels and paths.
2. A request names its rank in the header `X-data-parallel-rank` (vLLM from 0.11.1, SGLang from 0.5.10 on). Its value is
   the position among the ranks of that server: vLLM takes it as an index into the engines behind its port, which with
   hybrid load balancing do not begin at rank 0 (`v1/engine/core_client.py`).
3. Where the release cannot be told, all ranks are one worker. The engine chooses, and the overlap is what the best rank
   may hold.
4. A server with one rank is one worker, whatever the rank's number is (vLLM with external load balancing).
5. Events and replays of a rank are at the ports of rank 0 plus its number. Where both ranges meet, one of the two
   sockets cannot have been bound: the replay is left out there, and the operator is told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from gateway import findings as table
from gateway.pool import MAX_WORKERS
from gateway.records import EngineKind, EventSource, Finding, Rank, RankChoice, WorkerFacts, WorkerId, WorkerSpec
from gateway.upstream.control import ProbeFailed

RANK_HEADER: Final = "x-data-parallel-rank"
"""Names the rank of a request (rule 2)."""
RANK_MARK: Final = "@"
"""Between a server's name and the number of a rank."""

_HEADER_SINCE: Final = {EngineKind.VLLM: (0, 11, 1), EngineKind.SGLANG: (0, 5, 10)}
_FROM_SOURCE: Final = (1 << 16,)
_RELEASE = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


def rank_specs(spec: WorkerSpec, facts: WorkerFacts) -> Mapping[WorkerId, WorkerSpec]:
    """The workers of a server by name: one for each rank, or the server itself."""
    if not facts.rank_routing:
        return {spec.name: spec}
    count = len(facts.ranks)
    specs = {}
    for position, number in enumerate(facts.ranks):
        name = WorkerId(f"{spec.name}{RANK_MARK}{number}")
        blocks = spec.kv_blocks // count if spec.kv_blocks is not None else None
        specs[name] = replace(spec, name=name, kv_blocks=blocks, rank=Rank(spec.name, number, position))
    return specs


def rank_facts(spec: WorkerSpec, facts: WorkerFacts) -> WorkerFacts:
    """What of a server's facts is true of one of its workers."""
    if spec.rank is None:
        return facts
    number = spec.rank.number
    return replace(
        facts,
        kv_blocks=facts.kv_blocks // len(facts.ranks) if facts.kv_blocks is not None else None,
        events=tuple(source for source in facts.events if source.rank == number),
        loads=tuple(load for load in facts.loads if load.rank == number),
        ranks=(number,),
    )


def rank_numbers(spec: WorkerSpec, said: Sequence[int], findings: list[Finding]) -> tuple[int, ...]:
    """The ranks behind the URL: those the worker names, unless another count is configured. Raises ProbeFailed when
    there are more than a fleet can hold."""
    numbers = tuple(sorted(set(said))) or (0,)
    if len(numbers) > MAX_WORKERS:
        raise ProbeFailed(f"worker {spec.name} names {len(numbers)} data-parallel ranks; is this an inference worker?")
    size = spec.data_parallel_size
    if size is None or size == len(numbers):
        return numbers
    if said:
        findings.append(table.RANK_COUNT_WRONG.found(configured=size, said=len(numbers)))
    return tuple(range(size))


def routes_ranks(
    spec: WorkerSpec, engine: EngineKind, version: str, ranks: Sequence[int], findings: list[Finding]
) -> bool:
    """Whether requests name their rank (rules 2 to 4)."""
    if len(ranks) == 1 or spec.ranks is RankChoice.ONE:
        return False
    if spec.ranks is RankChoice.EACH or _knows_header(engine, version):
        return True
    release = f"{engine.value} {version}".strip()
    findings.append(table.RANKS_AS_ONE.found(count=len(ranks), release=release))
    return False


def release_number(version: str) -> tuple[int, ...] | None:
    """A version to compare with `(0, 33, 0)`; None when it is not told. Builds from source (`0.1.dev...`) are taken for
    newer than any release."""
    if "dev" in version:
        return _FROM_SOURCE
    found = _RELEASE.match(version)
    return tuple(int(part or 0) for part in found.groups()) if found is not None else None


def _knows_header(engine: EngineKind, version: str) -> bool:
    since, release = _HEADER_SINCE.get(engine), release_number(version)
    return since is not None and release is not None and release >= since


def without_collisions(sources: Sequence[EventSource], findings: list[Finding]) -> tuple[EventSource, ...]:
    """The sources, those replays left out that claim another socket's address (rule 5). Two ranks that name one event
    address keep the first one's."""
    kept: list[EventSource] = []
    events: dict[str, int] = {}
    for source in sources:
        first = events.setdefault(source.endpoint, source.rank)
        if first == source.rank:
            kept.append(source)
        else:
            findings.append(table.RANK_EVENTS_SHARED.found(first=first, second=source.rank, endpoint=source.endpoint))
    clashes = [source for source in kept if source.replay_endpoint in events]
    if not clashes:
        return tuple(kept)
    findings.append(table.REPLAY_OVERLAPS.found(endpoint=clashes[0].replay_endpoint))
    return tuple(replace(source, replay_endpoint=None) if source in clashes else source for source in kept)
