"""Records that stages hand to each other, and the words they use.

Rules:
1. Every record is frozen; a stage that knows more makes a new record.
2. One word means one thing (`docs/concepts/words.md`): an engine's block name is an `EngineHash`, ours is a
   `BlockKey`, and the two are never compared.
3. Times are seconds on the monotonic clock of the composition root unless a name says `unix`.
4. Token counts are prompt tokens of the request as the engine sees them.

Nothing here does work; there is no logic to test apart from the small derived properties.
"""

from __future__ import annotations

from gateway.records.decisions import (
    Candidate,
    Decision,
    Ending,
    Hedged,
    MissCause,
    Outcome,
    Result,
    StageTimes,
    Standing,
    Terms,
    Trace,
    Usage,
)
from gateway.records.requests import (
    Chain,
    ChatPrompt,
    InferenceRequest,
    NoPrompt,
    PrefixBlocks,
    PrefixMode,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from gateway.records.words import (
    BlockKey,
    Endpoint,
    EngineHash,
    EngineKind,
    Slot,
    Tier,
    WorkerId,
)
from gateway.records.workers import (
    EventSource,
    Finding,
    LoadEndpoint,
    LoadSample,
    LoadSource,
    Rank,
    RankChoice,
    Role,
    Severity,
    TrustState,
    WorkerFacts,
    WorkerSpec,
)

__all__ = [
    "BlockKey",
    "Candidate",
    "Chain",
    "ChatPrompt",
    "Decision",
    "Ending",
    "Endpoint",
    "EngineHash",
    "EngineKind",
    "EventSource",
    "Finding",
    "Hedged",
    "InferenceRequest",
    "LoadEndpoint",
    "LoadSample",
    "LoadSource",
    "MissCause",
    "NoPrompt",
    "Outcome",
    "PrefixBlocks",
    "PrefixMode",
    "Prompt",
    "Rank",
    "RankChoice",
    "Result",
    "Role",
    "Severity",
    "Slot",
    "StageTimes",
    "Standing",
    "Terms",
    "TextPrompt",
    "Tier",
    "TokenPrompt",
    "Trace",
    "TrustState",
    "Usage",
    "WorkerFacts",
    "WorkerId",
    "WorkerSpec",
]
