"""The inside of a simulated worker: the pure engine, its clock and its event feed, without HTTP.

Rules:
1. The engine decides when tokens come; this shell only passes its happenings on. One timer is armed for the engine's
   next event, and never sooner than `tick_s` after the last, so that close tokens share a wake-up.
2. Block events of a step go out in one batch, before the tokens of that step.
3. No task, no thread: several workers live in one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.sim.engine import (
    PRESETS,
    Cleared,
    EngineModel,
    Finished,
    FirstToken,
    Happening,
    Removed,
    SimulatedEngine,
    Started,
    Stored,
    Tokens,
)
from gateway.sim.exchange import Exchange, Line
from gateway.sim.publisher import AllBlocksCleared, BlockRemoved, BlockStored, Encoding, Event, EventPublisher, Replay
from gateway.sim.speech import DEMO_MODEL, block_names


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """One worker. Ports of 0 take free ones. `kv_tokens` replaces the preset's cache size; `speed` divides all times;
    `tokens_per_event` is how many tokens a stream event carries; `keep_bodies` newest bodies are kept for tests."""

    name: str = "engine"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = "demo"
    adapters: tuple[str, ...] = ()
    tokenizer: Path = DEMO_MODEL
    preset: str = "demo"
    kv_tokens: int | None = None
    block_size: int = 16
    max_model_len: int = 32_768
    speed: float = 1.0
    tokens_per_event: int = 1
    default_output_tokens: int = 64
    cache_answers: bool = True
    prompt_tokens_details: bool = True
    events: bool = True
    events_port: int = 0
    replay_port: int = 0
    topic: str = ""
    encoding: Encoding = Encoding.MAP
    replay: Replay = Replay.NEW
    buffer_steps: int = 10_000
    version: str = "0.32.0"
    tick_s: float = 0.002
    keep_bodies: int = 1

    def engine_model(self) -> EngineModel:
        """The preset with this worker's cache size. Raises ValueError for an unknown preset."""
        if self.preset not in PRESETS:
            raise ValueError(f"unknown preset {self.preset!r}; there are {', '.join(PRESETS)}")
        model = PRESETS[self.preset]
        return model if self.kv_tokens is None else replace(model, kv_tokens=self.kv_tokens)


class EngineHost:
    """Lives from `boot` to `shut_down`; `boot` again is a restart in place: nothing survives but the ports."""

    def __init__(self, settings: EngineSettings, *, wall_clock: Callable[[], float]) -> None:
        self.settings = settings
        self.model = settings.engine_model()
        self._wall_clock = wall_clock
        self._lines: dict[int, tuple[Exchange, Line]] = {}
        self._late_events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ports = (settings.events_port, settings.replay_port)
        self.publisher: EventPublisher | None = None
        self.boots = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    # ---------------------------------------------------------------- life

    def boot(self) -> None:
        """A fresh engine and publisher. Raises zmq.ZMQError when a port is taken."""
        settings = self.settings
        self.shut_down()
        self._loop = asyncio.get_running_loop()
        self.boots += 1
        self.start_time_unix = self._wall_clock()
        self.engine = SimulatedEngine(
            self.model,
            block_size=settings.block_size,
            token_stride=settings.tokens_per_event,
            whole_block_hits=True,
            speed=settings.speed,
        )
        if settings.events:
            self.publisher = EventPublisher(
                host=settings.host,
                port=self._ports[0],
                replay_port=self._ports[1],
                topic=settings.topic,
                encoding=settings.encoding,
                replay=settings.replay,
                buffer_steps=settings.buffer_steps,
            )
            self._ports = (self.publisher.port, self.publisher.replay_port or 0)

    def shut_down(self) -> None:
        """Stop the clock and free the ports. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lines.clear()
        self._late_events.clear()
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()

    @property
    def load(self) -> int:
        """Engine requests under way."""
        return len(self._lines)

    # ---------------------------------------------------------------- requests

    def submit(self, exchange: Exchange) -> None:
        """All lines of an exchange arrive."""
        settings, ask, now = self.settings, exchange.ask, self._loop.time()
        for line in exchange.lines:
            self._lines[line.ticket] = (exchange, line)
            # The last token of an answer is never computed, so it cannot fill a block.
            end = len(line.tokens) - 1 if settings.cache_answers else len(line.prompt)
            end = max(end, len(line.prompt))
            names = block_names(line.tokens[:end], settings.block_size, adapter=ask.adapter, salt=ask.salt)
            full = len(line.prompt) // settings.block_size
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
            if self._lines.pop(line.ticket, None) is not None:
                self._tell(self.engine.abort(line.ticket, now))
        self._arm()

    # ---------------------------------------------------------------- operations

    def reset_cache(self) -> bool:
        """Empty the cache as `/reset_prefix_cache` does: an idle engine tells of it with its next step only."""
        cleared, happenings = self.engine.clear(self._loop.time())
        self._tell([happening for happening in happenings if type(happening) is not Cleared])
        if cleared:
            self._late_events.append(AllBlocksCleared())
        return cleared

    def clear_cache(self, *, silent: bool) -> None:
        """Empty the cache, with an event at once or with none at all."""
        _, happenings = self.engine.clear(self._loop.time())
        self._tell([happening for happening in happenings if not (silent and type(happening) is Cleared)])

    def set_speed(self, speed: float) -> None:
        """See `SimulatedEngine.set_speed`."""
        self._tell(self.engine.set_speed(speed, self._loop.time()))
        self._arm()

    # ---------------------------------------------------------------- clock

    def _arm(self) -> None:
        """Wake up at the engine's next event."""
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

    def _tell(self, happenings: Sequence[Happening]) -> None:
        """Block events first, in one batch; then tokens to their clients."""
        if not happenings:
            return
        self._publish(happenings)
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
                    entry = self._lines.pop(ticket, None)
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

    def _publish(self, happenings: Sequence[Happening]) -> None:
        if self.publisher is None:
            return
        events: list[Event] = []
        for happening in happenings:
            match happening:
                case Stored(request=ticket):
                    events.append(self._stored(happening, *self._lines[ticket]))
                case Removed(blocks=blocks):
                    events.append(BlockRemoved(blocks))
                case Cleared():
                    events.append(AllBlocksCleared())
                case _:
                    pass
        if events:
            late, self._late_events = self._late_events, []
            self.publisher.publish([*late, *events], self._wall_clock())

    def _stored(self, stored: Stored, exchange: Exchange, line: Line) -> BlockStored:
        size, ask = self.settings.block_size, exchange.ask
        count = len(stored.blocks)
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
