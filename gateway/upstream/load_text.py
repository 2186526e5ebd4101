"""What engines say about their load: the text of `/metrics`, SGLang's `/v1/loads` and `/get_load`, turned into samples.

Rules:
1. Only the lines needed are parsed: 65 to 92 KB of text a worker and second, of which about ten lines matter. They are
   found once, however many ranks there are.
2. Data-parallel ranks are told apart by the label `engine` (vLLM) or `dp_rank` (SGLang): one sample for each, or one
   for all of them together.
3. Nothing is guessed: what a text does not hold is None in the sample, and a text without the load is an error.

Names and their history: vLLM `vllm:*` (0.9 to 0.33, the `gpu_` names up to 0.11), SGLang `sglang:*`, `GET /v1/loads`
(0.5.8 on) and `GET /get_load` (0.5.3 to 0.5.20).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, TypeVar

import msgspec

from gateway.records import EngineKind, LoadSample

# --------------------------------------------------------------------------- Prometheus text


class Series(NamedTuple):
    """One sample line of a metric: labels (unescaped) and value."""

    labels: Mapping[str, str]
    value: float


MOST: Final = 1 << 40
"""More requests, tokens or blocks than any worker has."""

_LARGEST_BLOCK: Final = 1 << 20

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


# --------------------------------------------------------------------------- one answer -> samples

_Found = Mapping[str, Sequence[Series]]
"""Samples by a short name of ours."""

_VLLM = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "cache": ("vllm:cache_config_info",),
    "adapters": ("vllm:lora_requests_info",),
}
_SGLANG = {
    "running": ("sglang:num_running_reqs",),
    "waiting": ("sglang:num_queue_reqs",),
    "usage": ("sglang:token_usage", "sglang:full_token_usage"),
    "tokens": ("sglang:max_total_num_tokens",),
    "page": ("sglang:page_size",),
    "queries": ("sglang:prompt_tokens_total",),
    "hits": ("sglang:cached_tokens_total",),
    "slots": ("sglang:lora_pool_slots_total",),
}
"""`queries` and `hits` of SGLang are counted in front of the ranks, so they have no rank."""


def parse_metrics(text: bytes, engine: EngineKind) -> LoadSample:
    """A sample of the text of `/metrics`, all ranks together: requests, counters and blocks are summed, usage is the
    fullest rank's. Raises ValueError when the load is not in it."""
    kind, found = _read(text, engine)
    sample = _vllm(found) if kind is EngineKind.VLLM else _sglang(found)
    return replace(_possible(sample), start_time_unix=start_time(text))


def parse_ranks(text: bytes, engine: EngineKind, ranks: Iterable[int]) -> dict[int | None, LoadSample]:
    """A sample for each of the ranks that is in the text. Raises ValueError when none is."""
    kind, found = _read(text, engine)
    started = start_time(text)
    samples: dict[int | None, LoadSample] = {}
    label = "engine" if kind is EngineKind.VLLM else "dp_rank"
    for rank in ranks:
        own = {name: [item for item in items if item.labels.get(label) == str(rank)] for name, items in found.items()}
        if not own["running"] or not own["waiting"]:
            continue
        if kind is EngineKind.VLLM:
            shared = [item for item in found["adapters"] if label not in item.labels]
            sample = _vllm(own | {"adapters": own["adapters"] or shared})
            blocks = vllm_cache(found["cache"])[1]
            sample = replace(sample, kv_blocks=blocks // len(found["cache"]) if blocks is not None else None)
        else:
            sample = _sglang(own | {"page": found["page"]})
        samples[rank] = replace(_possible(sample), start_time_unix=started)
    if not samples:
        raise ValueError(f"/metrics has no num_requests_running or num_running_reqs with a label {label!r}")
    return samples


def _read(text: bytes, engine: EngineKind) -> tuple[EngineKind, _Found]:
    """Which engine's names the text has, and their samples."""
    if engine is not EngineKind.SGLANG:
        found = {name: first_series(text, names) for name, names in _VLLM.items()}
        if found["running"] or engine is EngineKind.VLLM:
            return EngineKind.VLLM, found
    return EngineKind.SGLANG, {name: first_series(text, names) for name, names in _SGLANG.items()}


def _vllm(found: _Found) -> LoadSample:
    if not found["running"] or not found["waiting"]:
        raise ValueError("/metrics has no vllm:num_requests_running or vllm:num_requests_waiting")
    adapters, slots = _vllm_adapters(found["adapters"])
    return LoadSample(
        running=_sum(found["running"]),
        waiting=_sum(found["waiting"]),
        kv_usage=_max(found["usage"]),
        prefix_queries=_sum_or_none(found["queries"]),
        prefix_hits=_sum_or_none(found["hits"]),
        kv_blocks=vllm_cache(found["cache"])[1],
        adapters=adapters,
        adapter_slots=slots,
    )


def _vllm_adapters(series: Sequence[Series]) -> tuple[tuple[str, ...], int | None]:
    """Adapters of waiting and of running requests, and how many fit on the GPU. Each change of the lists makes a new
    series whose value is the time of the change, and old ones stay: the newest of each engine counts."""
    newest: dict[str, Series] = {}
    for item in series:
        engine = item.labels.get("engine", "")
        if engine not in newest or item.value >= newest[engine].value:
            newest[engine] = item
    names = [
        name.strip()
        for key in ("waiting_lora_adapters", "running_lora_adapters")
        for item in newest.values()
        for name in item.labels.get(key, "").split(",")
    ]
    slots = [found for item in newest.values() if (found := _whole(item.labels.get("max_lora"))) is not None]
    return tuple(dict.fromkeys(filter(None, names))), max(slots, default=None)


def _sglang(found: _Found) -> LoadSample:
    if not found["running"] or not found["waiting"]:
        raise ValueError(
            "/metrics has no sglang:num_running_reqs or sglang:num_queue_reqs; start SGLang with --enable-metrics"
        )
    queries, hits = _sglang_counters(found)
    tokens = _per_rank(found["tokens"])
    page = _max(found["page"])
    return LoadSample(
        running=sum(_per_rank(found["running"]).values()),
        waiting=sum(_per_rank(found["waiting"]).values()),
        kv_usage=_max(found["usage"]),
        prefix_queries=queries,
        prefix_hits=hits,
        kv_blocks=_size(sum(tokens.values()) // page) if tokens and page else None,
        adapter_slots=int(_max(found["slots"]) or 0) or None,
    )


def _sglang_counters(found: _Found) -> tuple[float | None, float | None]:
    """Prompt tokens and cached tokens so far. `cache_source="total"` repeats the sum of the others."""
    queries, hits = found["queries"], found["hits"]
    parts = [series for series in hits if series.labels.get("cache_source") != "total"]
    if not queries:
        return None, None
    return _sum(queries), _sum(parts or hits)


def vllm_cache(info: Sequence[Series]) -> tuple[int | None, int | None]:
    """Block size in tokens and cache size in such blocks over all ranks, from `vllm:cache_config_info`.

    Events carry the attention block times decode-context parallelism, which only recent releases say; where blocks of
    hybrid models differ in size, only the tokens are right. `kv_cache_size_tokens` is one rank's, `num_gpu_blocks` the
    sum over the ranks of the server, repeated in each rank's line (`v1/engine/core_client.py`).
    """
    if not info:
        return None, None
    labels = info[0].labels
    block_size = block_tokens(_whole(labels.get("effective_attention_block_size")) or _whole(labels.get("block_size")))
    tokens = [_whole(series.labels.get("kv_cache_size_tokens")) for series in info]
    known = [count for count in tokens if count is not None]
    if block_size is not None and len(known) == len(info):
        return block_size, sum(known) // block_size
    blocks = [_whole(series.labels.get("num_gpu_blocks")) for series in info]
    return block_size, max((count for count in blocks if count is not None), default=None)


def block_tokens(said: int | None) -> int | None:
    """A block size as a worker tells it; None for what can be none: the keys of its whole pool are cut by it."""
    return said if said is not None and 0 < said <= _LARGEST_BLOCK else None


def start_time(text: bytes) -> float | None:
    """Start of the worker's process in Unix seconds; servers with several processes do not say it."""
    found = read_series(text, "process_start_time_seconds")
    return found[0].value if found else None


def _whole(text: str | None) -> int | None:
    """A positive whole number of a label that can be a size; None for `None`, empty and anything else."""
    digits = text is not None and len(text) < 16 and text.isascii() and text.isdigit()
    return _size(int(text)) if text is not None and digits else None


def _size(number: float) -> int | None:
    """A size in tokens or blocks as a worker tells it; None for what can be none."""
    return int(number) if 0 < number <= MOST else None


def _possible(sample: LoadSample) -> LoadSample:
    """Raises ValueError for numbers of requests that cannot be: waits, limits and prices are made of them."""
    if not (0.0 <= sample.running <= MOST and 0.0 <= sample.waiting <= MOST):
        raise ValueError(f"{sample.running:g} requests running and {sample.waiting:g} waiting is no load")
    return sample


def _sum(series: Iterable[Series]) -> float:
    return sum(item.value for item in series)


def _sum_or_none(series: Sequence[Series]) -> float | None:
    return _sum(series) if series else None


def _max(series: Iterable[Series]) -> float | None:
    return max((item.value for item in series), default=None)


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
    token_usage: float | None = None
    dp_rank: int = 0


class _OldLoad(msgspec.Struct):
    """One entry of SGLang's `/get_load`. `num_reqs` has the waiting ones too, `num_tokens` their prompts."""

    num_reqs: float
    num_waiting_reqs: float
    num_tokens: int | None = None
    dp_rank: int = 0


class _Loads(msgspec.Struct):
    loads: list[_RankLoad]


_T = TypeVar("_T")

_LOADS = msgspec.json.Decoder(_Loads)
_OLD_LOADS = msgspec.json.Decoder(list[_OldLoad])


def parse_loads(body: bytes, ranks: Sequence[int]) -> dict[int | None, LoadSample]:
    """Samples of SGLang's `GET /v1/loads`: one for each of `ranks` that it names, or without ranks one for all, under
    None. Raises ValueError when it has none, or another shape."""
    found = [
        (load.dp_rank, _possible(LoadSample(load.num_running_reqs, load.num_waiting_reqs, load.token_usage)))
        for load in _decoded(_LOADS, body).loads
    ]
    return _by_rank(found, ranks, "/v1/loads")


def parse_old_loads(body: bytes, ranks: Sequence[int]) -> dict[int | None, LoadSample]:
    """The same of `GET /get_load`."""
    found = [
        (
            load.dp_rank,
            _possible(
                LoadSample(
                    max(0.0, load.num_reqs - load.num_waiting_reqs),
                    load.num_waiting_reqs,
                    None,
                    kv_tokens=_size(load.num_tokens or 0),
                )
            ),
        )
        for load in _decoded(_OLD_LOADS, body)
    ]
    return _by_rank(found, ranks, "/get_load")


def _decoded(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Raises ValueError, as all of msgspec's decoding errors are."""
    try:
        return decoder.decode(body)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _by_rank(found: Sequence[tuple[int, LoadSample]], ranks: Sequence[int], path: str) -> dict[int | None, LoadSample]:
    if ranks:
        samples: dict[int | None, LoadSample] = {rank: sample for rank, sample in found if rank in ranks}
        if not samples:
            raise ValueError(f"{path} names none of the data-parallel ranks")
        return samples
    if not found:
        raise ValueError(f"{path} names no scheduler")
    return {None: together([sample for _, sample in found])}


def together(ranks: Sequence[LoadSample]) -> LoadSample:
    """The load of ranks that are one worker, at least one: requests and tokens are summed, usage is the fullest one's.
    What only a whole server says is left out."""
    usages = [sample.kv_usage for sample in ranks if sample.kv_usage is not None]
    tokens = [sample.kv_tokens for sample in ranks if sample.kv_tokens is not None]
    return LoadSample(
        running=sum(sample.running for sample in ranks),
        waiting=sum(sample.waiting for sample in ranks),
        kv_usage=max(usages, default=None),
        kv_tokens=sum(tokens) if tokens else None,
        source=ranks[0].source,
    )
