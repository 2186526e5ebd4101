"""What was asked of a worker, and the checks over it: pure functions from records to findings.

Rules:
1. A check judges only what was asked: what is None was not, and is no finding.
2. A check never needs to know how something was asked. Whatever it says can be made to come true in a test by one
   misconfigured engine.
3. Unix seconds throughout; `window` is the time, on our clock, between asking and having the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from gateway import findings as table
from gateway.records import EngineKind, EventSource, Finding, LoadEndpoint, WorkerFacts, WorkerSpec
from gateway.settings import is_loopback

MAX_SKEW_S = 2.0
"""Below it clocks count as equal: an HTTP date has whole seconds."""


class Reach(StrEnum):
    """What was found at a ZeroMQ endpoint; the value is the sentence for the operator."""

    OPEN = "answers"
    NOBODY = "nobody listens there, or a firewall is in between"
    FOREIGN = "what listens there does not answer as the engine's socket would"
    NO_ADDRESS = "this is no address to connect to"
    SILENT = "what listens there says nothing"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a feed told of the test prompt. `hashes` are the engine's names of its first block; `block_sizes` those of
    the events that held it; `skew_s` how far the time stamps lie outside the window; `salt_shown`: the salt of the
    test prompt stood in an event as it is."""

    batches: int = 0
    hashes: frozenset[int] = frozenset()
    block_sizes: frozenset[int] = frozenset()
    skew_s: float | None = None
    salt_shown: bool = False


@dataclass(frozen=True, slots=True)
class FeedSeen:
    """One rank's event endpoint; `replay` is None without one, `heard` is None when no test prompt was sent."""

    source: EventSource
    events: Reach
    replay: Reach | None
    heard: Heard | None = None


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """One rank's load endpoint, and whether its load came from there."""

    source: LoadEndpoint
    reach: Reach


@dataclass(frozen=True, slots=True)
class Tried:
    """A new prompt of `tokens` tokens was sent twice, then once with a salt of its own, all to one rank; cached tokens
    as reported, None where the answer did not say. `status` is that of the first answer that was not 200, with its text
    in `problem`."""

    tokens: int
    first: int | None = None
    second: int | None = None
    salted: int | None = None
    status: int = 200
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """Everything that was asked of one worker; `facts` are None when it could not be asked at all."""

    spec: WorkerSpec
    facts: WorkerFacts | None = None
    said: tuple[Finding, ...] = ()
    """Findings made while asking: the comparison of token ids, what failed, what was not finished."""
    feeds: tuple[FeedSeen, ...] = ()
    loads: tuple[LoadSeen, ...] = ()
    tried: Tried | None = None
    skew_s: float | None = None
    """How far the HTTP date lies outside the window; positive: the worker's clock is ahead."""
    listened_s: float = 0.0


def outside(earliest: float, latest: float, *, window: tuple[float, float]) -> float:
    """How far a time that lies in `earliest..latest` is outside of the window: positive after it, negative before it, 0
    when it may be inside."""
    begin, end = window
    if earliest > end:
        return earliest - end
    return latest - begin if latest < begin else 0.0


# --------------------------------------------------------------------------- one worker


def check_sockets(seen: Seen) -> Iterable[Finding]:
    """Event and replay endpoints that nobody answers at."""
    for feed in seen.feeds:
        if feed.events is not Reach.OPEN:
            yield table.EVENTS_UNREACHABLE.found(endpoint=feed.source.endpoint, problem=feed.events)
        if feed.replay not in (None, Reach.OPEN):
            yield table.REPLAY_UNREACHABLE.found(endpoint=feed.source.replay_endpoint, problem=feed.replay)


def check_loads(seen: Seen) -> Iterable[Finding]:
    """Load endpoints that the worker names and does not publish at."""
    for load in seen.loads:
        if load.reach is not Reach.OPEN:
            yield table.LOAD_UNHEARD.found(endpoint=load.source.endpoint, problem=load.reach)


def check_replay(seen: Seen) -> Iterable[Finding]:
    """Events without replay, also where that comes from the configuration."""
    if seen.facts is not None and any(source.replay_endpoint is None for source in seen.facts.events):
        replay_told = {table.NO_REPLAY.code, table.REPLAY_LOCAL.code, table.REPLAY_OVERLAPS.code}
        if seen.spec.kv_replay is None and not any(found.code in replay_told for found in seen.facts.findings):
            yield table.NO_REPLAY.found()


def check_events(seen: Seen) -> Iterable[Finding]:
    """A test prompt that was computed, and no event told of it."""
    if seen.facts is None or seen.tried is None or seen.tried.status != 200 or _caching_off(seen):
        return
    listened = [feed for feed in seen.feeds if feed.events is Reach.OPEN and feed.heard is not None]
    silent = [feed for feed in listened if feed.heard is not None and not feed.heard.hashes]
    # Where the engine chooses the rank, one of them is right.
    if silent and (seen.facts.rank_routing or len(silent) == len(listened)):
        endpoints = ", ".join(feed.source.endpoint for feed in silent)
        yield table.EVENTS_SILENT.found(wait_s=seen.listened_s, endpoint=endpoints)


def check_block_size(seen: Seen) -> Iterable[Finding]:
    """Events with blocks of another size than the one the keys are cut in."""
    sizes = {size for feed in seen.feeds if feed.heard is not None for size in feed.heard.block_sizes}
    cut = seen.facts.block_size if seen.facts is not None else None
    if sizes and cut is not None and cut not in sizes:
        by = "configured" if seen.spec.block_size is not None else "what the worker's settings say"
        yield table.BLOCK_SIZE_WRONG.found(configured=cut, by=by, said=", ".join(map(str, sorted(sizes))))


def check_hits(seen: Seen) -> Iterable[Finding]:
    """Whether the worker says how much came from its cache, and whether anything does."""
    tried, facts = seen.tried, seen.facts
    if tried is None or facts is None:
        return
    if tried.status != 200:
        yield table.PROBE_REFUSED.found(status=tried.status, problem=tried.problem)
    elif _caching_off(seen):
        return
    elif tried.second is None:
        if not any(found.code == table.HITS_NOT_REPORTED.code for found in facts.findings):
            yield table.HITS_NOT_REPORTED.found(facts.engine)
    # Data-parallel ranks have a cache each: where the engine chooses, the second prompt may have met another one.
    elif not tried.second and (facts.rank_routing or len(facts.ranks) == 1):
        yield table.REPEAT_MISSED.found(facts.engine, tokens=tried.tokens, cached=tried.second)


def check_salts(seen: Seen) -> Iterable[Finding]:
    """Salts that separate nothing, and salts that everybody on the network can read."""
    if seen.tried is not None and seen.tried.salted:
        yield table.SALT_IGNORED.found(cached=seen.tried.salted)
    for feed in seen.feeds:
        if feed.heard is not None and feed.heard.salt_shown and _others_reach(feed.source.endpoint):
            yield table.SALTS_IN_CLEAR.found(endpoint=feed.source.endpoint)


def _others_reach(endpoint: str) -> bool:
    """Whether it is more than a machine's own: neither a file's nor a loopback address."""
    where = urlsplit(endpoint)
    return where.scheme == "tcp" and not is_loopback(where.hostname or "")


def check_clock(seen: Seen) -> Iterable[Finding]:
    """A clock that is off, by the HTTP date or by the time stamps of events; one finding for both."""
    skews = [("the date of its answers", seen.skew_s)]
    skews += [("its events", feed.heard.skew_s) for feed in seen.feeds if feed.heard is not None]
    for by, skew_s in skews:
        if skew_s is not None and abs(skew_s) > MAX_SKEW_S:
            direction = "ahead" if skew_s > 0 else "behind"
            yield table.CLOCK_SKEW.found(seconds=abs(skew_s), direction=direction, by=by)
            return


CHECKS = (
    check_sockets,
    check_loads,
    check_replay,
    check_events,
    check_block_size,
    check_hits,
    check_salts,
    check_clock,
)
"""All checks of one worker, in the order they are shown."""


def judge(seen: Seen) -> list[Finding]:
    """What the probe found, what was found while asking, and every check's findings."""
    found = [*(seen.facts.findings if seen.facts is not None else ()), *seen.said]
    for check in CHECKS:
        found += check(seen)
    return found


def _caching_off(seen: Seen) -> bool:
    codes = () if seen.facts is None else seen.facts.findings
    return any(found.code == table.PREFIX_CACHING_OFF.code for found in codes)


# --------------------------------------------------------------------------- several workers


def check_load_addresses(fleet: Sequence[Seen]) -> Iterable[tuple[WorkerSpec, Finding]]:
    """Load endpoints that several servers name."""
    named = Counter(load.source.endpoint for seen in fleet for load in seen.loads)
    for seen in fleet:
        shared = [load.source.endpoint for load in seen.loads if named[load.source.endpoint] > 1]
        if shared:
            yield (
                seen.spec,
                table.LOAD_UNHEARD.found(endpoint=", ".join(shared), problem="several workers name this address"),
            )


def check_hashes(fleet: Sequence[Seen]) -> Iterable[tuple[WorkerSpec, Finding]]:
    """vLLM workers of one model that name the first block of the same prompt differently."""
    first: dict[tuple[str, int], tuple[WorkerSpec, frozenset[int]]] = {}
    for seen in fleet:
        if seen.facts is None or seen.facts.engine is not EngineKind.VLLM:
            continue
        for heard in (feed.heard for feed in seen.feeds if feed.heard is not None and feed.heard.hashes):
            for key in ((model, size) for model in seen.facts.models for size in heard.block_sizes):
                other, hashes = first.setdefault(key, (seen.spec, heard.hashes))
                if not hashes & heard.hashes:
                    yield seen.spec, table.HASHES_UNSEEDED.found(other=other.name)
                    return
