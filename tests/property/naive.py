"""What an index must hold, said with dictionaries and sets: slow, and plain enough to be believed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import product

from gateway.keys import chain, namespace
from gateway.records import Chain, EngineHash, EngineKind, PrefixBlocks, Tier

SIZE = 2
DEPTH = 4
TIERS = (Tier.GPU, Tier.CPU)
ENGINES = {0: EngineKind.VLLM, 1: EngineKind.VLLM, 2: EngineKind.SGLANG}
RANKS = {0: (0,), 1: (0, 1), 2: (0,)}

# A block is a path in a binary tree of contents: every path is one prompt. An engine may know one content by two
# names (as vLLM did for salted prompts); a name is (path, alias).
Path = tuple[int, ...]
Name = tuple[Path, int]
PROMPTS: list[Path] = [tuple(bits) for bits in product((0, 1), repeat=DEPTH)]


def tokens_of(path: Path) -> list[int]:
    return [token for depth, bit in enumerate(path) for token in (10 * depth + bit, 7)]


def name_hash(worker: int, rank: int, name: Name) -> EngineHash:
    path, alias = name
    number = int("1" + "".join(map(str, path)), 2)
    return EngineHash(number + 1_000 * alias + 10_000 * rank + 100_000 * worker)


def request(path: Path) -> PrefixBlocks:
    ids = tokens_of(path)
    return PrefixBlocks((Chain(chain(namespace(), ids, SIZE), len(ids)),), len(ids), SIZE)


@dataclass
class ModelRank:
    """Copies of each announced name by tier; who waits for whom; which names are placed."""

    counted: bool
    copies: dict[Tier, Counter[Name]] = field(default_factory=lambda: {tier: Counter() for tier in TIERS})
    parents: dict[Name, Name | None] = field(default_factory=dict)
    placed: set[Name] = field(default_factory=set)

    def announced(self) -> set[Name]:
        return {name for tier in TIERS for name, count in self.copies[tier].items() if count}

    def add(self, name: Name, tier: Tier, parent: Name | None, *, has_tokens: bool) -> None:
        self.copies[tier][name] = self.copies[tier][name] + 1 if self.counted else 1
        if has_tokens:
            if parent is None or parent in self.placed:
                self.placed.add(name)
            self.parents.setdefault(name, parent)
        while True:
            ready = {
                name
                for name in self.announced() - self.placed
                if name in self.parents and (self.parents[name] is None or self.parents[name] in self.placed)
            }
            if not ready:
                return
            self.placed |= ready

    def remove(self, name: Name, tier: Tier) -> None:
        if self.copies[tier][name]:
            self.copies[tier][name] -= 1
        if name not in self.announced():
            self.parents.pop(name, None)
            self.placed.discard(name)

    def holds(self, path: Path, tier: Tier) -> bool:
        return any(self.copies[tier][name] and name in self.placed for name in ((path, 0), (path, 1)))
