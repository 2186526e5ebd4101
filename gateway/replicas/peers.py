"""The other replicas as this one knows them, put into the core: load on workers, promised blocks, sessions.

Rules:
1. Every message is applied at once, synchronously; nothing is awaited, and no message costs more than its own bounds.
2. Any message may be lost, doubled or late. A load counts when it is newer than what is known of that worker; a full
   state ends what it does not name, and nothing older than it counts any more.
3. What a replica has told ends with it: when it says so, or when nothing was heard of it for `dead_s`.
4. A promise of another replica is held as our own are: until its request ends without an answer, or `ttl_s` longer
   than its prefill; the worker's own events end it earlier.
5. A worker that is not (yet) in this fleet is skipped; the next full state tells of it again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from gateway.kv import KvIndex, Speculation
from gateway.pool import NOTHING_SENT, Fleet, Sent, Sessions, Worker
from gateway.records import Chain, PrefixBlocks, PrefixMode
from gateway.replicas.messages import MAX_OPEN, Keys, LoadEntry, Message, Placement, unpack_keys, worker_key

DEAD_S: Final = 3.0
"""Three periods of the full state: two may be lost."""

MAX_PEERS: Final = 64

_MAX_PEER_KEYS: Final = 1_000_000
_LOOK_EVERY_S: Final = 0.5
_SEEN: Final = 256
"""Messages remembered to know one that came twice."""

_TEXT_BYTES: Final = 1
"""Learned text is told only where it may be learned from; how long it was does not matter here."""


@dataclass(slots=True)
class _Held:
    """An open placement of a peer. `learned`: what its worker holds once it has answered."""

    worker: Worker
    speculations: tuple[Speculation, ...]
    keys: int
    learned: PrefixBlocks | None


@dataclass(slots=True)
class _Known:
    """What a peer has on one worker, as told by message `seq`, received at `at`."""

    seq: int
    at: float
    load: LoadEntry


@dataclass(slots=True)
class Peer:
    """One other replica. `lost` counts numbers of messages that never came."""

    heard_at: float
    joined_at: float
    messages: int = 0
    lost: int = 0
    lost_before: int = 0
    newest: int = 0
    full: int = 0
    keys: int = 0
    loads: dict[int, _Known] = field(default_factory=dict)
    open: dict[int, _Held] = field(default_factory=dict)
    seen: deque[int] = field(default_factory=lambda: deque(maxlen=_SEEN))

    @property
    def requests(self) -> int:
        """Its open requests, on all workers."""
        return sum(known.load.requests for known in self.loads.values())


class Peers:
    """See the module. `own` is the number of this replica, whose own messages come back and are left out."""

    def __init__(
        self,
        own: int,
        fleet: Fleet,
        index: KvIndex,
        sessions: Sessions,
        *,
        ttl_s: float = 2.0,
        dead_s: float = DEAD_S,
    ) -> None:
        self._own = own
        self._fleet = fleet
        self._index = index
        self._sessions = sessions
        self.ttl_s = ttl_s
        self._dead_s = dead_s
        self._peers: dict[int, Peer] = {}
        self._fading: deque[tuple[float, Speculation]] = deque()
        self._workers: dict[int, Worker] = {}
        self._looked_at = -_LOOK_EVERY_S
        self.ignored: Counter[str] = Counter()
        """Messages and placements of no use, by reason."""
        self.wanting = False
        """A peer has open placements that were not told here: ask for them."""
        self.peers: Mapping[int, Peer] = MappingProxyType(self._peers)

    # ---------------------------------------------------------------- messages

    def hear(self, message: Message, now: float) -> bool:
        """Apply one message. True when its sender asks for what there is to be told."""
        if message.replica == self._own:
            return False
        if message.leaving:
            self._drop(message.replica, now)
            return False
        peer = self._peers.get(message.replica)
        if peer is None:
            if len(self._peers) >= MAX_PEERS:
                self.ignored["peers"] += 1
                return False
            peer = self._peers[message.replica] = Peer(now, now)
        elif message.seq <= peer.full or message.seq in peer.seen:
            self.ignored["old"] += 1
            return False
        else:
            peer.lost += max(0, message.seq - peer.newest - 1) - (message.seq < peer.newest)
        peer.heard_at = now
        peer.messages += 1
        peer.newest = max(peer.newest, message.seq)
        peer.seen.append(message.seq)
        for placement in message.placed:
            self._place(peer, placement)
        if message.full:
            self._end_unnamed(peer, message, now)
        self._load(peer, message, now)
        for number in message.prefilled:
            self._prefilled(peer, number, now)
        for number in message.ended:
            self._end(peer, number)
        for digest, key in message.pins:
            worker = self._worker(key, now)
            if worker is not None:
                self._sessions.told(digest, worker.id, now)
        return message.ask

    def tick(self, now: float) -> None:
        """About twice a second: who is silent is gone, and promises fade."""
        for replica in [number for number, peer in self._peers.items() if now - peer.heard_at > self._dead_s]:
            self._drop(replica, now)
        fading = self._fading
        while fading and fading[0][0] <= now:
            self._index.retract(fading.popleft()[1])

    def _drop(self, replica: int, now: float) -> None:
        peer = self._peers.pop(replica, None)
        if peer is None:
            return
        for number in list(peer.open):
            self._end(peer, number)
        self._sum(peer.loads, now)

    # ---------------------------------------------------------------- load

    def _load(self, peer: Peer, message: Message, now: float) -> None:
        told: set[int] = set()
        for load in message.loads:
            known = peer.loads.get(load.worker)
            if known is None or known.seq < message.seq:
                peer.loads[load.worker] = _Known(message.seq, now, load)
                told.add(load.worker)
        if message.full:
            for key in [key for key, known in peer.loads.items() if known.seq < message.seq]:
                del peer.loads[key]
                told.add(key)
            peer.full = message.seq
        self._sum(told, now)

    def _sum(self, keys: Iterable[int], now: float) -> None:
        """What all peers have on these workers."""
        for key in keys:
            worker = self._worker(key, now)
            if worker is not None:
                found = [peer.loads[key] for peer in self._peers.values() if key in peer.loads]
                self._fleet.share(worker, _joined(found), now)

    # ---------------------------------------------------------------- placements

    def _place(self, peer: Peer, placement: Placement) -> None:
        if placement.number in peer.open:
            return
        worker = self._worker(placement.worker, peer.heard_at)
        if worker is None:
            self.ignored["worker"] += 1
            return
        size = self._fleet.key_block_size(worker)
        entries = [keys for keys in placement.blocks if keys.text or keys.size == size]
        if len(entries) < len(placement.blocks):
            self.ignored["block_size"] += 1  # keys of another length of block match nothing here
        speculations = []
        count = 0
        for keys in entries:
            for chain in keys.chains:
                if not chain.keys:
                    continue
                unpacked = unpack_keys(chain.keys)
                count += len(unpacked)
                speculations.append(self._index.speculate_end(worker.slot, unpacked, chain.first))
        learned = _blocks(entries) if placement.learn and len(entries) == len(placement.blocks) else None
        if len(peer.open) >= MAX_OPEN or peer.keys + count > _MAX_PEER_KEYS:
            self.ignored["placements"] += 1
            for speculation in speculations:
                self._index.retract(speculation)
            return
        peer.keys += count
        peer.open[placement.number] = _Held(worker, tuple(speculations), count, learned)

    def _prefilled(self, peer: Peer, number: int, now: float) -> None:
        held = peer.open.pop(number, None)
        if held is None:
            return
        peer.keys -= held.keys
        worker = held.worker
        if held.learned is not None and self._fleet.workers.get(worker.id) is worker:
            capacity = worker.kv_capacity
            if self._index.remember(worker.slot, held.learned, capacity, now, promised=held.speculations) is not None:
                return
        self._fading.extend((now + self.ttl_s, speculation) for speculation in held.speculations)

    def _end(self, peer: Peer, number: int) -> None:
        held = peer.open.pop(number, None)
        if held is not None:
            peer.keys -= held.keys
            for speculation in held.speculations:
                self._index.retract(speculation)

    def _end_unnamed(self, peer: Peer, message: Message, now: float) -> None:
        """What a full state does not name is over, and how is not known; numbers above its own came after it."""
        named = set(message.open)
        gone = set(message.prefilled) | set(message.ended)
        newest = max((*named, *gone), default=0)
        for number in [number for number in peer.open if number not in named and number not in gone]:
            if number <= newest or message.seq >= peer.newest:
                self._prefilled(peer, number, now)
        if not named <= peer.open.keys() and (not peer.full or peer.lost > peer.lost_before):
            self.wanting = True
        peer.lost_before = peer.lost

    # ---------------------------------------------------------------- workers

    def _worker(self, key: int, now: float) -> Worker | None:
        worker = self._workers.get(key)
        if worker is not None and self._fleet.workers.get(worker.id) is worker:
            return worker
        if now - self._looked_at < _LOOK_EVERY_S and worker is None:
            return None
        self._looked_at = now
        self._workers = {worker_key(worker.spec): worker for worker in self._fleet.workers.values()}
        return self._workers.get(key)


def _joined(known: list[_Known]) -> Sent:
    """One sum of what several replicas have on a worker (`Worker.others`)."""
    if not known:
        return NOTHING_SENT
    waiting = [entry for entry in known if entry.load.pending_s]
    began, told_at = max(((entry.at - entry.load.head_age_s, entry.at) for entry in waiting), default=(0.0, 0.0))
    loads = [entry.load for entry in known]
    return Sent(
        requests=sum(load.requests for load in loads),
        pending_s=sum(load.pending_s for load in loads),
        head_s=max((entry.load.head_s for entry in waiting), default=0.0),
        head_since=began,
        tokens=sum(load.tokens for load in loads),
        kv_tokens=sum(load.kv_tokens for load in loads),
        queued_kv=sum(load.queued_kv for load in loads),
        output_tokens=sum(load.output_tokens for load in loads),
        stored_rate=sum(load.stored_rate for load in loads),
        told_at=told_at,
    )


def _blocks(entries: list[Keys]) -> PrefixBlocks | None:
    """The blocks of a request again, as the replica that placed it had them."""
    found: PrefixBlocks | None = None
    for keys in reversed(entries):  # those of the text come second, and belong into those of the token ids
        chains = tuple(Chain(unpack_keys(chain.keys), chain.tokens) for chain in keys.chains)
        mode = PrefixMode.APPROXIMATE if keys.text else PrefixMode.EXACT
        text_bytes = _TEXT_BYTES if keys.text else 0
        found = PrefixBlocks(chains, keys.tokens, keys.size, mode, text_bytes=text_bytes, text=found)
    return found
