"""What one worker and one of its ranks have announced: the tables that turn engine hashes into block keys.

Rules:
1. An engine hash means something for its (worker, rank) only. It is known while the rank holds the block in any tier.
2. Copies: vLLM announces a block once for each physical copy and removes each copy; SGLang's tree holds a page once
   and may announce it again. `WorkerTable.counted` says which of the two holds.
3. A block whose key cannot be computed yet (its parent is unknown, or the event had no tokens) waits as an orphan:
   at most `orphan_limit` a rank, the oldest go first. Orphans are never part of an overlap.

These are plain tables; `gateway.kv.ingest` keeps them and the masks of the index in step.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from gateway.keys import namespace, packer
from gateway.kv.offload import Chunks, Lifetimes
from gateway.kv.speculation import Promises
from gateway.kv.windows import WindowBlocks
from gateway.records import BlockKey, EngineHash, Slot, Tier

if TYPE_CHECKING:  # it is made of these tables
    from gateway.kv.preview import Preview

TIERS: Final = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)
"""Tiers by cost per token; tables and masks are lists in this order."""

TIER_INDEX: Final = {tier: index for index, tier in enumerate(TIERS)}

# Groups that need every block of a prefix from the start. The others (sliding window, Mamba, ...) announce only
# what they keep and say nothing about the length of a reusable prefix.
_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})

ORPHAN_BLOCKS: Final = 2

_MAX_GROUPS: Final = 64  # engines have a handful; bounds what a broken publisher can make us remember
_MAX_ROOTS: Final = 4096  # (adapter, salt) seeds kept per worker; salts come from clients


class Orphan:
    """A block that was announced but has no key yet. `tokens` is None when the event carried none."""

    __slots__ = ("copies", "extra", "parent", "tokens")

    def __init__(self, parent: EngineHash | None, tokens: array[int] | None, extra: bytes | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.extra = extra
        self.copies = [0, 0, 0, 0]


class RankTable:
    """One rank's blocks, or with `below` what a preview lays over them (`gateway.kv.preview`). `held[tier]` maps engine
    hash to block key; `copies[tier]` counts copies beyond the first; `heads[tier]` has the earlier keys of a block that
    stands for several keys there: because it spans them (see `KvIndex`), or because it ends a chunk. `chunks` and
    `lifetimes[tier]`: see `offload`. `let_go` counts removals to come of blocks that were dropped here, for a limit:
    no sign of a strange feed. `ready` are known blocks, with their keys, for which orphans wait. `usual_kinds` has the
    kind last told for each group that counts: a store that repeats it need not ask `measures`. `windows` is there where
    the engine has groups with sliding windows."""

    __slots__ = (
        "_children",
        "_groups",
        "_orphan_limit",
        "below",
        "chunks",
        "copies",
        "heads",
        "held",
        "let_go",
        "lifetimes",
        "orphans",
        "placeholders",
        "ready",
        "usual_kinds",
        "windows",
    )

    def __init__(self, orphan_limit: int, *, below: RankTable | None = None) -> None:
        self.below = below
        self.held: list[dict[EngineHash, BlockKey]] = [{}, {}, {}, {}]
        self.copies: list[dict[EngineHash, int]] = [{}, {}, {}, {}]
        self.heads: list[dict[EngineHash, tuple[BlockKey, ...]]] = [{}, {}, {}, {}]
        self.chunks = Chunks()
        self.lifetimes = [Lifetimes() for _ in TIERS]
        self.orphans: OrderedDict[EngineHash, Orphan] = OrderedDict()  # finds the oldest at once, a plain one does not
        self.placeholders = 0
        self.let_go = 0
        self.ready: list[tuple[EngineHash, BlockKey]] = []
        self.windows: WindowBlocks | None = None
        self._children: dict[EngineHash, dict[EngineHash, None]] = {}  # removals come in any order
        self.usual_kinds: dict[int | None, str] = {} if below is None else below.usual_kinds
        self._groups: dict[int | None, bool] = {} if below is None else below._groups
        self._orphan_limit = orphan_limit

    def key_of(self, engine_hash: EngineHash) -> BlockKey | None:
        """The key of a block the rank holds in any tier."""
        for held in self.held:
            key = held.get(engine_hash)
            if key is not None:
                return key
        return None if self.below is None else self.below.key_of(engine_hash)

    def keys_of(self, engine_hash: EngineHash) -> tuple[BlockKey, ...]:
        """Every key of a block the rank holds, as the fastest tier has it; empty when it holds none."""
        for held, heads in zip(self.held, self.heads, strict=True):
            key = held.get(engine_hash)
            if key is not None:
                return (*heads.get(engine_hash, ()), key) if heads else (key,)
        return () if self.below is None else self.below.keys_of(engine_hash)

    def measures(self, group: int | None, kind: str | None) -> bool:
        """Whether blocks of this cache group tell the length of a reusable prefix.

        The kind comes with stores only, so it is remembered for removals and placeholders. A group whose kind was
        never told counts when it is the only one an engine without groups has (None) or the first (0).
        """
        if kind is not None and kind != "unknown":
            full = kind in _FULL_ATTENTION
            if group in self._groups or len(self._groups) < _MAX_GROUPS:
                self._groups[group] = full
                self.usual_kinds.pop(group, None)
                if full:
                    self.usual_kinds[group] = kind
            return full
        return self._groups.get(group, group is None or group == 0)

    def groups_told(self) -> tuple[dict[int | None, bool], dict[int | None, str]]:
        """A copy of what `measures` knows: which groups count, and the usual kind of those that do."""
        return dict(self._groups), dict(self.usual_kinds)

    def tell_groups(self, groups: Mapping[int | None, bool], kinds: Mapping[int | None, str]) -> None:
        """Know this of cache groups."""
        self._groups.update(islice(groups.items(), _MAX_GROUPS))
        self.usual_kinds.update(islice(kinds.items(), _MAX_GROUPS))

    def add_orphan(
        self,
        engine_hash: EngineHash,
        tier: int,
        *,
        parent: EngineHash | None,
        tokens: Sequence[int] | None,
        extra: bytes | None,
        counted: bool,
    ) -> int:
        """Keep a block until its key can be computed. Returns how many old orphans had to go (0 or 1).

        Raises TypeError or ValueError when `tokens` are no token ids; then nothing has changed.
        """
        packed = None if tokens is None else _pack(tokens)
        orphan = self.orphans.get(engine_hash)
        dropped = 0
        if orphan is None:
            if len(self.orphans) >= self._orphan_limit:
                self.drop_orphan(next(iter(self.orphans)))
                dropped = 1
            orphan = self.orphans[engine_hash] = Orphan(None, None, None)
            self.placeholders += 1
        if orphan.tokens is None and packed is not None and parent is not None:
            orphan.parent, orphan.tokens, orphan.extra = parent, packed, extra
            self.placeholders -= 1
            self._children.setdefault(parent, {})[engine_hash] = None
        orphan.copies[tier] = orphan.copies[tier] + 1 if counted else 1
        return dropped

    def take_orphan(self, engine_hash: EngineHash) -> Orphan | None:
        """Remove and return an orphan; its own children keep waiting for it."""
        orphan = self.orphans.pop(engine_hash, None)
        if orphan is None:
            return None
        if orphan.parent is None:
            self.placeholders -= 1
            return orphan
        siblings = self._children.get(orphan.parent)
        if siblings is not None:
            del siblings[engine_hash]
            if not siblings:
                del self._children[orphan.parent]
        return orphan

    def drop_orphan(self, engine_hash: EngineHash) -> None:
        """Give up an orphan for a limit."""
        orphan = self.take_orphan(engine_hash)
        if orphan is not None:
            self.let_go += sum(orphan.copies)

    def awaited(self, parent: EngineHash) -> bool:
        """Whether orphans wait for this block."""
        return parent in self._children

    def take_children(self, parent: EngineHash, most: int) -> list[tuple[EngineHash, Orphan]]:
        """Remove and return at most so many of the orphans that wait for `parent`."""
        waiting = self._children.get(parent)
        if waiting is None:
            return []
        taken = list(islice(waiting, most))
        if len(taken) == len(waiting):
            del self._children[parent]
        else:
            for child in taken:
                del waiting[child]
        return [(child, self.orphans.pop(child)) for child in taken]

    def remove_orphan_copy(self, engine_hash: EngineHash, tier: int) -> bool:
        """A removal of a block that has no key. False when no such copy was announced."""
        orphan = self.orphans.get(engine_hash)
        if orphan is None or not orphan.copies[tier]:
            return False
        orphan.copies[tier] -= 1
        if not any(orphan.copies):
            self.take_orphan(engine_hash)
        return True

    def clear(self) -> None:
        """Forget every block; which cache groups tell of reusable prefixes stays known."""
        for tier in range(len(TIERS)):
            self.held[tier] = {}
            self.copies[tier] = {}
            self.heads[tier] = {}
            self.lifetimes[tier] = Lifetimes()
        self.chunks.clear()
        self.windows = None  # another process may have none
        self.orphans = OrderedDict()
        self.placeholders = 0
        self.let_go = 0
        self.ready = []
        self._children = {}


class WorkerTable:
    """One worker that occupies a slot.

    `blocks[tier]` counts its distinct block keys; `shared[tier]` counts holders beyond the first of a key that several
    ranks, or several engine hashes, of the worker stand for. `span` is how many keys one of the engine's own blocks
    covers. `heard`: the worker has announced something. `promises` are what only a decision sent there. `pack` is
    `keys.packer` of its block size. `learned_blocks` is what was learned from routing, in blocks of `block_size`
    tokens. `epoch` numbers the time it was last bound or purged, `clears` and `removed` count what its events took
    away since it was bound; `hidden` counts purges that have begun and not ended, `weighed` is the last `weight`
    taken. `window` is the longest sliding window of its model, in tokens; 0 without any.
    """

    __slots__ = (
        "_roots",
        "bit",
        "block_size",
        "blocks",
        "clears",
        "counted",
        "epoch",
        "heard",
        "hidden",
        "ignored",
        "learned_blocks",
        "pack",
        "previews",
        "promises",
        "ranks",
        "removed",
        "shared",
        "slot",
        "span",
        "weighed",
        "window",
    )

    def __init__(self, slot: Slot, promises: Promises, *, block_size: int, counted: bool) -> None:
        self.slot = slot
        self.bit = 1 << slot
        self.block_size = block_size
        self.pack = packer(block_size)
        self.counted = counted
        self.heard = False
        self.hidden = 0
        self.weighed = 0
        self.learned_blocks = 0
        self.span = 0
        self.window = 0
        self.epoch = self.clears = self.removed = 0
        self.promises = promises
        self.ranks: dict[int, RankTable] = {}
        self.previews: dict[int, Preview] = {}
        self.blocks = [0, 0, 0, 0]
        self.shared: list[dict[BlockKey, int]] = [{}, {}, {}, {}]
        self.ignored: Counter[str] = Counter()
        self._roots: dict[tuple[str | None, str | None], BlockKey] = {}

    def weight(self) -> int:
        """What its entries take, in blocks. An orphan keeps its tokens: twice a block's bytes. What is noted of an
        offloaded block is half of one, as is
        what is noted of a window's."""
        tables = [*self.ranks.values(), *(preview.over for preview in self.previews.values())]
        weight = sum(self.blocks) + ORPHAN_BLOCKS * sum(len(table.orphans) for table in tables)
        noted = sum(len(table.chunks) + sum(map(len, table.lifetimes)) for table in tables)
        if self.window:
            noted += sum(len(table.windows) for table in tables if table.windows is not None)
        return weight + noted // 2

    def root(self, adapter: str | None, salt: str | None) -> BlockKey:
        """Seed of the chains of one adapter and salt."""
        seed = self._roots.get((adapter, salt))
        if seed is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            seed = self._roots[adapter, salt] = namespace(adapter, salt)
        return seed


def _pack(tokens: Sequence[int]) -> array[int]:
    """Token ids in a compact form; raises ValueError or TypeError when they are no token ids."""
    try:
        return array("I", tokens)
    except OverflowError:
        pass
    try:
        return array("Q", tokens)
    except OverflowError as error:
        raise ValueError("token ids are whole numbers from 0 to 2**64 - 1") from error
