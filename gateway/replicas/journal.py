"""What this replica tells the others: its open bookings, and what has changed since it last said something.

Rules:
1. Told of every booking synchronously (`leases.Watcher`), it only notes; messages are made when `news` or `state` are
   called, outside of requests. Numbers of load are read from the workers then, so they are always the latest.
2. Everything is bounded: open placements that do not fit are not told (`untold`), news that nobody takes give way to
   the next full state.
3. A worker whose events tell what it holds needs the new blocks of a request only: the others have the same events.
   Of other workers everything is told, so that the others can learn it as this replica does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Final

from gateway.kv import KvIndex, Speculation
from gateway.leases import Booking
from gateway.pool import Fleet, Worker, session_digest
from gateway.records import PrefixBlocks, PrefixMode
from gateway.replicas.messages import (
    MAX_CHAINS,
    MAX_KEYS,
    MAX_OPEN,
    MAX_PINS,
    ChainEnd,
    Keys,
    LoadEntry,
    Message,
    Placement,
    pack_keys,
    worker_key,
)

MAX_OPEN_KEYS: Final = 1_000_000
"""Block keys of open placements kept to be told again: 8 MB of names that the prefix cache holds anyway."""

_MAX_REMEMBERED_PINS: Final = 16_384
"""Sessions a newcomer is told of: those used last."""

_LONGEST_S: Final = 1e6
_MOST: Final = 1 << 40


class _Open:
    """A placement whose prefill is not over. `parts` are blocks with the number of the first to be told of each."""

    __slots__ = ("keys", "learn", "number", "parts", "told", "worker")

    def __init__(
        self, number: int, worker: Worker, parts: tuple[tuple[PrefixBlocks, int], ...], *, learn: bool
    ) -> None:
        self.number = number
        self.worker = worker
        self.parts = parts
        self.learn = learn
        self.told = False
        self.keys = sum(max(0, len(chain.keys) - first) for blocks, first in parts for chain in blocks.chains)

    @property
    def too_large(self) -> bool:
        """No message holds it: whoever hears one that does refuses all of it."""
        return self.keys > MAX_KEYS or any(len(blocks.chains) > MAX_CHAINS for blocks, _ in self.parts)


class Journal:
    """One for a process. `replica` is its number, random for each start; `on_change` is called when there is news after
    none."""

    def __init__(
        self,
        replica: int,
        fleet: Fleet,
        index: KvIndex,
        *,
        on_change: Callable[[], None],
        most_news: int = 4 * MAX_KEYS,
    ) -> None:
        self.replica = replica
        self.untold = 0
        """Placements that had no room here."""
        self._fleet = fleet
        self._index = index
        self._on_change = on_change
        self._most_news = most_news
        self._seq = 0
        self._numbers = 0
        self._open: dict[int, _Open] = {}  # by the identity of the booking, which lives at least as long
        self._open_keys = 0
        self._changed: set[Worker] = set()
        self._placed: list[_Open] = []
        self._prefilled: list[int] = []
        self._ended: list[int] = []
        self._pins: dict[int, Worker] = {}
        self._pinned: OrderedDict[int, Worker] = OrderedDict()
        self._overflown = False

    @property
    def open(self) -> int:
        """Placements that others are told of now."""
        return len(self._open)

    @property
    def overflown(self) -> bool:
        """News were lost: the next message has to be a full state."""
        return self._overflown

    # ---------------------------------------------------------------- what happens

    def placed(self, booking: Booking) -> None:
        """A booking was made."""
        worker = booking.worker
        self._note(worker)
        if booking.speculation is None and booking.beside is None:
            return
        # Text keys are never announced.
        learn = booking.blocks.mode is PrefixMode.APPROXIMATE or not self._index.announces(worker.slot)
        parts = tuple(_parts(booking, learn=learn))
        if not parts:
            return
        self._numbers += 1
        entry = _Open(self._numbers, worker, parts, learn=learn)
        if entry.too_large or len(self._open) >= MAX_OPEN or self._open_keys + entry.keys > MAX_OPEN_KEYS:
            self.untold += 1
            return
        self._open[id(booking)] = entry
        self._open_keys += entry.keys
        if len(self._placed) < self._most_news:
            self._placed.append(entry)
        else:
            self._overflown = True

    def prefilled(self, booking: Booking) -> None:
        """Its worker has answered."""
        self._note(booking.worker)
        self._close(booking, self._prefilled, untold=True)

    def closed(self, booking: Booking) -> None:
        """Its request is over."""
        self._note(booking.worker)
        self._close(booking, self._ended, untold=False)

    def pinned(self, session: str, worker: Worker) -> None:
        """The session's latest request went there."""
        digest = session_digest(session)
        if len(self._pins) < MAX_PINS or digest in self._pins:
            self._pins[digest] = worker
        self._pinned[digest] = worker
        self._pinned.move_to_end(digest)
        if len(self._pinned) > _MAX_REMEMBERED_PINS:
            self._pinned.popitem(last=False)

    def _note(self, worker: Worker) -> None:
        if not self._changed:
            self._on_change()
        self._changed.add(worker)

    def _close(self, booking: Booking, told: list[int], *, untold: bool) -> None:
        """`untold`: of interest also where the placement itself is still to be told."""
        entry = self._open.pop(id(booking), None)
        if entry is None:
            return
        self._open_keys -= entry.keys
        if not entry.told and not untold:
            entry.parts = ()
        elif len(told) < MAX_OPEN:
            told.append(entry.number)
        else:
            self._overflown = True

    # ---------------------------------------------------------------- messages

    def news(self, now: float, *, ask: bool = False) -> list[Message]:
        """What has changed since the last call, in messages of bounded size; none when nothing has."""
        fleet = self._fleet.workers
        loads = [_load(worker, now) for worker in self._changed if fleet.get(worker.id) is worker]
        placed = [entry for entry in self._placed if entry.parts]
        pins = [(digest, worker_key(worker.spec)) for digest, worker in self._pins.items()]
        prefilled, ended = self._prefilled, self._ended
        self._forget_news()
        *batches, last = _batches(placed) or [[]]
        messages = [self._message(placed=batch) for batch in batches]
        # Last: what they say may be of what was placed just before.
        if last or loads or prefilled or ended or pins or ask:
            messages.append(
                self._message(placed=last, loads=loads, prefilled=prefilled, ended=ended, pins=pins, ask=ask)
            )
        return messages

    def state(self, now: float, *, ask: bool = False, again: bool = False) -> list[Message]:
        """All there is. With `again` open placements and the latest sessions are told once more, for who missed them;
        without, those that are news."""
        placed = [entry for entry in self._placed if entry.parts]
        pins = self._pins
        if again or self._overflown:
            placed = list(self._open.values())
            pins = dict(self._pinned) if again else pins
        prefilled, ended = self._prefilled, self._ended
        self._forget_news()
        every = [_load(worker, now) for worker in self._fleet.workers.values()]
        loads = [load for load in every if load != LoadEntry(load.worker)]
        told = [(digest, worker_key(worker.spec)) for digest, worker in pins.items()]
        *batches, last = _batches(placed) or [[]]
        messages = [self._message(placed=batch) for batch in batches]
        messages += [self._message(pins=batch) for batch in _slices(told[MAX_PINS:], MAX_PINS)]
        numbers = [entry.number for entry in self._open.values()]
        messages.append(
            self._message(
                full=True,
                placed=last,
                loads=loads,
                prefilled=prefilled,
                ended=ended,
                pins=told[:MAX_PINS],
                opened=numbers,
                ask=ask,
            )
        )
        return messages

    def farewell(self) -> Message:
        """This replica ends."""
        self._seq += 1
        return Message(self.replica, self._seq, leaving=True)

    def _forget_news(self) -> None:
        self._changed = set()
        self._placed, self._prefilled, self._ended = [], [], []
        self._pins = {}
        self._overflown = False

    def _message(
        self,
        *,
        full: bool = False,
        ask: bool = False,
        loads: list[LoadEntry] | None = None,
        placed: Iterable[_Open] = (),
        prefilled: list[int] | None = None,
        ended: list[int] | None = None,
        pins: list[tuple[int, int]] | None = None,
        opened: list[int] | None = None,
    ) -> Message:
        self._seq += 1
        return Message(
            self.replica,
            self._seq,
            full=full,
            ask=ask,
            loads=loads or [],
            placed=[_placement(entry) for entry in placed],
            prefilled=prefilled or [],
            ended=ended or [],
            pins=pins or [],
            open=opened or [],
        )


def _parts(booking: Booking, *, learn: bool) -> Iterator[tuple[PrefixBlocks, int]]:
    """What is to be told of a booking's blocks, and from which block on."""
    blocks = booking.blocks
    for part, speculation in ((blocks, booking.speculation), (blocks.text, booking.beside)):
        if part is None or speculation is None:
            continue
        first = 0 if learn else _first(part, speculation)
        if first is not None:
            yield part, first


def _first(blocks: PrefixBlocks, speculation: Speculation) -> int | None:
    start = speculation.start
    # Whose stretches those of several prompts are is not known.
    return start if start is None or len(blocks.chains) == 1 else 0


def _placement(entry: _Open) -> Placement:
    entry.told = True
    return Placement(
        entry.number,
        worker_key(entry.worker.spec),
        entry.learn,
        [
            Keys(
                blocks.mode is PrefixMode.APPROXIMATE,
                blocks.block_size,
                blocks.tokens,
                [ChainEnd(first, chain.tokens, pack_keys(chain.keys[first:])) for chain in blocks.chains],
            )
            for blocks, first in entry.parts
        ],
    )


def _load(worker: Worker, now: float) -> LoadEntry:
    sent = worker.sent(now)
    return LoadEntry(
        worker_key(worker.spec),
        sent.requests,
        min(sent.pending_s, _LONGEST_S),
        min(sent.head_s, _LONGEST_S),
        min(max(0.0, now - sent.head_since), _LONGEST_S) if sent.head_s else 0.0,
        min(sent.tokens, _MOST),
        min(sent.kv_tokens, _MOST),
        min(sent.queued_kv, _MOST),
        min(sent.output_tokens, _MOST),
        round(sent.stored_rate, 1),
    )


def _batches(entries: Iterable[_Open]) -> list[list[_Open]]:
    """At most `MAX_KEYS` keys in each."""
    batches: list[list[_Open]] = []
    batch: list[_Open] = []
    keys = 0
    for entry in entries:
        if batch and (keys + entry.keys > MAX_KEYS or len(batch) >= MAX_KEYS):
            batches.append(batch)
            batch, keys = [], 0
        batch.append(entry)
        keys += entry.keys
    return [*batches, batch] if batch else batches


def _slices(items: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    rest = iter(items)
    while batch := list(islice(rest, most)):
        yield batch
