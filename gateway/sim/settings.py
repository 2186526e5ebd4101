"""What a simulated worker is: its dialect and release, speeds, caches, ports."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gateway.sim.engine_records import PRESETS, EngineModel
from gateway.sim.event_bytes import Encoding, encode_batch, encode_sglang_batch
from gateway.sim.publisher import Encode, Replay
from gateway.sim.releases import Dialect, Release
from gateway.sim.speech import DEMO_MODEL

_BINDABLE = re.compile(r"tcp://(?:\*|0\.0\.0\.0|::|\[::\]):([1-9]\d{0,4})")
_LAST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One worker. Ports of 0 take free ones; those of rank r are r higher. `kv_tokens` replaces the preset's cache
    size; `speed` divides all times; `tokens_per_event` is how many tokens a stream event carries; `keep_bodies` newest
    bodies are kept for tests. Each of `data_parallel_size` ranks has an engine, a cache and a publisher of its own.

    `version`, `encoding` and `replay` are those of the dialect's newest release, or of the version's, when None.
    `prompt_tokens_details` reports cached tokens with answers. `host_tokens` is the size of a tier below the GPU (0:
    none); vLLM keeps `offload_chunk` blocks together there. `decode_log_interval` is SGLang's, in decode steps: how
    often it reports while nothing but decode runs. `load_publish_endpoint` is SGLang's too: with `auto` its load is
    published at the ports after those of the events, with `tcp://*:PORT` there, with None and `off` nowhere.
    `session_cache`: it says that it keeps sessions (SGLang), and counts those that are closed; its cache does not
    favour them.
    """

    dialect: Dialect = Dialect.VLLM
    name: str = "engine"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "demo"
    adapters: tuple[str, ...] = ()
    tokenizer: Path = DEMO_MODEL
    preset: str = "demo"
    kv_tokens: int | None = None
    block_size: int = 16
    max_model_len: int = 32_768
    speed: float = 1.0
    tokens_per_event: int = 1
    default_output_tokens: int = 64
    cache_answers: bool = True
    prompt_tokens_details: bool = True
    events: bool = True
    events_port: int = 0
    replay_port: int = 0
    topic: str = ""
    encoding: Encoding | None = None
    replay: Replay | None = None
    buffer_steps: int = 10_000
    version: str | None = None
    data_parallel_size: int = 1
    host_tokens: int = 0
    offload_chunk: int = 1
    decode_log_interval: int = 40
    load_publish_endpoint: str | None = None
    session_cache: bool = False
    tick_s: float = 0.002
    keep_bodies: int = 1

    def engine_model(self) -> EngineModel:
        """The preset with this worker's cache size. Raises ValueError for an unknown preset."""
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        model = PRESETS[self.preset]
        return model if self.kv_tokens is None else replace(model, kv_tokens=self.kv_tokens)

    def said_version(self) -> str:
        """The version it shows."""
        return self.version or self.dialect.newest

    def release(self) -> Release:
        """Raises ValueError for one that is not simulated."""
        return self.dialect.check(self.said_version())

    def replay_layout(self) -> Replay:
        """The given one, or the release's."""
        new = self.release() >= ((0, 26, 0) if self.dialect is Dialect.VLLM else (0, 5, 22))
        return self.replay or (Replay.NEW if new else Replay.OLD)

    @property
    def publishes_load(self) -> bool:
        """Whether it has load sockets."""
        return self.load_publish_endpoint not in (None, "off")

    def load_port(self, events_port: int, replay_port: int | None) -> int | None:
        """Port of rank 0's load, None without; SGLang's rule (`resolve_load_pub_range`): the first ports after the
        events', or after the replays' where those would be in the way.

        Raises ValueError where SGLang would not start: with a release that has no such flag, without events, with an
        address that cannot be bound or runs into the events'.
        """
        wanted, size = self.load_publish_endpoint, self.data_parallel_size
        if wanted is None or wanted == "off":
            return None
        if self.dialect is not Dialect.SGLANG or self.release() < (0, 5, 19):
            raise ValueError("load sockets are SGLang's, from 0.5.19 on")
        if not self.events:
            raise ValueError("load sockets are found beside those of the events: publish events too")
        if wanted == "auto":
            port = events_port + size
            if replay_port is not None and port < replay_port + size and replay_port < port + size:
                port = replay_port + size
        else:
            found = _BINDABLE.fullmatch(wanted)
            if found is None:
                raise ValueError(f"{wanted!r} is neither auto, off nor an address such as tcp://*:6000")
            port = int(found[1])
            if events_port and port < events_port + size and events_port < port + size:
                raise ValueError(f"the load sockets from {port} on run into the events from {events_port} on")
        if port + size - 1 > _LAST_PORT:
            raise ValueError(f"there are no {size} ports from {port} on")
        return port

    def encoder(self, rank: int) -> Encode:
        """Makes the bytes of one rank's batches."""
        if self.dialect is Dialect.VLLM:
            by_release = Encoding.MAP if self.release() >= (0, 24, 0) else Encoding.ARRAY
            encoding = self.encoding or by_release
            return lambda events, unix_s: encode_batch(events, unix_s=unix_s, rank=rank, encoding=encoding)
        encode = partial(encode_sglang_batch, release=self.release(), encoding=self.encoding)
        return lambda events, unix_s: encode(events, unix_s=unix_s, rank=rank)
