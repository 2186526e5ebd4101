"""The words records are made of: names, tiers, engines, endpoints."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""A worker's name: unique in the fleet, kept over restarts, safe to show to clients."""

BlockKey = NewType("BlockKey", int)
"""Our name of a prefix block and everything before it: unsigned 64-bit, see `gateway.keys`."""

EngineHash = NewType("EngineHash", int)
"""The name one worker gives a block: folded to unsigned 64-bit, meaningful for that (worker, rank) only."""

Slot = NewType("Slot", int)
"""A worker's bit in the masks of the index; given by the fleet, used again after the worker is gone."""


class Tier(StrEnum):
    """Where a block lies. Order of cost per token: gpu < cpu < disk < remote."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    REMOTE = "remote"


class EngineKind(StrEnum):
    """The software a worker runs; decides wire formats and rendering rules."""

    VLLM = "vllm"
    SGLANG = "sglang"
    UNKNOWN = "unknown"


class Endpoint(Enum):
    """The inference paths of the client port (method POST)."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    EMBEDDINGS = "/v1/embeddings"
    RERANK = "/v1/rerank"
    SCORE = "/v1/score"
    MESSAGES = "/v1/messages"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    GENERATE = "/generate"

    __hash__ = object.__hash__
    """Members are singletons; Enum's own is a Python call for each look into a set or dict."""
