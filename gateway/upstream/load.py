"""Load of the workers: what they say about themselves, read every `poll_s` seconds.

Rules:
1. A poll is never in a request's way: each worker has its own loop, its own connection and one deadline a poll.
2. A failed poll delivers nothing. It is counted and its reason kept; the age of the last sample says the rest.
3. Only the lines needed are parsed: 65 to 92 KB of text a worker and second, of which about ten lines matter.

Names and their history: vLLM `vllm:*` (0.9 to 0.33, the `gpu_` names up to 0.11), SGLang `sglang:*` and
`GET /v1/loads` (0.5.8 on). SGLang's scheduler gauges in `/metrics` are refreshed every 40 decode iterations only, so
`/v1/loads` is asked first and `/metrics` seldom, for the counters.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import msgspec

from gateway.records import EngineKind, LoadSample, WorkerId, WorkerSpec
from gateway.upstream.control import Answer, ControlClient, ProbeFailed
from gateway.upstream.poll_line import PollLine

COUNTER_POLLS = 15
"""SGLang: every this many polls `/metrics` is read too. Its counters only feed averages over minutes."""

JITTER = 0.1
"""Share of the period by which each pause is changed, so that many workers are not asked in one burst."""


# --------------------------------------------------------------------------- Prometheus text


class Series(NamedTuple):
    """One sample line of a metric: labels (unescaped) and value."""

    labels: Mapping[str, str]
    value: float


_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_NEWLINE = ord("\n")


def read_series(text: bytes, name: str) -> list[Series]:
    """All samples called exactly `name` in a Prometheus text exposition, in order.

    Some exporters write the colon of a name as an underscore; that spelling is tried when the first is missing.
    Lines without a finite value are left out: NaN is how exporters say "unknown yet", and it would spread.
    """
    found = _find(text, name.encode())
    return found or (_find(text, name.replace(":", "_").encode()) if ":" in name else found)


def _find(text: bytes, name: bytes) -> list[Series]:
    found: list[Series] = []
    at = text.find(name)
    while at >= 0:
        end = text.find(b"\n", at)
        if end < 0:
            end = len(text)
        if at == 0 or text[at - 1] == _NEWLINE:  # else: a comment, or the middle of another name
            _collect(found, text[at + len(name) : end])
        at = text.find(name, end)
    return found


def _collect(found: list[Series], rest: bytes) -> None:
    """Parses what follows the name in a line; `rest` of a longer name starts with neither brace nor space."""
    labels: dict[str, str] = {}
    if rest.startswith(b"{"):
        closing = rest.rfind(b"}")
        pairs = _LABEL.findall(rest[1:closing].decode("utf-8", "replace"))
        labels = {key: _unescape(raw) for key, raw in pairs}
        rest = rest[closing + 1 :]
    elif not rest[:1].isspace():
        return
    try:
        value = float(rest.split()[0])  # a time stamp may follow
    except (ValueError, IndexError):
        return
    if math.isfinite(value):
        found.append(Series(labels, value))


def _unescape(raw: str) -> str:
    if "\\" not in raw:
        return raw
    return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else match[1], raw)


def first_series(text: bytes, names: Iterable[str]) -> list[Series]:
    """The samples of the first name that has any; empty when none has."""
    for name in names:
        if found := read_series(text, name):
            return found
    return []


# --------------------------------------------------------------------------- one answer -> one sample

_VLLM_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_VLLM_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_VLLM_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_SGLANG_USAGE = ("sglang:token_usage", "sglang:full_token_usage")


def parse_metrics(text: bytes, engine: EngineKind) -> LoadSample:
    """A sample of the text of `/metrics`. Several engines (data-parallel ranks) of one worker: requests, counters
    and blocks are summed, usage is the fullest rank's. Raises ValueError when the load is not in it."""
    match engine:
        case EngineKind.VLLM:
            return _vllm(text)
        case EngineKind.SGLANG:
            return _sglang(text)
        case EngineKind.UNKNOWN:
            return _vllm(text) if read_series(text, "vllm:num_requests_running") else _sglang(text)


def _vllm(text: bytes) -> LoadSample:
    running = read_series(text, "vllm:num_requests_running")
    waiting = read_series(text, "vllm:num_requests_waiting")
    if not running or not waiting:
        raise ValueError("/metrics has no vllm:num_requests_running or vllm:num_requests_waiting")
    return LoadSample(
        running=_sum(running),
        waiting=_sum(waiting),
        kv_usage=_max(first_series(text, _VLLM_USAGE)),
        prefix_queries=_sum_or_none(first_series(text, _VLLM_QUERIES)),
        prefix_hits=_sum_or_none(first_series(text, _VLLM_HITS)),
        kv_blocks=vllm_cache(read_series(text, "vllm:cache_config_info"))[1],
        start_time_unix=start_time(text),
    )


def _sglang(text: bytes) -> LoadSample:
    running = read_series(text, "sglang:num_running_reqs")
    waiting = read_series(text, "sglang:num_queue_reqs")
    if not running or not waiting:
        raise ValueError(
            "/metrics has no sglang:num_running_reqs or sglang:num_queue_reqs; start SGLang with --enable-metrics"
        )
    queries, hits = _sglang_counters(text)
    tokens = _per_rank(read_series(text, "sglang:max_total_num_tokens"))
    page = _max(read_series(text, "sglang:page_size"))
    return LoadSample(
        running=sum(_per_rank(running).values()),
        waiting=sum(_per_rank(waiting).values()),
        kv_usage=_max(first_series(text, _SGLANG_USAGE)),
        prefix_queries=queries,
        prefix_hits=hits,
        kv_blocks=int(sum(tokens.values()) // page) if tokens and page else None,
        start_time_unix=start_time(text),
    )


def _sglang_counters(text: bytes) -> tuple[float | None, float | None]:
    """Prompt tokens and cached tokens so far. `cache_source="total"` repeats the sum of the others."""
    queries = read_series(text, "sglang:prompt_tokens_total")
    hits = read_series(text, "sglang:cached_tokens_total")
    parts = [series for series in hits if series.labels.get("cache_source") != "total"]
    if not queries:
        return None, None
    return _sum(queries), _sum(parts or hits)


def vllm_cache(info: Sequence[Series]) -> tuple[int | None, int | None]:
    """Block size in tokens and cache size in such blocks over all engines, from `vllm:cache_config_info`.

    Events carry the attention block times decode-context parallelism, which only recent releases say; where blocks of
    hybrid models differ in size, only the tokens are right.
    """
    if not info:
        return None, None
    labels = info[0].labels
    block_size = _whole(labels.get("effective_attention_block_size")) or _whole(labels.get("block_size"))
    tokens = [_whole(series.labels.get("kv_cache_size_tokens")) for series in info]
    known = [count for count in tokens if count is not None]
    if block_size is not None and len(known) == len(info):
        return block_size, sum(known) // block_size
    blocks = [_whole(series.labels.get("num_gpu_blocks")) for series in info]
    counts = [count for count in blocks if count is not None]
    return block_size, sum(counts) if counts else None


def start_time(text: bytes) -> float | None:
    """Start of the worker's process in Unix seconds; servers with several processes do not say it."""
    found = read_series(text, "process_start_time_seconds")
    return found[0].value if found else None


def _whole(text: str | None) -> int | None:
    """A positive whole number of a label; None for `None`, empty and anything else."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and int(text) > 0 else None


def _sum(series: Iterable[Series]) -> float:
    return sum(item.value for item in series)


def _sum_or_none(series: list[Series]) -> float | None:
    return _sum(series) if series else None


def _max(series: Iterable[Series]) -> float:
    return max((item.value for item in series), default=0.0)


def _per_rank(series: Iterable[Series]) -> dict[str, float]:
    """SGLang: one number a data-parallel rank. Tensor and pipeline ranks repeat their rank's number; with priorities
    on, the series without a priority is the total, else the priorities add up."""
    totals: dict[str, float] = {}
    parts: dict[str, dict[str, float]] = {}
    for labels, value in series:
        rank = labels.get("dp_rank", "")
        priority = labels.get("priority", "")
        if priority:
            by_priority = parts.setdefault(rank, {})
            by_priority[priority] = max(by_priority.get(priority, 0.0), value)
        else:
            totals[rank] = max(totals.get(rank, 0.0), value)
    for rank, by_priority in parts.items():
        totals.setdefault(rank, sum(by_priority.values()))
    return totals


class _RankLoad(msgspec.Struct):
    """One entry of SGLang's `/v1/loads`; fields it has beyond these are not read."""

    num_running_reqs: float
    num_waiting_reqs: float
    token_usage: float = 0.0


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


_LOADS = msgspec.json.Decoder(_Loads)


def parse_loads(body: bytes) -> LoadSample:
    """A sample of SGLang's `GET /v1/loads` (0.5.8 on). Raises ValueError when the answer has another shape."""
    ranks = _LOADS.decode(body).loads  # msgspec's errors are ValueErrors
    if not ranks:
        raise ValueError("/v1/loads names no scheduler")
    return LoadSample(
        running=sum(rank.num_running_reqs for rank in ranks),
        waiting=sum(rank.num_waiting_reqs for rank in ranks),
        kv_usage=max(rank.token_usage for rank in ranks),
    )


# --------------------------------------------------------------------------- the loop


@dataclass(slots=True)
class PollCounts:
    """What became of a worker's polls. `last_error` is None after a good one; `counters_error` tells why an SGLang
    worker's cumulative counters are missing although its load is known."""

    ok: int = 0
    failed: int = 0
    last_error: str | None = None
    counters_error: str | None = None


class LoadPoller:
    """Polls one worker until cancelled; a good sample goes to `on_sample(worker, sample)` at once.

    `counts` is read by metrics and the admin port. `engine` is what probing found.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        engine: EngineKind,
        *,
        client: ControlClient,
        on_sample: Callable[[WorkerId, LoadSample], None],
        random: Random,
        poll_s: float = 1.0,
        timeout_s: float = 2.0,
    ) -> None:
        self.worker = spec.name
        self.counts = PollCounts()
        self._spec = spec
        self._engine = engine
        self._client = client
        plain = spec.url.startswith("http://")
        self._line = PollLine(spec.url, api_key=spec.api_key) if plain else None
        self._on_sample = on_sample
        self._random = random
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._loads_missing = engine is not EngineKind.SGLANG
        self._counters: LoadSample | None = None
        self._until_counters = 0

    async def run(self) -> None:
        """Never returns. The first poll comes after a small part of a period: a fleet's polls do not start as one."""
        try:
            await asyncio.sleep(self._poll_s * self._random.random() * JITTER)
            while True:
                await self.poll()
                await asyncio.sleep(self._poll_s * self._random.uniform(1 - JITTER, 1 + JITTER))
        finally:
            self.close()

    def close(self) -> None:
        """Drop the kept connection; a later poll opens one."""
        if self._line is not None:
            self._line.close()

    async def poll(self) -> None:
        """One poll; a failure is counted and kept in `counts.last_error`."""
        try:
            sample = await self._sample()
        except (ProbeFailed, ValueError) as error:
            self.counts.failed += 1
            self.counts.last_error = str(error)
            return
        self.counts.ok += 1
        self.counts.last_error = None
        self._on_sample(self.worker, sample)

    async def _sample(self) -> LoadSample:
        if self._loads_missing:
            return parse_metrics(await self._get("/metrics"), self._engine)
        answer = await self._ask("/v1/loads?include=core")
        if answer.status == 404:  # SGLang before 0.5.8
            self._loads_missing = True
            return parse_metrics(await self._get("/metrics"), self._engine)
        if answer.status != 200:
            raise ProbeFailed(f"{self._spec.url}/v1/loads answered {answer.status}")
        sample = parse_loads(answer.body)
        counters = await self._sglang_counters()
        if counters is None:
            return sample
        return replace(
            sample,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            kv_blocks=counters.kv_blocks,
            start_time_unix=counters.start_time_unix,
        )

    async def _sglang_counters(self) -> LoadSample | None:
        """The counters of the last look into `/metrics`; None where SGLang runs without `--enable-metrics`, which is
        no failure of the poll."""
        if self._until_counters > 0:
            self._until_counters -= 1
            return self._counters
        self._until_counters = COUNTER_POLLS - 1
        try:
            self._counters = parse_metrics(await self._get("/metrics"), self._engine)
            self.counts.counters_error = None
        except (ProbeFailed, ValueError) as error:
            self._counters = None
            self.counts.counters_error = str(error)
        return self._counters

    async def _ask(self, target: str) -> Answer:
        if self._line is not None:
            return await self._line.get(target, timeout_s=self._timeout_s)
        return await self._client.get(self._spec.url + target, api_key=self._spec.api_key, timeout_s=self._timeout_s)

    async def _get(self, path: str) -> bytes:
        answer = await self._ask(path)
        if answer.status != 200:
            raise ProbeFailed(f"{self._spec.url}{path} answered {answer.status}")
        return answer.body
