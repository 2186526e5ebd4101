"""One rank of a simulated worker: the pure engine, its clock, its event feed and load socket, without HTTP.

Rules:
1. The engine decides when tokens come; this shell only passes its happenings on. One timer is armed for the engine's
   next event, and never sooner than `tick_s` after the last, so that close tokens share a wake-up.
2. vLLM: block events of a step go out in one batch, before the tokens of that step. SGLang: events wait, and gauges
   stand still, until a prefill has ended, the engine is idle or `decode_log_interval` decode steps have passed.
3. No task, no thread: several workers live in one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gateway.records import Tier
from gateway.sim.cache import HostTier
from gateway.sim.engine import (
    Cleared,
    Finished,
    FirstToken,
    Happening,
    Removed,
    SimulatedEngine,
    Started,
    Stored,
    Tokens,
)
from gateway.sim.event_bytes import AllBlocksCleared, BlockRemoved, BlockStored, Event
from gateway.sim.exchange import Exchange, Line
from gateway.sim.load_publisher import LoadPublisher, LoadStat
from gateway.sim.publisher import EventPublisher
from gateway.sim.radix_cache import RadixCache
from gateway.sim.releases import Dialect, sglang_names
from gateway.sim.settings import EngineSettings
from gateway.sim.speech import block_names


class Gauges(NamedTuple):
    """What `/metrics` shows of the load: requests in prefill or decode and waiting, share of the cache in use."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0


class EngineHost:
    """Lives from `boot` to `shut_down`; `boot` again is a restart in place: nothing survives but the ports."""

    def __init__(self, settings: EngineSettings, *, rank: int = 0, wall_clock: Callable[[], float]) -> None:
        self.settings = settings
        self.rank = rank
        self.model = settings.engine_model()
        self.publisher: EventPublisher | None = None
        self.load_publisher: LoadPublisher | None = None
        self.boots = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self._wall_clock = wall_clock
        self._sglang = settings.dialect is Dialect.SGLANG
        self._release = settings.release()
        self._encode = settings.encoder(rank)
        self._lines: dict[int, tuple[Exchange, Line]] = {}
        self._pending: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._shown = Gauges()
        self._flushed_at = 0.0
        # SGLang names pages by content; the engine's own names also tell adapters, salts and extra keys apart.
        self._names: dict[int, list[int]] = {}
        self._announced: dict[tuple[Tier, int], int] = {}

    # ---------------------------------------------------------------- life

    def boot(self, ports: tuple[int, int], *, online: bool = True) -> None:
        """A fresh engine and publisher at the event and replay ports, its sockets open if `online`.

        Raises zmq.ZMQError when a port is taken.
        """
        settings = self.settings
        self.shut_down()
        self._loop = asyncio.get_running_loop()
        self.boots += 1
        self.start_time_unix = self._wall_clock()
        blocks = max(1, self.model.kv_tokens // settings.block_size)
        host_blocks = settings.host_tokens // settings.block_size
        self.engine = SimulatedEngine(
            self.model,
            block_size=settings.block_size,
            token_stride=settings.tokens_per_event,
            whole_block_hits=True,
            speed=settings.speed,
            cache=RadixCache(blocks) if self._sglang else None,
            host=HostTier(host_blocks, chunk=1 if self._sglang else settings.offload_chunk) if host_blocks else None,
        )
        self._shown, self._flushed_at = Gauges(), 0.0
        if settings.events:
            self.publisher = EventPublisher(
                self._encode,
                host=settings.host,
                port=ports[0],
                replay_port=ports[1],
                topic=settings.topic,
                replay=settings.replay_layout(),
                buffer_steps=settings.buffer_steps,
                online=online,
            )
        if self._sglang:  # its tree is reset once at the start, and tells of it
            self._publish([AllBlocksCleared()])

    def shut_down(self) -> None:
        """Stop the clock and free the ports. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lines.clear()
        self._pending.clear()
        self._names.clear()
        self._announced.clear()
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()
        load_publisher, self.load_publisher = self.load_publisher, None
        if load_publisher is not None:
            load_publisher.close()

    def publish_load(self, port: int, *, online: bool = True) -> None:
        """Its load too, at this port, from now on. Raises zmq.ZMQError when the port is taken."""
        self.load_publisher = LoadPublisher(
            self._load_stat, self._release, host=self.settings.host, port=port, online=online
        )

    @property
    def load(self) -> int:
        """Engine requests under way."""
        return len(self._lines)

    def adapters(self, *, running: bool) -> list[str]:
        """Those of requests that have begun to answer, or of the others."""
        lines = (ask.ask.adapter for ask, line in self._lines.values() if bool(line.done) is running)
        return sorted({adapter for adapter in lines if adapter is not None})

    @property
    def gauges(self) -> Gauges:
        """What `/metrics` shows now: SGLang's are as old as its last flush of events."""
        return self._shown if self._sglang else self._live()

    def _live(self) -> Gauges:
        return Gauges(self.engine.running, self.engine.waiting, self.engine.kv_usage)

    def _load_stat(self) -> LoadStat:
        engine, counters, size = self.engine, self.engine.counters, self.settings.block_size
        used = engine.in_use_blocks * size
        prompts, uncached = engine.waiting_tokens()
        return LoadStat(
            running=engine.running,
            waiting=engine.waiting,
            tokens=used,
            capacity=engine.capacity_blocks * size,
            rank=self.rank,
            waiting_uncached_tokens=uncached,
            total_tokens=used + prompts,
            max_running=self.model.max_running,
            prefill_tokens=counters.queried_tokens - counters.hit_tokens,
            prefill_us=round(counters.prefill_busy_s * 1e6),
        )

    # ---------------------------------------------------------------- requests

    def submit(self, exchange: Exchange) -> None:
        """All lines of an exchange arrive."""
        settings, ask, now = self.settings, exchange.ask, self._loop.time()
        for line in exchange.lines:
            self._lines[line.ticket] = (exchange, line)
            # The last token of an answer is never computed, so it cannot fill a block.
            end = len(line.tokens) - 1 if settings.cache_answers else len(line.prompt)
            end = max(end, len(line.prompt))
            apart = ask.extra_key if self._sglang else None
            names = block_names(line.tokens[:end], settings.block_size, adapter=ask.adapter, salt=ask.salt, apart=apart)
            full = len(line.prompt) // settings.block_size
            if self._sglang:
                self._names[line.ticket] = sglang_names(
                    line.tokens[:end], settings.block_size, self._release, adapter=ask.adapter, salt=ask.salt
                )
            happenings = self.engine.submit(
                line.ticket,
                names[:full],
                prompt_tokens=len(line.prompt),
                output_tokens=len(line.output),
                output_blocks=names[full:],
                now=now,
            )
            self._tell(happenings)
        self._arm()

    def drop(self, exchange: Exchange) -> None:
        """Take what is left of an exchange out of the engine."""
        now = self._loop.time()
        self._tell(self.engine.advance(now))  # blocks that were stored until now still need their lines
        for line in exchange.lines:
            if line.ticket in self._lines:
                self._tell(self.engine.abort(line.ticket, now))
                self._forget(line.ticket)
        self._arm()

    def _forget(self, ticket: int) -> tuple[Exchange, Line] | None:
        self._names.pop(ticket, None)
        return self._lines.pop(ticket, None)

    # ---------------------------------------------------------------- operations

    def reset_cache(self) -> bool:
        """Empty the cache when asked to. SGLang tells of it at once; an idle vLLM does with its next step only."""
        cleared, happenings = self.engine.clear(self._loop.time())
        if self._sglang:
            self._tell(happenings, flush=True)
            return cleared
        self._tell([happening for happening in happenings if type(happening) is not Cleared])
        if cleared:
            self._pending.append(AllBlocksCleared())
        return cleared

    def clear_cache(self, *, silent: bool) -> None:
        """Empty the cache, with an event at once or with none at all."""
        _, happenings = self.engine.clear(self._loop.time())
        self._lose_or_tell(happenings, Cleared, silent=silent)

    def evict(self, tier: Tier, count: int | None, *, silent: bool) -> None:
        """Evict idle blocks of a tier (None: all), with events at once or with none at all."""
        happenings = self.engine.evict(tier, count, self._loop.time())
        self._lose_or_tell(happenings, Removed, silent=silent)

    def _lose_or_tell(self, happenings: list[Happening], kind: type[Happening], *, silent: bool) -> None:
        """The last happening is the fault's own if it is of `kind`; those before it are of the time until now."""
        done = happenings.pop() if happenings and type(happenings[-1]) is kind else None
        self._tell(happenings)
        if done is None:
            return
        if silent:
            self._event(done)
        else:
            self._tell([done], flush=True)

    def set_speed(self, speed: float) -> None:
        """See `SimulatedEngine.set_speed`."""
        self._tell(self.engine.set_speed(speed, self._loop.time()))
        self._arm()

    # ---------------------------------------------------------------- clock

    def _arm(self) -> None:
        """Wake up at the engine's next event; something has just happened to it."""
        if self.load_publisher is not None:
            self.load_publisher.changed()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self.engine.next_event_at()
        if due is not None:
            self._timer = self._loop.call_at(max(due, self._loop.time() + self.settings.tick_s), self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._tell(self.engine.advance(self._loop.time()))
        self._arm()

    def _tell(self, happenings: Sequence[Happening], *, flush: bool = False) -> None:
        """Block events first, in one batch; then tokens to their clients."""
        if not happenings:
            return
        events = [event for event in map(self._event, happenings) if event is not None]
        self._pending += events
        if flush or (self._flush_due(happenings) if self._sglang else events):
            self._shown, self._flushed_at = self._live(), self.engine.steps
            pending, self._pending = self._pending, []
            self._publish(pending)
        for happening in happenings:
            match happening:
                case Started(request=ticket, cached_tokens=cached):
                    line = self._lines[ticket][1]
                    line.cached_tokens = cached
                    self.prompt_tokens += len(line.prompt)
                case FirstToken(request=ticket):
                    self._pass_on(ticket, 1, first=True)
                case Tokens(request=ticket, count=count):
                    self._pass_on(ticket, count, first=False)
                case Finished(request=ticket):
                    entry = self._forget(ticket)
                    if entry is not None:
                        entry[0].finished()
                case _:
                    pass

    def _pass_on(self, ticket: int, count: int, *, first: bool) -> None:
        entry = self._lines.get(ticket)
        if entry is None or entry[0].over:
            return
        exchange, line = entry
        self.generated_tokens += count
        if first:
            exchange.first_token(line)
        else:
            exchange.more(line, count)
        if exchange.over:  # a fault has cut the stream
            self.drop(exchange)

    # ---------------------------------------------------------------- events

    def _flush_due(self, happenings: Sequence[Happening]) -> bool:
        """Rule 2 for SGLang."""
        engine = self.engine
        return (
            engine.running == 0
            or engine.steps >= self._flushed_at + self.settings.decode_log_interval
            or any(type(happening) is FirstToken for happening in happenings)
        )

    def _publish(self, events: Sequence[Event]) -> None:
        if self.publisher is not None:
            self.publisher.publish(events, self._wall_clock())

    def _event(self, happening: Happening) -> Event | None:
        match happening:
            case Stored(request=ticket):
                exchange, line = self._lines[ticket]
                return (
                    self._sglang_stored(happening, exchange, line)
                    if self._sglang
                    else self._vllm_stored(happening, exchange, line)
                )
            case Removed(blocks=blocks, tier=tier):
                if self._sglang:
                    blocks = tuple(self._announced.pop((tier, block)) for block in blocks)
                return BlockRemoved(blocks, tier)
            case Cleared():
                self._announced.clear()
                return AllBlocksCleared()
            case _:
                return None

    def _vllm_stored(self, stored: Stored, exchange: Exchange, line: Line) -> BlockStored:
        size, ask = self.settings.block_size, exchange.ask
        count = len(stored.blocks)
        if stored.tier is not Tier.GPU:
            return BlockStored(stored.blocks, None, (), 0, tier=stored.tier)
        extra: list[list[str] | None] | None = None
        if ask.adapter is not None or ask.salt is not None:
            adapter = [] if ask.adapter is None else [ask.adapter]
            salted = [*adapter, ask.salt] if ask.salt is not None else adapter
            extra = [(salted if stored.first + i == 0 else adapter) or None for i in range(count)]
        return BlockStored(
            hashes=stored.blocks,
            parent=stored.parent,
            token_ids=line.tokens[stored.first * size : (stored.first + count) * size],
            block_size=size,
            adapter=ask.adapter,
            extra_keys=extra,
        )

    def _sglang_stored(self, stored: Stored, exchange: Exchange, line: Line) -> BlockStored:
        size, ask, first = self.settings.block_size, exchange.ask, stored.first
        end = first + len(stored.blocks)
        names = self._names[line.ticket]
        self._announced.update({(stored.tier, b): n for b, n in zip(stored.blocks, names[first:end], strict=True)})
        return BlockStored(
            hashes=names[first:end],
            parent=names[first - 1] if first else None,
            token_ids=line.tokens[first * size : end * size],
            block_size=size,
            adapter=ask.adapter,
            tier=stored.tier,
            salt=ask.salt,
            session=ask.session,
        )
