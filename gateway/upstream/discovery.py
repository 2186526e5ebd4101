"""What a worker is, learned from its URL alone: engine, models, cache geometry, event endpoints.

Asked: `/v1/models`, then all at once `/version` (vLLM), `/server_info` or `/get_server_info` (SGLang), `/metrics`,
`/kv_event_sources` (vLLM 0.31 on). What `WorkerSpec` states wins over what the worker says.

Rules:
1. One call is one try. Whoever calls retries a worker that is not up yet.
2. Only `/v1/models` and what tells the engine must answer; anything else missing becomes a finding, and the worker
   serves without it.
3. A worker that is asked again and does not answer an optional path (too slow, 5xx) has not changed in what that path
   tells: a busy worker must not lose its block size and its event feeds over a time-out.
4. Whether answers report cached tokens is known of SGLang (`enable_cache_report`); vLLM does not say it, its answers
   do. Whether a worker wants a key is asked once, without the key.
5. A worker that is a gateway is one like any other, unless it leads back to the one that asks.
6. Nothing of `/server_info` is kept beyond the named fields: it holds the engine's own keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec

from gateway import findings as table
from gateway.errors import UNREADABLE
from gateway.kv.events import names_prefixes
from gateway.pool import MAX_WORKERS
from gateway.records import EngineKind, Finding, WorkerFacts, WorkerSpec
from gateway.upstream.control import Answer, ControlClient, LoopsBack, ProbeFailed
from gateway.upstream.endpoints import (
    SglangEvents,
    VllmSource,
    configured_sources,
    sglang_loads,
    sglang_sources,
    vllm_sources,
)
from gateway.upstream.load_text import MOST, Series, block_tokens, read_series, start_time, vllm_cache
from gateway.upstream.ranks import rank_numbers, release_number, routes_ranks, without_collisions

_MOST_MODELS = 4096
"""Each name is a pool, and all pools are looked at when a worker joins: some hundredths of a second for so many."""

_NAMES_SHOWN = 20


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class _ServerInfo(msgspec.Struct):
    """`model_path` is what tells SGLang from other servers that have a path of this name."""

    model_path: str
    tokenizer_path: str | None = None
    version: str = ""
    page_size: int | None = None
    max_total_num_tokens: int | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 1
    disable_radix_cache: bool | None = None
    enable_cache_report: bool | None = None
    enable_session_radix_cache: bool | None = None
    decode_log_interval: int | None = None
    kv_events: SglangEvents | None = None


_T = TypeVar("_T")

_LATE_STEPS = 20
"""Decode steps between two publications of SGLang's events, above which they count as late: about half a second."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """Everything the worker said, decoded; None where it does not have the path."""

    models: _Models
    gateways: tuple[str, ...]
    version: _Version | None
    info: _ServerInfo | None
    metrics: bytes
    sources: dict[int, VllmSource] | None
    findings: tuple[Finding, ...]
    metrics_silent: bool
    sources_silent: bool
    info_silent: bool
    needs_key: bool | None


async def probe(spec: WorkerSpec, client: ControlClient, *, known: WorkerFacts | None = None) -> WorkerFacts:
    """Asks the worker once. Raises ProbeFailed when it is not there, not ready or no inference server; the message
    says what to do. `known` is what an earlier probe found (rule 3)."""
    said = await _ask(spec, client, first=known is None)
    if known is not None and known.engine is EngineKind.SGLANG and said.info_silent:
        raise ProbeFailed(f"{spec.url}/server_info did not answer; is the worker overloaded?")
    findings = list(said.findings)
    engine, version = _engine(spec, said)
    models, adapters = _models(spec, said.models)
    info = read_series(said.metrics, "vllm:cache_config_info")
    host = urlsplit(spec.url).hostname or ""
    match engine:
        case EngineKind.VLLM:
            block_size, kv_blocks = vllm_cache(info)
            if info and info[0].labels.get("enable_prefix_caching") == "False":
                findings.append(table.PREFIX_CACHING_OFF.found(engine))
            sources = vllm_sources(said.sources, host, findings, wanted=spec.kv_events is None)
            numbers = [*_engines(info), *sources]
        case EngineKind.SGLANG:
            block_size, kv_blocks = _sglang_cache(said, findings)
            sources = sglang_sources(
                said.info.kv_events if said.info else None, host, findings, wanted=spec.kv_events is None
            )
            numbers = [*range(said.info.dp_size if said.info else 0), *sources]
        case EngineKind.UNKNOWN:
            block_size, kv_blocks, sources, numbers = None, None, {}, []
            findings.append(table.ENGINE_UNKNOWN.found())
    if spec.block_size is not None and block_size not in (None, spec.block_size):
        findings.append(table.BLOCK_SIZE_WRONG.found(configured=spec.block_size, by="configured", said=block_size))
    ranks = rank_numbers(spec, numbers, findings)
    events = without_collisions(configured_sources(spec, host, sources, ranks), findings)
    routing = routes_ranks(spec, engine, version, ranks, findings)
    if events:
        findings += _release_findings(engine, version, adapters=bool(adapters))
        if table.HASHES_NOT_CHAINED.code in {finding.code for finding in findings}:
            events = ()  # what they say would be matched to the wrong prefixes
    facts = WorkerFacts(
        engine=engine,
        version=version,
        models=models,
        adapters=adapters,
        block_size=spec.block_size or block_size,
        kv_blocks=spec.kv_blocks or kv_blocks,
        max_model_len=_context_length(said.models),
        events=events,
        start_time_unix=start_time(said.metrics),
        findings=tuple(findings),
        root=_root(said, models),
        ranks=ranks,
        rank_routing=routing,
        cached_tokens_reported=said.info.enable_cache_report if said.info is not None else None,
        keeps_sessions=_keeps_sessions(said),
        loads=sglang_loads(said.info.kv_events if said.info is not None else None, host),
        gateways=said.gateways,
        needs_key=said.needs_key if known is None else known.needs_key,
    )
    if known is None or (known.engine, known.version) != (engine, version):
        return facts
    return _completed(facts, said, known)


def _completed(facts: WorkerFacts, said: _Answers, known: WorkerFacts) -> WorkerFacts:
    """Rule 3: what the silent paths would have told, from the probe before."""
    if said.metrics_silent:
        facts = replace(
            facts,
            block_size=facts.block_size or known.block_size,
            kv_blocks=facts.kv_blocks or known.kv_blocks,
            start_time_unix=known.start_time_unix,
        )
    # Ranks are counted in both.
    if said.sources_silent or said.metrics_silent:
        facts = replace(facts, events=known.events, ranks=known.ranks, rank_routing=known.rank_routing)
    return facts


async def serves_the_same(spec: WorkerSpec, client: ControlClient, known: WorkerFacts) -> bool:
    """One question to a worker whose process is known to be the same: whether it serves what it did. All else is said
    once for a process. Raises ProbeFailed when it is not there or not ready."""
    answer = await client.get(f"{spec.url}/v1/models", api_key=spec.api_key)
    _check_models(spec, answer, client)
    said = _decode(answer, _Models, f"{spec.url}/v1/models")
    models, adapters = _models(spec, said)
    found = models, adapters, _context_length(said), answer.gateways
    return found == (known.models, known.adapters, known.max_model_len, known.gateways)


# --------------------------------------------------------------------------- asking


async def _ask(spec: WorkerSpec, client: ControlClient, *, first: bool) -> _Answers:
    wants_vllm = spec.engine is not EngineKind.SGLANG
    wants_sglang = spec.engine is not EngineKind.VLLM
    findings: list[Finding] = []
    models = await client.get(f"{spec.url}/v1/models", api_key=spec.api_key)
    _check_models(spec, models, client)
    try:
        async with asyncio.TaskGroup() as group:
            asking_version = group.create_task(_if(wants_vllm, client, spec, "/version"))
            asking_info = group.create_task(_server_info(wants_sglang, client, spec, asking_version))
            asking_metrics = group.create_task(_optional(True, client, spec, "/metrics", findings))
            asking_need = group.create_task(_needs_key(spec, client, first=first))
            asking_sources = group.create_task(_optional(wants_vllm, client, spec, "/kv_event_sources", findings))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    version, metrics = asking_version.result(), asking_metrics.result()
    info, info_silent = asking_info.result()
    sources = asking_sources.result()
    if metrics is None or metrics.status != 200:
        findings.append(table.METRICS_OFF.found(EngineKind.UNKNOWN if info is None else EngineKind.SGLANG))
    return _Answers(
        models=_decode(models, _Models, f"{spec.url}/v1/models"),
        gateways=models.gateways,
        version=_maybe(version, _Version),
        info=info,
        metrics=metrics.body if metrics is not None and metrics.status == 200 else b"",
        sources=_rank_sources(sources),
        findings=tuple(findings),
        metrics_silent=_silent(metrics),
        sources_silent=wants_vllm and _silent(sources),
        info_silent=info_silent,
        needs_key=asking_need.result(),
    )


async def _if(wanted: bool, client: ControlClient, spec: WorkerSpec, path: str) -> Answer | None:
    return await client.get(spec.url + path, api_key=spec.api_key) if wanted else None


async def _server_info(
    wanted: bool, client: ControlClient, spec: WorkerSpec, version: asyncio.Task[Answer | None]
) -> tuple[_ServerInfo | None, bool]:
    """What SGLang says of itself, and whether it may have something to say and did not (rule 3). vLLM has a path so
    named in its development mode, and looks over the whole machine to answer: it is not asked."""
    if not wanted or _maybe(await version, _Version) is not None:
        return None, False
    silent = False
    for path in ("/server_info", "/get_server_info"):  # the second up to 0.5.7
        answer = await _if(wanted, client, spec, path)
        if (info := _maybe(answer, _ServerInfo)) is not None:
            return info, False
        silent = silent or (wanted and _silent(answer))
    return None, silent


async def _needs_key(spec: WorkerSpec, client: ControlClient, *, first: bool) -> bool | None:
    """Whether the worker refuses who has no key; without a configured one it has just served us."""
    if spec.api_key is None:
        return False
    if not first:
        return None
    try:
        status = (await client.get(f"{spec.url}/v1/models")).status
    except ProbeFailed:
        return None
    return status in (401, 403) if status < 500 else None


async def _optional(
    wanted: bool, client: ControlClient, spec: WorkerSpec, path: str, findings: list[Finding]
) -> Answer | None:
    try:
        return await _if(wanted, client, spec, path)
    except ProbeFailed as error:
        findings.append(table.PATH_SILENT.found(problem=error.message))
        return None


def _silent(answer: Answer | None) -> bool:
    return answer is None or answer.status >= 500


def _check_models(spec: WorkerSpec, answer: Answer, client: ControlClient) -> None:
    if client.own in answer.gateways:
        behind = (
            "is this gateway itself" if answer.gateways[0] == client.own else "is a gateway that leads back to this"
        )
        raise LoopsBack(
            f"worker {spec.name}: {spec.url} {behind}: requests would go round in a circle; give the engine's address",
            answer.gateways,
        )
    match answer.status:
        case 200:
            return
        case 401 | 403:
            fix = "the worker wants an API key; set api_key of this worker"
        case 404:
            fix = "this is no OpenAI-compatible server, or the URL has a path too many"
        case 503:
            fix = "the worker is still loading its model"
        case _:
            fix = "look into the worker's log"
    raise ProbeFailed(f"worker {spec.name}: {spec.url}/v1/models answered {answer.status}; {fix}")


def _decode(answer: Answer, shape: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(answer.body, type=shape)
    except UNREADABLE as error:
        raise ProbeFailed(f"{where} answered something unexpected ({error}); is this an inference worker?") from error


def _maybe(answer: Answer | None, shape: type[_T]) -> _T | None:
    """None when the path is missing or belongs to something else with the same name."""
    if answer is None or answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=shape)
    except UNREADABLE:
        return None


def _rank_sources(answer: Answer | None) -> dict[int, VllmSource] | None:
    """vLLM keys the ranks by their number as a string. None: the path is missing or unreadable."""
    ranks = _maybe(answer, dict[int, VllmSource])
    if ranks is None:
        return None
    return {rank: item for rank, item in ranks.items() if item.enable_kv_cache_events and item.publisher == "zmq"}


# --------------------------------------------------------------------------- engine and models


def _engine(spec: WorkerSpec, said: _Answers) -> tuple[EngineKind, str]:
    kind = spec.engine if spec.engine is not EngineKind.UNKNOWN else _recognised(said)
    if kind is EngineKind.SGLANG and said.info is not None:
        return kind, said.info.version
    return kind, said.version.version if said.version is not None else ""


def _keeps_sessions(said: _Answers) -> bool:
    """SGLang takes the session of a request from its body since 0.5.16."""
    info = said.info
    if info is None or not info.enable_session_radix_cache:
        return False
    release = release_number(info.version)
    return release is None or release >= (0, 5, 16)


def _recognised(said: _Answers) -> EngineKind:
    if said.version is not None:
        return EngineKind.VLLM
    if said.info is not None:
        return EngineKind.SGLANG
    owners = {model.owned_by for model in said.models.data}  # behind a proxy only the OpenAI paths may be left
    return next((kind for kind in EngineKind if kind in owners), EngineKind.UNKNOWN)


def _models(spec: WorkerSpec, said: _Models) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of base models, and adapter -> base. An adapter whose base is not served under the name it gives belongs
    to the first base."""
    bases = [model.id for model in said.data if model.parent is None]
    if not bases:
        raise ProbeFailed(f"worker {spec.name}: {spec.url}/v1/models names no model; is one loaded?")
    adapters = {
        model.id: model.parent if model.parent in bases else bases[0] for model in said.data if model.parent is not None
    }
    if not spec.models:
        if len(said.data) > _MOST_MODELS:
            raise ProbeFailed(
                f"worker {spec.name}: {spec.url}/v1/models names {len(said.data)} models, more than {_MOST_MODELS}; "
                "set models of this worker to those that it is to serve here"
            )
        return tuple(bases), adapters
    missing = [name for name in spec.models if name not in bases and name not in adapters]
    # SGLang serves any name, so a configured one it does not announce is fine there.
    if missing and any(model.owned_by == EngineKind.VLLM for model in said.data):
        raise ProbeFailed(
            f"worker {spec.name}: serves {_some([*bases, *adapters])}, but models says {', '.join(missing)}; "
            "correct models or the worker's --served-model-name"
        )
    chosen = {name: base for name, base in adapters.items() if name in spec.models}
    return tuple(name for name in spec.models if name not in chosen), chosen


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")


def _context_length(said: _Models) -> int | None:
    return next((model.max_model_len for model in said.data if model.max_model_len), None)


def _root(said: _Answers, models: tuple[str, ...]) -> str | None:
    """Where the first base model's tokenizer is, as the worker sees it. SGLang's `/v1/models` only repeats the name."""
    if said.info is not None:
        return said.info.tokenizer_path or said.info.model_path
    return next((model.root for model in said.models.data if model.id in models), None)


# --------------------------------------------------------------------------- ranks and cache geometry


def _engines(info: list[Series]) -> list[int]:
    """Numbers of vLLM's data-parallel ranks, from the label `engine` of its `cache_config_info`."""
    labels = (series.labels.get("engine", "") for series in info)
    return [int(label) for label in labels if label.isascii() and label.isdigit()]


def _sglang_cache(said: _Answers, findings: list[Finding]) -> tuple[int | None, int | None]:
    info = said.info
    if info is None:
        return None, None
    if info.disable_radix_cache:
        findings.append(table.PREFIX_CACHING_OFF.found(EngineKind.SGLANG))
    if info.enable_cache_report is False:
        findings.append(table.HITS_NOT_REPORTED.found(EngineKind.SGLANG))
    if info.decode_log_interval is not None and info.decode_log_interval > _LATE_STEPS:
        findings.append(table.DECODE_LOG_INTERVAL.found(steps=info.decode_log_interval))
    events = info.kv_events.block_size if info.kv_events is not None else None
    block_size = block_tokens(events) or block_tokens(info.page_size)
    if block_size == 1:
        findings.append(table.PAGE_SIZE_1.found())
    tokens = info.max_total_num_tokens
    known = tokens is not None and 0 < tokens <= MOST
    return block_size, tokens * info.dp_size // block_size if tokens and known and block_size else None


# --------------------------------------------------------------------------- what releases leave out of their events


def _release_findings(engine: EngineKind, version: str, *, adapters: bool) -> list[Finding]:
    """What the events of this release cannot tell."""
    release = release_number(version)
    if release is None:
        return []
    findings: list[Finding] = []
    sglang = engine is EngineKind.SGLANG
    if not names_prefixes(engine, release):
        return [table.HASHES_NOT_CHAINED.found(version=version)]
    if release < ((0, 5, 18) if sglang else (0, 17, 0)):
        findings.append(table.SALT_HIDDEN.found(engine, release=f"{engine} {version}"))
    if adapters and release < ((0, 5, 23) if sglang else (0, 14, 0)):
        findings.append(table.ADAPTER_HIDDEN.found(engine, release=f"{engine} {version}"))
    return findings
