"""The data-parallel ranks of one simulated worker: each has an engine, a cache and a publisher of its own.

Rank r publishes events and load at the ports of rank 0 plus r. A request goes to the rank it names, else to the next in
turn.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from gateway.sim.faults import Fault, FaultKind
from gateway.sim.host import EngineHost
from gateway.sim.load_publisher import LoadPublisher
from gateway.sim.publisher import EventPublisher
from gateway.sim.settings import EngineSettings

_PORT_TRIES = 50
"""How often free ports in a row are looked for: others take and give back ports all the time."""


class Ranks:
    """`boot` starts every rank, and starts them anew when called again; `shut_down` frees the ports."""

    def __init__(self, settings: EngineSettings, *, wall_clock: Callable[[], float]) -> None:
        if settings.data_parallel_size < 1:
            raise ValueError("a worker has at least one rank")
        self._settings = settings
        self.hosts = tuple(
            EngineHost(settings, rank=rank, wall_clock=wall_clock) for rank in range(settings.data_parallel_size)
        )
        settings.load_port(settings.events_port, settings.replay_port or None)  # as far as it can be checked
        self._ports = (settings.events_port, settings.replay_port)
        self._turn = 0
        self._offline = False

    @property
    def first(self) -> EngineHost:
        """Rank 0; it stands for what all have in common."""
        return self.hosts[0]

    # ---------------------------------------------------------------- life

    def boot(self) -> None:
        """Raises zmq.ZMQError when a port is taken, ValueError when one is in the way of the load sockets."""
        alone = len(self.hosts) == 1 and not self._settings.publishes_load
        tries = 1 if all(self._ports) or alone else _PORT_TRIES
        for left in reversed(range(tries)):
            try:
                self._boot_once()
                return
            except (zmq.ZMQError, ValueError):
                self.shut_down()
                if not left:
                    raise

    def _boot_once(self) -> None:
        events, replay = self._ports
        for rank, host in enumerate(self.hosts):
            host.boot((events and events + rank, replay and replay + rank), online=not self._offline)
            publisher = host.publisher
            if rank == 0 and publisher is not None:
                events, replay = publisher.port, publisher.replay_port or 0
        self._publish_load(events, replay or None)
        self._ports = events, replay

    def _publish_load(self, events: int, replay: int | None) -> None:
        port = self._settings.load_port(events, replay)
        if port is not None:
            for rank, host in enumerate(self.hosts):
                host.publish_load(port + rank, online=not self._offline)

    def shut_down(self) -> None:
        """Idempotent."""
        for host in self.hosts:
            host.shut_down()

    def pick(self, rank: int | None) -> EngineHost:
        """The named rank, or the next in turn. Raises LookupError for one there is none of."""
        if rank is None:
            self._turn += 1
            return self.hosts[(self._turn - 1) % len(self.hosts)]
        if not 0 <= rank < len(self.hosts):
            raise LookupError(f"data_parallel_rank {rank} is out of range [0, {len(self.hosts)})")
        return self.hosts[rank]

    def reset_caches(self) -> bool:
        """Empty every rank's cache as the engine's own path does; False when one of them is in use."""
        return all([host.reset_cache() for host in self.hosts])

    # ---------------------------------------------------------------- faults

    def fault(self, fault: Fault) -> None:
        """A fault of engines or event feeds, at the rank it names or at all."""
        if fault.kind in (FaultKind.OFFLINE, FaultKind.ONLINE, FaultKind.HEAL):
            self._offline = fault.kind is FaultKind.OFFLINE
        for host in self.hosts:
            if fault.rank is None or fault.rank == host.rank:
                _engine_fault(host, fault)
                if host.publisher is not None:
                    _feed_fault(host.publisher, fault)
                if host.load_publisher is not None:
                    _load_fault(host.load_publisher, fault)

    # ---------------------------------------------------------------- looking

    def state(self) -> dict[str, object]:
        """Figures of all ranks together, those of the event feed of rank 0, and `ranks` with each one's own."""
        parts = [_state(host) for host in self.hosts]
        whole: dict[str, object] = {
            name: parts[0][name] if name in _FIRST_ONLY else sum(_number(part[name]) for part in parts)
            for name in parts[0]
        }
        usage = max(host.engine.kv_usage for host in self.hosts)
        return {"boots": self.first.boots, "kv_usage": usage} | whole | {"ranks": parts}


_FIRST_ONLY = frozenset({"event_sequence", "replays"})


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return value


def _state(host: EngineHost) -> dict[str, object]:
    engine, counters, publisher = host.engine, host.engine.counters, host.publisher
    return {
        "running": engine.running,
        "waiting": engine.waiting,
        "finished": counters.finished,
        "resident_blocks": engine.resident_blocks,
        "in_use_blocks": engine.in_use_blocks,
        "capacity_blocks": engine.capacity_blocks,
        "host_blocks": engine.host_blocks,
        "evicted_blocks": counters.evicted_blocks,
        "queried_tokens": counters.queried_tokens,
        "hit_tokens": counters.hit_tokens,
        "prefill_busy_s": counters.prefill_busy_s,
        "event_sequence": None if publisher is None else publisher.sequence,
        "replays": None if publisher is None else publisher.replays,
    }


def _engine_fault(host: EngineHost, fault: Fault) -> None:
    match fault.kind:
        case FaultKind.CLEAR:
            host.clear_cache(silent=fault.silent)
        case FaultKind.EVICT:
            host.evict(fault.medium, fault.count, silent=fault.silent)
        case FaultKind.SLOW:
            host.set_speed(host.settings.speed * fault.factor)
        case FaultKind.LINK:
            host.engine.set_link(fault.factor)
        case _:
            pass


def _load_fault(publisher: LoadPublisher, fault: Fault) -> None:
    match fault.kind:
        case FaultKind.OFFLINE:
            publisher.go_offline()
        case FaultKind.ONLINE | FaultKind.HEAL:
            publisher.go_online()
        case _:
            pass


def _feed_fault(publisher: EventPublisher, fault: Fault) -> None:
    match fault.kind:
        case FaultKind.DROP:
            publisher.lose(1 if fault.count is None else fault.count, for_good=fault.for_good)
        case FaultKind.HOLD:
            publisher.hold()
        case FaultKind.RELEASE:
            publisher.release()
        case FaultKind.TRIM:
            publisher.trim()
        case FaultKind.OFFLINE:
            publisher.go_offline()
        case FaultKind.ONLINE:
            publisher.go_online()
        case FaultKind.HEAL:
            publisher.release()
            publisher.go_online()
        case _:
            pass
