"""A decision for whoever holds the admin token: `x-kvgate-debug: <token>` is answered with `x-kvgate-decision`.

Rules:
1. Without the right token nothing happens: no error tells that there is one to be guessed. It is compared in constant
   time and never passed on (no `x-kvgate-*` header is).
2. The answer is one line of ASCII, 8 KB at most whatever the fleet and its names: the chosen worker and the next best,
   the rest counted. `GET /admin/decisions?request_id=` has all of it.
"""

from __future__ import annotations

import hmac
import json

from gateway.records import Candidate, Decision

DEBUG_HEADER = b"x-kvgate-debug"

_CANDIDATES = 6
_EXCLUDED = 6
_NAME_CHARS = 64
"""Of names, which may be as long as an adapter's path."""


def may_see(given: bytes | None, token: bytes) -> bool:
    """Whether a request asks for its decision and may have it; `token` is empty where there is none."""
    return given is not None and token != b"" and hmac.compare_digest(given, token)


def decision_line(decision: Decision) -> bytes:
    """The header line. Numbers: tokens, seconds to a tenth of a millisecond; terms that are 0 are left out."""
    ranked = sorted(decision.candidates, key=lambda one: (one.worker != decision.worker, one.terms.cost, one.worker))
    told: dict[str, object] = {
        "worker": decision.worker[:_NAME_CHARS],
        "model": decision.model[:_NAME_CHARS],
        "pool": decision.pool[:_NAME_CHARS],
        "policy": decision.policy,
        "mode": decision.mode.value,
        "prompt": decision.prompt_tokens,
        "predicted": decision.predicted_tokens,
        "available": decision.available_tokens,
        "affinity": decision.affinity,
        "candidates": [_candidate(one) for one in ranked[:_CANDIDATES]],
    }
    if decision.reason:
        told["reason"] = decision.reason
    if decision.shard is not None:
        told["shard"] = decision.shard
    if len(ranked) > _CANDIDATES:
        told["more"] = len(ranked) - _CANDIDATES
    if decision.excluded:
        told["excluded"] = {name[:_NAME_CHARS]: why for name, why in decision.excluded[:_EXCLUDED]}
    return b"x-kvgate-decision: %b\r\n" % json.dumps(told, separators=(",", ":")).encode()


def _candidate(one: Candidate) -> dict[str, object]:
    terms = {name.removesuffix("_s"): round(value, 4) for name, value in one.terms._asdict().items() if round(value, 4)}
    return {"worker": one.worker[:_NAME_CHARS], "overlap": one.overlap_tokens, "trust": round(one.trust, 2)} | terms
