"""The words of an event feed: where it stands, what it asks its caller to do, its bounds and its counters.

`gateway.kv.feed_state` decides with them; the shell executes them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class FeedPhase(StrEnum):
    """Where a feed stands; `gateway.kv.feed_state` has the drawing."""

    STARTING = "starting"
    REPLAYING = "replaying"
    LIVE = "live"
    REPAIRING = "repairing"
    LOST = "lost"


class Apply(NamedTuple):
    """Decode this payload and apply its events; it is the next in order."""

    seq: int
    payload: bytes


class Preview(NamedTuple):
    """Show what this batch says already now; it comes again as `Apply` when what is missing before it has come."""

    seq: int
    payload: bytes


class EndPreview(NamedTuple):
    """Every batch that was previewed has been applied."""


class AskReplay(NamedTuple):
    """Ask the engine for every batch from this number on, over a new connection; replies to earlier requests are
    worthless from now on."""

    from_seq: int


class Purge(NamedTuple):
    """Forget everything this rank announced, previews too. `reason`: `restart`, `gap`, `history_gone`, `undecodable`,
    `resync`, `reconnect`, `contradiction`, `contradicted`, `relearn`, `reopened`."""

    reason: str


Action = Apply | Preview | EndPreview | AskReplay | Purge


class FeedPoint(NamedTuple):
    """The last batch applied, with the XXH3-64 of its bytes; engine times of the oldest and the newest batch."""

    seq: int
    digest: int
    oldest_ts: float | None
    newest_ts: float | None


@dataclass(frozen=True, slots=True)
class FeedLimits:
    """Bounds of one feed. `reply_timeout_s` is the longest silence in a replay; it doubles with each try in vain.
    `replay_rest_s` is how long no replay is asked for after `replay_tries` in vain. `silent_s` is how long after a
    request that computed new blocks a feed may stay silent. Removals are judged in lots of `judged_removals`, and the
    feed learned anew for their sake at most every `contradiction_rest_s`. `remembered_batches` are those of which it is
    known when they came."""

    reply_timeout_s: float = 1.0
    connect_timeout_s: float = 5.0
    replay_tries: int = 3
    tries_a_minute: int = 6
    replay_rest_s: float = 60.0
    longest_rest_s: float = 960.0
    buffered_batches: int = 20_000
    buffered_bytes: int = 64 * 1024 * 1024
    remembered_batches: int = 1024
    silent_s: float = 10.0
    judged_removals: int = 256
    contradiction_rest_s: float = 600.0


@dataclass(slots=True)
class FeedCounters:
    """What happened on a feed since it was made. `replays` is by result: `complete`, `history_gone`, `timed_out`
    (given up), `unavailable` (a gap, and no endpoint or it rests). `buffer_overflows` are live batches that did not fit
    while a replay ran; they come back as a gap. `silences` are times the feed was doubted for being silent.
    `last_event_unix` is the engine's own time of the newest batch."""

    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    resets: int = 0
    errors: int = 0
    buffer_overflows: int = 0
    reconnects: int = 0
    silences: int = 0
    replays: Counter[str] = field(default_factory=Counter)
    purges: Counter[str] = field(default_factory=Counter)
    last_event_unix: float | None = None
    last_applied_at: float | None = None
