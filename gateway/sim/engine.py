"""One simulated inference engine: prefill, continuous batching and a prefix cache, as arithmetic over time.

The model (its tests hold it to the figures of an independent simulator):
1. Prefill is first come, first served, one request at a time. It takes
       overhead + new * a + q * new * (cached + new / 2) seconds,
   the last term being attention of the new tokens over what is before them; plus, when others are decoding, one
   decode step for each chunk of new tokens (a fraction of a chunk costs a fraction of a step).
2. Decode is a fluid: all running requests advance together, one token a step of `d0 + d1 * n + d2 * kv_tokens`
   seconds. While a prefill runs they advance at its chunk rate instead.
3. A request starts when its prompt and its whole output fit into the cache beside what is in use, and when fewer
   than `max_running` are decoding. One that is larger than the cache runs when nothing else does.
4. The usable hit is looked up when the prefill starts and is at most the prompt less one token.

Pure: no I/O, no clock, no chance. Callers pass `now` (seconds, never going back) and get back what happened since,
in order, each happening with its own time. Two grains: `token_stride=0` reports first token and end only (trace
replay, thousands of requests in a second of CPU); `token_stride=n` reports every n tokens (HTTP).
The prefix cache is given (`gateway.sim.cache`): vLLM's block pool unless said otherwise, or SGLang's tree, and with
either a tier below the GPU that gets a copy of what is computed. What that tier holds counts as cached and is loaded in
no time.
Left out: preemption (room is reserved ahead), more than one copy of a block.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from gateway.records import Tier
from gateway.sim.cache import Claim, HostTier, PrefixCache
from gateway.sim.engine_records import (
    PRESETS,
    Cleared,
    EngineCounters,
    EngineModel,
    Finished,
    FirstToken,
    Happening,
    Removed,
    Started,
    Stored,
    Tokens,
)
from gateway.sim.paged_cache import PagedCache

__all__ = [
    "PRESETS",
    "Cleared",
    "EngineCounters",
    "EngineModel",
    "Finished",
    "FirstToken",
    "Happening",
    "Removed",
    "SimulatedEngine",
    "Started",
    "Stored",
    "Tokens",
]

_SLACK = 1e-7
"""Tokens: a request this close to its next token has it; absorbs rounding of times to floats."""


class _Job:
    """One request inside the engine."""

    __slots__ = ("blocks", "claim", "done", "due", "gone", "number", "origin", "output", "prompt", "tail")

    def __init__(self, number: int, blocks: Sequence[int], prompt: int, output: int, tail: Sequence[int]) -> None:
        self.number = number
        self.blocks = blocks
        self.prompt = prompt
        self.output = output
        self.tail = tail
        self.claim: Claim | None = None
        self.done = 0  # output tokens reported
        self.due = 0  # output tokens at the next report
        self.origin = 0.0  # virtual time of its first token
        self.gone = False


class SimulatedEngine:
    """`submit`, `abort`, `clear` and `advance` change the engine to the state at `now` and return what happened.

    `block_size` in tokens. `store_at_start` announces prompt blocks when their prefill starts instead of when it
    ends (engines differ). `whole_block_hits` rounds the usable hit down to full blocks after the cap of rule 4, as
    vLLM does. `speed` divides every duration. `cache` is empty and of as many blocks as `model` has room for.
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        block_size: int,
        token_stride: int = 0,
        store_at_start: bool = False,
        whole_block_hits: bool = False,
        speed: float = 1.0,
        cache: PrefixCache | None = None,
        host: HostTier | None = None,
    ) -> None:
        if block_size < 1 or token_stride < 0 or speed <= 0:
            raise ValueError("block_size >= 1, token_stride >= 0 and speed > 0 are needed")
        self.model = model
        self.block_size = block_size
        self._stride = token_stride
        self._store_at_start = store_at_start
        self._whole_block_hits = whole_block_hits
        self._speed = speed
        self._cache: PrefixCache = cache or PagedCache(max(1, model.kv_tokens // block_size))
        self._host = host
        self._now = float("-inf")
        self._queue: OrderedDict[int, _Job] = OrderedDict()
        self._prefilling: _Job | None = None
        self._prefill_ends = 0.0
        self._prefill_rate = 0.0
        self._decoding: dict[int, _Job] = {}
        self._kv_tokens = 0
        # Decode clock: steps done since the start; `_agenda` holds (step of the next report, tie-break, job).
        self._steps = 0.0
        self._rate = 0.0
        self._agenda: list[tuple[float, int, _Job]] = []
        self._queried = 0
        self._hits = 0
        self._finished = 0
        self._aborted = 0
        self._evicted = 0
        self._busy_s = 0.0
        self._link = 1.0
        self._loaded = 0
        self._load_s = 0.0

    # ---------------------------------------------------------------- looking

    @property
    def running(self) -> int:
        """Requests in prefill or decode."""
        return len(self._decoding) + (self._prefilling is not None)

    @property
    def waiting(self) -> int:
        """Requests whose prefill has not started."""
        return len(self._queue)

    def waiting_tokens(self) -> tuple[int, int]:
        """Prompt tokens of the requests that wait, and how many of them are not in the cache now."""
        jobs = self._queue.values()
        held = (min(self._cache.held(job.blocks) * self.block_size, job.prompt - 1) for job in jobs)
        prompts = sum(job.prompt for job in jobs)
        return prompts, prompts - sum(held)

    @property
    def kv_usage(self) -> float:
        """Share of the cache held by running requests, 0..1; idle cached blocks count as free."""
        return min(1.0, self._cache.in_use / self._cache.capacity)

    @property
    def capacity_blocks(self) -> int:
        """Size of the cache in blocks."""
        return self._cache.capacity

    @property
    def resident_blocks(self) -> int:
        """Named blocks in the cache, those of a running prefill included."""
        return self._cache.resident

    @property
    def in_use_blocks(self) -> int:
        """Blocks that cannot be evicted now."""
        return self._cache.in_use

    def held(self, blocks: Sequence[int]) -> int:
        """How many of these blocks, from the first on, are in the cache."""
        return self._cache.held(blocks)

    @property
    def host_blocks(self) -> int:
        """Blocks in the tier below the GPU."""
        return 0 if self._host is None else self._host.resident

    @property
    def host_capacity(self) -> int:
        """Size of that tier in blocks, 0 without one."""
        return 0 if self._host is None else self._host.capacity

    @property
    def steps(self) -> float:
        """Decode steps done since the start."""
        return self._steps

    @property
    def counters(self) -> EngineCounters:
        return EngineCounters(
            self._queried,
            self._hits,
            self._finished,
            self._aborted,
            self._evicted,
            self._busy_s,
            self._loaded,
            self._load_s,
        )

    def cached_blocks(self, blocks: Sequence[int]) -> int:
        """Length of the leading run of `blocks` in the cache (those of a running prefill included)."""
        return self._cache.held(blocks)

    def next_event_at(self) -> float | None:
        """When `advance` will next have something to tell, None while nothing runs."""
        decode = self._next_decode_at()
        if self._prefilling is None:
            return decode
        return self._prefill_ends if decode is None else min(decode, self._prefill_ends)

    # ---------------------------------------------------------------- changing

    def submit(
        self,
        request: int,
        blocks: Sequence[int],
        *,
        prompt_tokens: int,
        output_tokens: int,
        now: float,
        output_blocks: Sequence[int] = (),
    ) -> list[Happening]:
        """A request arrives. `blocks` names the full blocks of its prompt, at most `prompt_tokens // block_size`;
        `output_blocks` names the blocks its output will fill after them, none to leave generated tokens uncached.

        The last output token is never computed, so `output_blocks` may cover prompt + output - 1 tokens.
        Raises ValueError for a number in use or counts that do not fit together.
        """
        if request in self._queue or request in self._decoding or self._is_prefilling(request):
            raise ValueError(f"request {request} is here already")
        if prompt_tokens < 1 or output_tokens < 1 or len(blocks) > prompt_tokens // self.block_size:
            raise ValueError("a request has at least one token in and out, and blocks for full prompt blocks only")
        if output_blocks and len(blocks) + len(output_blocks) > (prompt_tokens + output_tokens - 1) // self.block_size:
            raise ValueError("more output blocks than the output fills")
        happenings = self.advance(now)
        self._queue[request] = _Job(request, blocks, prompt_tokens, output_tokens, output_blocks)
        self._start_next(happenings)
        self._set_rate()
        return happenings

    def abort(self, request: int, now: float) -> list[Happening]:
        """Forget a request wherever it is; unknown or finished ones are ignored. Everything it held is free."""
        happenings = self.advance(now)
        job = self._queue.pop(request, None)
        if job is None and self._is_prefilling(request):
            job, self._prefilling = self._prefilling, None
            self._release(job, happenings, uncomputed=True)
        elif job is None:
            job = self._decoding.pop(request, None)
            if job is not None:
                job.gone = True
                self._kv_tokens -= job.prompt + job.output
                self._release(job, happenings)
        if job is not None:
            self._aborted += 1
            self._start_next(happenings)
            self._set_rate()
        return happenings

    def clear(self, now: float) -> tuple[bool, list[Happening]]:
        """Empty the prefix cache; refused (False) while requests run, as vLLM refuses it."""
        happenings = self.advance(now)
        if self._cache.in_use:
            return False, happenings
        self._cache.clear()
        if self._host is not None:
            self._host.evict(None)
        happenings.append(Cleared(now))
        return True, happenings

    def evict(self, tier: Tier, count: int | None, now: float) -> list[Happening]:
        """Drop `count` idle blocks of a tier (chunks, below the GPU) as if room were needed, None for all."""
        happenings = self.advance(now)
        if tier is Tier.GPU:
            self._evicted_now(self._cache.evict(count), happenings)
        elif self._host is not None:
            self._drop(self._host.evict(count), happenings, Tier.CPU)
        return happenings

    def set_link(self, factor: float) -> None:
        """Reads from the tier below take 1 / `factor` of the usual time from now on."""
        self._link = factor

    def set_speed(self, speed: float, now: float) -> list[Happening]:
        """Change the speed for prefills that start from now on, and for decode at once."""
        if speed <= 0:
            raise ValueError("speed is above 0")
        happenings = self.advance(now)
        self._speed = speed
        self._set_rate()
        return happenings

    def advance(self, now: float) -> list[Happening]:
        """Let time pass up to and including `now`. Raises ValueError when `now` lies before the last call."""
        if now < self._now:
            raise ValueError("time does not go back")
        happenings: list[Happening] = []
        while True:
            decode = self._next_decode_at()
            prefill = self._prefill_ends if self._prefilling is not None else None
            if prefill is not None and prefill <= now and (decode is None or prefill <= decode):
                self._pass(prefill)
                self._end_prefill(happenings)
            elif decode is not None and decode <= now:
                self._pass(decode)
                self._report_decode(happenings)
            else:
                break
            self._start_next(happenings)
            self._set_rate()
        self._pass(now)
        return happenings

    # ---------------------------------------------------------------- inside

    def _is_prefilling(self, request: int) -> bool:
        return self._prefilling is not None and self._prefilling.number == request

    def _pass(self, at: float) -> None:
        if at > self._now:
            if self._rate:
                self._steps += (at - self._now) * self._rate
            self._now = at

    def _set_rate(self) -> None:
        """Steps a second from now on."""
        if self._prefilling is not None:
            self._rate = self._prefill_rate
        else:
            self._rate = 1.0 / self._step_s() if self._decoding else 0.0

    def _step_s(self) -> float:
        return self.model.decode_step_s(len(self._decoding), self._kv_tokens) / self._speed

    def _next_decode_at(self) -> float | None:
        agenda = self._agenda
        while agenda and agenda[0][2].gone:
            heapq.heappop(agenda)
        if not agenda or not self._rate:
            return None
        return max(self._now, self._now + (agenda[0][0] - self._steps) / self._rate)

    def _start_next(self, happenings: list[Happening]) -> None:
        """Rules 1, 3 and 4: begin the prefill of the request at the head of the queue if it may."""
        if self._prefilling is not None or not self._queue:
            return
        job = next(iter(self._queue.values()))
        size = self.block_size
        unnamed = -(-(job.output + job.prompt - len(job.blocks) * size) // size)
        full = len(self._decoding) >= self.model.max_running
        if self._decoding and (full or not self._cache.fits(job.blocks, unnamed)):
            return
        del self._queue[job.number]
        job.claim, evicted = self._cache.claim(job.blocks, unnamed)
        self._evicted_now(evicted, happenings)
        held = job.claim.held
        read_s = 0.0
        if self._host is not None:
            below = self._host.run(job.blocks, held)
            held += below
            read_s = below * size * self.model.host_token_s / (self._speed * self._link)
            self._loaded += below * size
            self._load_s += read_s
        cached = min(held * size, job.prompt - 1)
        if self._whole_block_hits:
            cached -= cached % size
        new = job.prompt - cached
        chunks = new / self.model.chunk_tokens
        duration = self.model.prefill_s(new, cached) / self._speed + read_s
        if self._decoding:
            duration += chunks * self._step_s()
        self._queried += job.prompt
        self._hits += cached
        self._busy_s += duration
        self._prefilling = job
        self._prefill_ends = self._now + duration
        self._prefill_rate = chunks / duration if duration > 0 else 0.0
        happenings.append(Started(job.number, self._now, cached, duration))
        if self._store_at_start:
            self._announce(job, job.claim, job.claim.fresh, happenings)

    def _end_prefill(self, happenings: list[Happening]) -> None:
        job = self._prefilling
        assert job is not None
        assert job.claim is not None
        self._prefilling = None
        stored = self._cache.fill(job.claim)
        if not self._store_at_start:
            self._announce(job, job.claim, stored, happenings)
        happenings.append(FirstToken(job.number, self._now))
        job.done = 1
        job.origin = self._steps
        self._decoding[job.number] = job
        self._kv_tokens += job.prompt + job.output
        self._schedule(job)

    def _announce(self, job: _Job, claim: Claim, positions: Sequence[int], happenings: list[Happening]) -> None:
        """Blocks of `claim` at `positions` are cached now; the tier below gets them too."""
        self._tell_stored(job, claim, positions, Tier.GPU, happenings)
        if self._host is not None:
            copied, gone = self._host.store(claim.blocks, positions)
            self._tell_stored(job, claim, copied, Tier.CPU, happenings)
            self._drop(gone, happenings, Tier.CPU)

    def _tell_stored(
        self, job: _Job, claim: Claim, positions: Sequence[int], tier: Tier, happenings: list[Happening]
    ) -> None:
        """One `Stored` for each unbroken run of positions (one run, unless a tail outlived its head)."""
        start = 0
        for end in range(1, len(positions) + 1):
            if end < len(positions) and positions[end] == positions[end - 1] + 1:
                continue
            first, last = positions[start], positions[end - 1]
            parent = claim.blocks[first - 1] if first else None
            run = tuple(claim.blocks[first : last + 1])
            happenings.append(Stored(job.number, self._now, first, run, parent, tier))
            start = end

    def _evicted_now(self, blocks: list[int], happenings: list[Happening]) -> None:
        self._evicted += len(blocks)
        self._drop(blocks, happenings, Tier.GPU)

    def _drop(self, blocks: list[int], happenings: list[Happening], tier: Tier) -> None:
        if blocks:
            happenings.append(Removed(self._now, tuple(blocks), tier))

    def _schedule(self, job: _Job) -> None:
        """Put the next report of a decoding request on the agenda: its end, or the next stride of tokens."""
        job.due = job.output if not self._stride else min(job.output, job.done + self._stride)
        heapq.heappush(self._agenda, (job.origin + job.due - 1, job.number, job))

    def _report_decode(self, happenings: list[Happening]) -> None:
        """Everything that is due at the present step."""
        agenda = self._agenda
        # Rounding may leave the clock a hair before the report it was moved to.
        self._steps = max(self._steps, agenda[0][0])
        while agenda and agenda[0][0] <= self._steps + _SLACK:
            job = heapq.heappop(agenda)[2]
            if job.gone:
                continue
            if self._stride and job.due > job.done:
                happenings.append(Tokens(job.number, self._now, job.due - job.done))
            job.done = job.due
            self._store_output(job, happenings)
            if job.done < job.output:
                self._schedule(job)
                continue
            del self._decoding[job.number]
            self._kv_tokens -= job.prompt + job.output
            self._finished += 1
            self._release(job, happenings)
            happenings.append(Finished(job.number, self._now))

    def _store_output(self, job: _Job, happenings: list[Happening]) -> None:
        """Name the blocks that generated tokens have filled; the newest token itself is not computed yet."""
        claim = job.claim
        if not job.tail or claim is None:
            return
        full = (job.prompt + job.done - 1) // self.block_size
        stored: list[int] = []
        while len(claim.blocks) < min(full, len(job.blocks) + len(job.tail)):
            stored += self._cache.extend(claim, job.tail[len(claim.blocks) - len(job.blocks)])
        self._announce(job, claim, stored, happenings)

    def _release(self, job: _Job | None, happenings: list[Happening], *, uncomputed: bool = False) -> None:
        if job is None or job.claim is None:
            return
        stored, dropped = self._cache.release(job.claim, uncomputed=uncomputed)
        self._announce(job, job.claim, stored, happenings)
        if self._store_at_start:
            self._drop(dropped, happenings, Tier.GPU)
