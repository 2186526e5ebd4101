"""`kvgate demo`: what cache-aware routing is worth, in a minute and without a GPU.

Two equal fleets of simulated engines are started, each behind a gateway of its own: one routes by `seconds`, the
other round robin. Both get the same conversations at the same moments, so machine noise meets both alike. Shown are
the share of prompt tokens served from cache, and the time to first token as the client sees it.

The gateway itself is not started here: the caller passes a function that does (`StartGateway`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gateway.sim.server import Dialect, EngineSettings, SimulatedWorker, Speech
from gateway.sim.workload import ChatDriver, TurnResult, WorkloadSettings, plan


@dataclass(frozen=True, slots=True)
class DemoWorker:
    """A worker of a demo fleet, as the gateway may be told of it; everything but the URL can be probed."""

    name: str
    url: str


@dataclass(frozen=True, slots=True)
class DemoGatewayConfig:
    """The gateway to start: its policy, its workers (all up), the model's name and tokenizer directory."""

    policy: str
    workers: tuple[DemoWorker, ...]
    model: str
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class GatewayCounters:
    """What a gateway counted so far. `predictions` are requests whose prediction could be checked, `misses` those
    that delivered less (`route miss`)."""

    predictions: int = 0
    misses: int = 0


class GatewayHandle(Protocol):
    """A gateway that is ready to serve. `admin_url` is its page, None without one."""

    @property
    def url(self) -> str: ...
    @property
    def admin_url(self) -> str | None: ...
    def counters(self) -> GatewayCounters: ...


StartGateway = Callable[[DemoGatewayConfig], AbstractAsyncContextManager[GatewayHandle]]
"""Starts a gateway on free loopback ports; entering waits until it is ready, leaving stops it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """`duration_s` is the time requests are sent; the run ends when the last of them is answered. Requests sent in
    the first `warm_up_share` of it, while every cache is empty, are not in the figures (their errors are). Engines take
    the `dialects` in turn."""

    duration_s: float = 40.0
    engines: int = 4
    dialects: tuple[Dialect, ...] = (Dialect.VLLM,)
    policies: tuple[str, ...] = ("seconds", "round_robin")
    seed: int = 1
    warm_up_share: float = 0.3
    report_every_s: float = 1.0

    def workload(self) -> WorkloadSettings:
        """The conversations of this run."""
        return WorkloadSettings(seed=self.seed, duration_s=self.duration_s)


@dataclass(slots=True)
class PolicyScore:
    """What the client saw of one policy. Requests sent before `measured_from` (the driver's clock) count for errors
    only. `shares` counts requests by worker."""

    policy: str
    measured_from: float = 0.0
    admin_url: str | None = None
    requests: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    shares: Counter[str] = field(default_factory=Counter)
    in_flight: int = 0
    counters: GatewayCounters = field(default_factory=GatewayCounters)

    def add(self, result: TurnResult) -> None:
        """One more request is over."""
        if result.error is not None or result.ttft_s is None:
            self.errors[result.error or "no_text"] += 1
        if result.started_at < self.measured_from:
            return
        self.requests += 1
        if result.worker is not None:
            self.shares[result.worker] += 1
        if result.error is not None or result.ttft_s is None:
            return
        self.ttfts.append(result.ttft_s)
        self.prompt_tokens += result.prompt_tokens
        self.cached_tokens += result.cached_tokens or 0

    @property
    def hit_rate(self) -> float:
        """Cached over prompt tokens of completed requests, 0 before the first."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def route_miss_rate(self) -> float | None:
        """Misses over predictions, None while nothing was predicted."""
        counters = self.counters
        return counters.misses / counters.predictions if counters.predictions else None

    def ttft_s(self, quantile: float) -> float | None:
        """Nearest-rank quantile of the time to first token, None before the first."""
        values = sorted(self.ttfts)
        return values[min(len(values) - 1, int(quantile * len(values)))] if values else None

    def summary(self) -> dict[str, object]:
        """The figures of `--json`."""
        return {
            "hit_rate": round(self.hit_rate, 4),
            "ttft_p50_s": _rounded(self.ttft_s(0.5)),
            "ttft_p99_s": _rounded(self.ttft_s(0.99)),
            "requests": self.requests,
            "errors": self.errors.total(),
            "route_miss_rate": _rounded(self.route_miss_rate),
        }


@dataclass(frozen=True, slots=True)
class DemoResult:
    """One score a policy, in the order they were asked for."""

    scores: Mapping[str, PolicyScore]

    @property
    def failed(self) -> bool:
        """Whether any request failed or nothing was measured."""
        return any(score.errors.total() or not score.ttfts for score in self.scores.values())

    def summary(self) -> dict[str, object]:
        """`policy -> figures`."""
        return {policy: score.summary() for policy, score in self.scores.items()}


Show = Callable[[float, Sequence[PolicyScore]], None]
"""Called about once a second with the elapsed seconds and the scores so far."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One policy's fleet, gateway and client."""

    score: PolicyScore
    gateway: GatewayHandle
    driver: ChatDriver

    def refresh(self) -> None:
        self.score.counters = self.gateway.counters()
        self.score.in_flight = self.driver.open_requests


async def run_demo(
    settings: DemoSettings,
    *,
    start_gateway: StartGateway,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
    show: Show,
) -> DemoResult:
    """The whole demo; `clock` is monotonic seconds, `wall_clock` Unix seconds.

    Raises what starting engines or gateways raises; failing requests are counted, not raised.
    """
    sessions = plan(settings.workload())
    speech = Speech.load(EngineSettings().tokenizer)
    async with AsyncExitStack() as stack:
        sides = [
            await _side(
                policy, settings, stack, start_gateway=start_gateway, wall_clock=wall_clock, clock=clock, speech=speech
            )
            for policy in settings.policies
        ]
        scores = [side.score for side in sides]
        began = clock()
        for score in scores:
            score.measured_from = began + settings.warm_up_share * settings.duration_s
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(side.driver.run(sessions)) for side in sides]
            while not all(run.done() for run in runs):
                for side in sides:
                    side.refresh()
                show(clock() - began, scores)
                await asyncio.wait(runs, timeout=settings.report_every_s)
        for side in sides:
            side.refresh()
        show(clock() - began, scores)
        return DemoResult({score.policy: score for score in scores})


async def _side(
    policy: str,
    settings: DemoSettings,
    stack: AsyncExitStack,
    *,
    start_gateway: StartGateway,
    wall_clock: Callable[[], float],
    clock: Callable[[], float],
    speech: Speech,
) -> _Side:
    """Engines first, then their gateway; `stack` takes them down in reverse."""
    engine = EngineSettings(preset="demo", tokens_per_event=4)
    workers: list[DemoWorker] = []
    for number in range(1, settings.engines + 1):
        dialect = settings.dialects[(number - 1) % len(settings.dialects)]
        worker = SimulatedWorker(
            replace(engine, name=f"w{number}", dialect=dialect), wall_clock=wall_clock, speech=speech
        )
        await worker.start()
        stack.push_async_callback(worker.stop)
        workers.append(DemoWorker(worker.settings.name, worker.url))
    config = DemoGatewayConfig(policy, tuple(workers), engine.model, engine.tokenizer)
    gateway = await stack.enter_async_context(start_gateway(config))
    score = PolicyScore(policy, admin_url=gateway.admin_url)
    driver = ChatDriver(
        gateway.url, model=engine.model, clock=clock, on_result=score.add, stop_after_s=settings.duration_s
    )
    return _Side(score, gateway, driver)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
