"""What events of tiers below the GPU leave unsaid: the blocks of a chunk, and the end of blocks that nobody removes.

vLLM's OffloadingConnector moves chunks of k blocks, aligned at the start of the prompt, and announces a chunk by the
hash of its last block alone. k is not told (from 0.20 on). It follows from where such hashes stand: the distance to the
start of the prompt, or to another chunk's last block before it, is a multiple of k. `Chunks` finds it.

LMCache inside the engine, Mooncake's connector and offload tiers on storage announce stores and never a removal
(`Stored.fleeting`). `Lifetimes` ends such blocks some time after they were last announced.

One of each for every rank. Both are bounded by the blocks the rank holds, and by the limits below.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from itertools import islice
from math import gcd
from typing import Final

from gateway.records import EngineHash

MAX_CHUNK: Final = 256
"""Blocks of a chunk; a walk back that finds no end within so many finds nothing."""

MAX_FLEETING: Final = 1_000_000
"""Blocks with a life time, a rank: 100 MB at worst. The oldest end early for newer ones."""

MOST_EXCESS: Final = 4096
"""How far a flood of announcements may pass that before the oldest are ended: some 5 ms of work at once."""

_RECENT_RUNS: Final = 64
"""Stores remembered until it is known whether the rank offloads in chunks: its first chunk is announced a few steps
after its blocks."""

_ENTRY_BYTES: Final = 100  # of a dictionary of two objects that are there anyway, growth included

_AGREED: Final = 2  # one distance alone may be that of several chunks, when the first ones were not heard

_UNKNOWN: Final = EngineHash(-1)  # no hash: those are unsigned


class Chunks:
    """Which blocks go with a chunk's last one. `size` is k: 0 until two distances in a row agree, 1 where each block is
    told by itself, and then nothing is remembered any more. `news` says that it became known, and is above 1."""

    __slots__ = ("_agreed", "_guess", "_parents", "_recent", "news")

    def __init__(self) -> None:
        self.news = False
        self._guess = 0
        self._agreed = 0
        self._parents: dict[EngineHash, EngineHash | None] | None = None
        self._recent: deque[tuple[EngineHash | None, Sequence[EngineHash]]] | None = deque(maxlen=_RECENT_RUNS)

    @property
    def size(self) -> int:
        """Blocks of a chunk as far as they are known."""
        return self._guess if self._agreed >= _AGREED or self._guess == 1 else 0

    def __len__(self) -> int:
        """Blocks remembered."""
        return len(self._parents or ())

    @property
    def follows(self) -> bool:
        """Whether blocks are remembered until `forget`."""
        return self._parents is not None

    @property
    def bytes(self) -> int:
        """An estimate; the hashes are those of the rank's tables."""
        return _ENTRY_BYTES * len(self)

    def stored(self, parent: EngineHash | None, hashes: Sequence[EngineHash]) -> None:
        """Blocks on GPU, each the child of the one before it."""
        if self._recent is not None:
            self._recent.append((parent, hashes))
        elif self._parents is not None:
            for engine_hash in hashes:
                self._parents[engine_hash] = parent
                parent = engine_hash

    def parent(self, engine_hash: EngineHash) -> tuple[EngineHash | None] | None:
        """What is remembered of a block, to be given to `put_back`; None where nothing is."""
        if self._parents is None or engine_hash not in self._parents:
            return None
        return (self._parents[engine_hash],)

    def put_back(self, engine_hash: EngineHash, parent: tuple[EngineHash | None] | None) -> None:
        """The block had been taken out for a while only."""
        if self._parents is not None and parent is not None:
            (self._parents[engine_hash],) = parent

    def forget(self, engine_hash: EngineHash) -> None:
        """The rank holds this block in no tier any more."""
        if self._parents is not None:
            self._parents.pop(engine_hash, None)

    def clear(self) -> None:
        """The rank holds nothing; how it chunks stays known."""
        if self._parents is not None:
            self._parents = {}
        if self._recent is not None:
            self._recent.clear()

    def told(self, size: int) -> None:
        """The engine says how many blocks a chunk has (0.11 to 0.19)."""
        self._guess, self._agreed = size, _AGREED
        if size == 1:
            self._parents = self._recent = None

    def before(self, last: EngineHash, ends: Container[EngineHash]) -> list[EngineHash]:
        """The other blocks of the chunk that ends in `last`, in order; none while its size is not known. `ends` are the
        last blocks of the chunks the tier holds already."""
        if self._guess == 1:
            return []
        if self._recent is not None:
            runs, self._recent, self._parents = self._recent, None, {}
            for parent, hashes in runs:
                self.stored(parent, hashes)
        parents = self._parents
        if parents is None:
            return []
        walk: list[EngineHash] = []
        step = last
        for distance in range(1, (self._guess or MAX_CHUNK) + 1):
            parent = parents.get(step, _UNKNOWN)
            if parent is None or parent in ends:
                self._measured(distance)
                break
            if parent == _UNKNOWN:
                break
            walk.append(parent)
            step = parent
        return walk[: self.size - 1][::-1] if self.size else []

    def _measured(self, multiple: int) -> None:
        """Two blocks that end chunks, or one and the start of a prompt, are so far apart."""
        guess = gcd(self._guess, multiple)
        if guess != self._guess:
            self._guess, self._agreed = guess, 0
        if multiple == guess:
            self._agreed += 1
            self.news = self.news or (self._agreed == _AGREED and guess > 1)
        if guess == 1:
            self._parents = self._recent = None


class Lifetimes:
    """When blocks of one tier end that were announced and will never be removed."""

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        self._ends: dict[EngineHash, float] = {}  # in the order they end, since all live equally long

    def __contains__(self, engine_hash: EngineHash) -> bool:
        return engine_hash in self._ends

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def bytes(self) -> int:
        """An estimate."""
        return _ENTRY_BYTES * len(self._ends)

    def announced(self, hashes: Sequence[EngineHash], until: float) -> None:
        """They live until then, whatever was said before."""
        ends = self._ends
        for engine_hash in hashes:
            ends.pop(engine_hash, None)
            ends[engine_hash] = until

    def forget(self, engine_hash: EngineHash) -> None:
        """It is gone already."""
        self._ends.pop(engine_hash, None)

    def over(self, now: float, most: int) -> list[EngineHash]:
        """At most so many blocks that end now, those beyond the limit among them; they are forgotten."""
        ends = self._ends
        excess = len(ends) - MAX_FLEETING
        gone: list[EngineHash] = []
        # One walk for all: each walk passes what was deleted before it, so one for each block would take their square.
        for engine_hash, end in islice(ends.items(), most):
            if end > now and len(gone) >= excess:
                break
            gone.append(engine_hash)
        for engine_hash in gone:
            del ends[engine_hash]
        return gone
