"""The pages a simulated engine shows beside inference, as vLLM 0.32 and SGLang 0.5.23 have them.

Pure text and JSON from numbers given; names and labels are those gateways and dashboards read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from gateway.sim.host import EngineHost
from gateway.sim.load_publisher import LOAD_TOPIC

ADAPTER_SLOTS = 8
"""Adapters that an engine has on its GPU."""

_TOKEN_BYTES = 131_072
"""KV of one token of an 8B model in 16 bits: 2 x 32 layers x 8 heads x 128 x 2 bytes."""

_Row = tuple[str, str, str, float]
"""Name, type, labels and value of one series."""


def _exposition(rows: Iterable[_Row]) -> bytes:
    """Prometheus text; series of one name stand together under one head."""
    families: dict[str, list[_Row]] = {}
    for row in rows:
        families.setdefault(row[0], []).append(row)
    lines: list[str] = []
    for name, family in families.items():
        lines.append(f"# HELP {name} Simulated.\n# TYPE {name} {family[0][1]}\n")
        lines += [f"{name}{series} {float(value)!r}\n" for _, _, series, value in family]
    return "".join(lines).encode()


def vllm_metrics(ranks: Iterable[EngineHost], *, model: str, unix_s: float) -> bytes:
    """Counters are in tokens; `kv_cache_usage_perc` counts idle cached blocks as free. A rank is an `engine`."""
    rows: list[_Row] = []
    for host in ranks:
        engine, counters, gauges = host.engine, host.engine.counters, host.gauges
        labels = f'{{engine="{host.rank}",model_name="{model}"}}'
        size, blocks = engine.block_size, engine.capacity_blocks
        config = (
            f'{{block_size="{size}",cache_dtype="auto",effective_attention_block_size="{size}",'
            f'enable_prefix_caching="True",engine="{host.rank}",kv_cache_size_tokens="{blocks * size}",'
            f'num_cpu_blocks="None",num_gpu_blocks="{blocks}",prefix_caching_hash_algo="sha256",sliding_window="None"}}'
        )
        if host.rank == 0:
            rows.append(("process_start_time_seconds", "gauge", "", host.start_time_unix))
        rows += [
            ("vllm:num_requests_running", "gauge", labels, gauges.running),
            ("vllm:num_requests_waiting", "gauge", labels, gauges.waiting),
            ("vllm:kv_cache_usage_perc", "gauge", labels, gauges.kv_usage),
            ("vllm:prefix_cache_queries_total", "counter", labels, counters.queried_tokens),
            ("vllm:prefix_cache_hits_total", "counter", labels, counters.hit_tokens),
            ("vllm:prompt_tokens_total", "counter", labels, host.prompt_tokens),
            ("vllm:generation_tokens_total", "counter", labels, host.generated_tokens),
            ("vllm:num_preemptions_total", "counter", labels, 0),
            ("vllm:request_success_total", "counter", labels[:-1] + ',finished_reason="length"}', counters.finished),
            ("vllm:cache_config_info", "gauge", config, 1),
        ]
        if host.settings.adapters:
            running, waiting = (",".join(host.adapters(running=running)) for running in (True, False))
            lists = f'running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
            rows.append(("vllm:lora_requests_info", "gauge", f'{{max_lora="{ADAPTER_SLOTS}",{lists}}}', unix_s))
        if engine.host_capacity:
            rows += [
                ("vllm:kv_offload_load_bytes_total", "counter", labels, counters.loaded_tokens * _TOKEN_BYTES),
                ("vllm:kv_offload_load_time_total", "counter", labels, counters.load_s),
            ]
    return _exposition(rows)


def sglang_metrics(ranks: Sequence[EngineHost], *, model: str) -> bytes:
    """Gauges are as old as the rank's last report, see `gateway.sim.host`. There is no process start time."""
    rows: list[_Row] = []
    for host in ranks:
        engine, counters, gauges = host.engine, host.engine.counters, host.gauges
        front = f'engine_type="unified",model_name="{model}"'
        rank = f'dp_rank="{host.rank}",' if len(ranks) > 1 else ""
        labels = f'{{{rank}{front},moe_ep_rank="0",pp_rank="0",tp_rank="0"}}'
        capacity = engine.capacity_blocks * engine.block_size
        used = round(gauges.kv_usage * capacity)
        rows += [
            ("sglang:num_running_reqs", "gauge", labels, gauges.running),
            ("sglang:num_queue_reqs", "gauge", labels, gauges.waiting),
            ("sglang:token_usage", "gauge", labels, gauges.kv_usage),
            ("sglang:full_token_usage", "gauge", labels, gauges.kv_usage),
            ("sglang:num_used_tokens", "gauge", labels, used),
            ("sglang:max_total_num_tokens", "gauge", labels, capacity),
            ("sglang:page_size", "gauge", labels, engine.block_size),
            ("sglang:num_pages", "gauge", labels, engine.capacity_blocks),
            ("sglang:prompt_tokens_total", "counter", f"{{{rank}{front}}}", host.prompt_tokens),
            ("sglang:generation_tokens_total", "counter", f"{{{rank}{front}}}", host.generated_tokens),
            (
                "sglang:cached_tokens_total",
                "counter",
                f'{{{rank}cache_source="device",{front}}}',
                counters.hit_tokens,
            ),
            ("sglang:num_requests_total", "counter", f"{{{rank}{front}}}", counters.finished),
            ("sglang:evicted_tokens_total", "counter", labels, counters.evicted_blocks * engine.block_size),
        ]
        if host.settings.adapters:
            rows.append(("sglang:lora_pool_slots_total", "gauge", labels, ADAPTER_SLOTS))
        if engine.host_capacity:
            size = engine.block_size
            rows += [
                ("sglang:hicache_host_used_tokens", "gauge", labels, engine.host_blocks * size),
                ("sglang:hicache_host_total_tokens", "gauge", labels, engine.host_capacity * size),
            ]
    return _exposition(rows)


def sglang_loads(ranks: Sequence[EngineHost], *, version: str, unix_s: float) -> bytes:
    """`/v1/loads`: what each rank's scheduler knows now."""
    loads = []
    for host in ranks:
        engine, model = host.engine, host.model
        capacity = engine.capacity_blocks * engine.block_size
        used = engine.in_use_blocks * engine.block_size
        loads.append(
            {
                "timestamp": unix_s,
                "dp_rank": host.rank,
                "num_running_reqs": engine.running,
                "num_waiting_reqs": engine.waiting,
                "num_used_tokens": used,
                "num_total_tokens": used,
                "max_total_num_tokens": capacity,
                "max_running_requests": model.max_running,
                "token_usage": round(engine.kv_usage, 4),
            }
        )
    when = datetime.fromtimestamp(unix_s, UTC).isoformat()
    page = {"timestamp": when, "version": version, "accelerator": None, "num_accelerators": 1, "loads": loads}
    return msgspec.json.encode(page)


def sglang_old_loads(ranks: Sequence[EngineHost]) -> bytes:
    """`/get_load` of old: requests and tokens with those that wait."""
    return msgspec.json.encode(
        [
            {
                "dp_rank": host.rank,
                "num_reqs": host.engine.running + host.engine.waiting,
                "num_waiting_reqs": host.engine.waiting,
                "num_tokens": host.engine.in_use_blocks * host.engine.block_size,
            }
            for host in ranks
        ]
    )


def sglang_server_info(host: EngineHost, *, page_size: int, max_model_len: int) -> bytes:
    """`/server_info`: the fields gateways read; `kv_events` is null where there is nothing to subscribe to."""
    settings = host.settings
    release = settings.release()
    publisher = host.publisher
    events: dict[str, object] | None = None
    if publisher is not None:
        events = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": publisher.port,
            "topic": settings.topic,
            "block_size": page_size,
            "dp_size": settings.data_parallel_size,
        }
        if publisher.replay_port is not None and release >= (0, 5, 22):
            events["replay_endpoint_port_base"] = publisher.replay_port
        if host.load_publisher is not None:
            events |= {"load_endpoint_port_base": host.load_publisher.port, "load_topic": LOAD_TOPIC}
    info: dict[str, object] = {
        "model_path": str(settings.tokenizer.resolve()),
        "tokenizer_path": str(settings.tokenizer.resolve()),
        "served_model_name": settings.model,
        "context_length": max_model_len,
        "page_size": page_size,
        "dp_size": settings.data_parallel_size,
        "disable_radix_cache": False,
        "enable_cache_report": settings.prompt_tokens_details,
        "enable_metrics": True,
        "enable_session_radix_cache": settings.session_cache,
        "decode_log_interval": settings.decode_log_interval,
        "enable_hierarchical_cache": settings.host_tokens > 0,
        "max_total_num_tokens": host.engine.capacity_blocks * page_size,
        "status": "ready",
        "version": settings.said_version(),
    }
    if release >= (0, 5, 13):
        info["kv_events"] = events
    return msgspec.json.encode(info)


def sglang_model_info(*, model: str, path: str) -> bytes:
    """`/model_info`, `/get_model_info` of old."""
    page = {
        "model_path": path,
        "served_model_name": model,
        "tokenizer_path": path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
    }
    return msgspec.json.encode(page)


def models_page(
    models: Mapping[str, str | None], *, base: str, root: str, max_model_len: int, created: int, owner: str
) -> bytes:
    """The served names; adapters name their base as `parent`. `root` is the directory the model was loaded from, with
    SGLang its name once more."""
    data: list[dict[str, object]] = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": owner,
            "root": root if adapter is None else adapter,
            "parent": None if adapter is None else base,
            "max_model_len": max_model_len,
        }
        | ({"permission": []} if owner == "vllm" else {})
        for name, adapter in models.items()
    ]
    return msgspec.json.encode({"object": "list", "data": data})


def sources_page(ranks: Iterable[EngineHost]) -> bytes:
    """Where each rank publishes; `*` stands for the worker's own host."""
    sources = {
        str(host.rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{host.publisher.port}",
            "replay_endpoint": None if host.publisher.replay_port is None else f"tcp://*:{host.publisher.replay_port}",
            "buffer_steps": host.settings.buffer_steps,
            "hwm": 100_000,
            "max_queue_size": 100_000,
            "topic": host.settings.topic,
        }
        for host in ranks
        if host.publisher is not None
    }
    return msgspec.json.encode(sources)
