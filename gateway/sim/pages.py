"""The pages a simulated engine shows beside inference: `/metrics`, `/v1/models`, `/kv_event_sources`, as vLLM 0.32.

Pure text and JSON from numbers given; names and labels are those gateways and dashboards read.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.sim.engine import SimulatedEngine


def metrics_page(
    engine: SimulatedEngine, *, model: str, start_time_unix: float, prompt_tokens: int, generation_tokens: int
) -> bytes:
    """Prometheus text. Counters are in tokens; `kv_cache_usage_perc` counts idle cached blocks as free."""
    counters = engine.counters
    labels = f'{{engine="0",model_name="{model}"}}'
    size, blocks = engine.block_size, engine.capacity_blocks
    config = (
        f'{{block_size="{size}",cache_dtype="auto",effective_attention_block_size="{size}",enable_prefix_caching="True",'
        f'engine="0",kv_cache_size_tokens="{blocks * size}",num_cpu_blocks="None",num_gpu_blocks="{blocks}",'
        'prefix_caching_hash_algo="sha256",sliding_window="None"}'
    )
    rows: list[tuple[str, str, str, float]] = [
        ("process_start_time_seconds", "gauge", "", start_time_unix),
        ("vllm:num_requests_running", "gauge", labels, engine.running),
        ("vllm:num_requests_waiting", "gauge", labels, engine.waiting),
        ("vllm:kv_cache_usage_perc", "gauge", labels, engine.kv_usage),
        ("vllm:prefix_cache_queries_total", "counter", labels, counters.queried_tokens),
        ("vllm:prefix_cache_hits_total", "counter", labels, counters.hit_tokens),
        ("vllm:prompt_tokens_total", "counter", labels, prompt_tokens),
        ("vllm:generation_tokens_total", "counter", labels, generation_tokens),
        ("vllm:num_preemptions_total", "counter", labels, 0),
        ("vllm:request_success_total", "counter", labels[:-1] + ',finished_reason="length"}', counters.finished),
        ("vllm:cache_config_info", "gauge", config, 1),
    ]
    text = "".join(
        f"# HELP {name} Simulated.\n# TYPE {name} {kind}\n{name}{series} {float(value)!r}\n"
        for name, kind, series, value in rows
    )
    return text.encode()


def models_page(models: Mapping[str, str | None], *, base: str, root: str, max_model_len: int, created: int) -> bytes:
    """The served names; adapters name their base as `parent`. `root` is the directory the model was loaded from."""
    data: list[dict[str, object]] = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": root if adapter is None else adapter,
            "parent": None if adapter is None else base,
            "max_model_len": max_model_len,
            "permission": [],
        }
        for name, adapter in models.items()
    ]
    return msgspec.json.encode({"object": "list", "data": data})


def sources_page(*, port: int, replay_port: int | None, topic: str, buffer_steps: int) -> bytes:
    """Where rank 0 publishes; `*` stands for the worker's own host."""
    source = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": None if replay_port is None else f"tcp://*:{replay_port}",
        "buffer_steps": buffer_steps,
        "hwm": 100_000,
        "max_queue_size": 100_000,
        "topic": topic,
    }
    return msgspec.json.encode({"0": source})
