"""What a simulated engine is given and what it tells: its speed and size, the presets, its happenings and counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from gateway.records import Tier


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Speed and size of one worker. Seconds, and tokens; `kv_tokens` is the cache, `chunk_tokens` the prefill chunk."""

    prefill_token_s: float
    prefill_pair_s: float
    prefill_overhead_s: float
    step_s: float
    step_request_s: float
    step_kv_token_s: float
    chunk_tokens: int
    kv_tokens: int
    max_running: int
    host_token_s: float = 1 / 60_000
    """Seconds to bring one token back from the tier below: PCIe, as the gateway assumes."""

    def prefill_s(self, new: int, cached: int) -> float:
        """Seconds to compute `new` tokens after `cached` ones, with nothing else running."""
        pairs = new * (cached + new / 2)
        return self.prefill_overhead_s + new * self.prefill_token_s + self.prefill_pair_s * pairs

    def decode_step_s(self, running: int, kv_tokens: int) -> float:
        """Seconds of one step that gives each of `running` requests one token."""
        return self.step_s + self.step_request_s * running + self.step_kv_token_s * kv_tokens


_BIG = EngineModel(1.0e-4, 1.4e-9, 0.004, 0.0115, 5e-5, 9e-9, chunk_tokens=4096, kv_tokens=460_000, max_running=256)

PRESETS: Mapping[str, EngineModel] = MappingProxyType(
    {
        # A 70B-class replica: about 10k prefill tokens a second.
        "70b": _BIG,
        "70b-bigkv": replace(_BIG, kv_tokens=2_000_000),
        "8b": EngineModel(
            3.3e-5, 4e-10, 0.003, 0.008, 5e-5, 4e-8, chunk_tokens=2048, kv_tokens=300_000, max_running=256
        ),
        # A 7B model on a 24 GB card: about 4k prefill tokens a second.
        "7b-a10": EngineModel(
            2.5e-4, 2e-9, 0.005, 0.028, 1e-4, 1e-7, chunk_tokens=2048, kv_tokens=100_000, max_running=128
        ),
        # A slow prefill and a small cache, so that a minute of light traffic shows what routing is worth.
        "demo": EngineModel(
            1.2e-4, 2e-9, 0.004, 0.010, 1e-4, 1e-7, chunk_tokens=2048, kv_tokens=28_000, max_running=64
        ),
    }
)


# --------------------------------------------------------------------------- what happens


@dataclass(frozen=True, slots=True)
class Started:
    """The prefill of a request began: `cached_tokens` of its prompt were in the cache, the rest takes `prefill_s`."""

    request: int
    at: float
    cached_tokens: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prefill is over; this is the request's token number one."""

    request: int
    at: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """`count` more tokens; only with a token stride."""

    request: int
    at: float
    count: int


@dataclass(frozen=True, slots=True)
class Finished:
    """All output tokens are out and the blocks are let go."""

    request: int
    at: float


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks `first`, `first + 1`, ... of the request's chain are cached now; `parent` is the block before them. Below
    the GPU each block stands for the chunk it ends."""

    request: int
    at: float
    first: int
    blocks: tuple[int, ...]
    parent: int | None
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class Removed:
    """Cached blocks are gone, in this order."""

    at: float
    blocks: tuple[int, ...]
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache is empty."""

    at: float


Happening = Started | FirstToken | Tokens | Finished | Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Cumulative: tokens looked up and found in the prefix cache, requests, blocks evicted, prefill seconds spent,
    tokens read from the tier below and the seconds that took."""

    queried_tokens: int
    hit_tokens: int
    finished: int
    aborted: int
    evicted_blocks: int
    prefill_busy_s: float
    loaded_tokens: int
    load_s: float
