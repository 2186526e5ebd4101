"""Index of KV blocks: decoding engines' events, following their sequence, and the overlap of requests with workers.

Face: `KvIndex` with `Overlaps`, `Speculation`, `Applied`, `IndexStats`, and `ApproximateSettings` with `Remembered`
for what is learned from routing; `RankBlocks` and `FeedPoint` for what outlives a process. Events and feed states are
named in `kv.events` and `kv.feed_state`, for the shell that feeds them.
"""

from gateway.kv.approximate import LEARNED_BYTES, ApproximateSettings, ApproximateStats, Remembered
from gateway.kv.feed_words import FeedPoint
from gateway.kv.index import KvIndex
from gateway.kv.numbers import Applied, IndexStats, Mark
from gateway.kv.overlap import Overlaps
from gateway.kv.snapshot import RankBlocks, TierBlocks
from gateway.kv.speculation import Speculation

__all__ = [
    "LEARNED_BYTES",
    "Applied",
    "ApproximateSettings",
    "ApproximateStats",
    "FeedPoint",
    "IndexStats",
    "KvIndex",
    "Mark",
    "Overlaps",
    "RankBlocks",
    "Remembered",
    "Speculation",
    "TierBlocks",
]
