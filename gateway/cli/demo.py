"""`kvgate demo`: gives the demo its gateways, and shows it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import typer
import uvloop
from rich.console import Console

from gateway.runtime import Gateway
from gateway.settings import ModelSettings, RoutingSettings, ServerSettings, Settings, WorkerSettings
from gateway.sim.demo import DemoGatewayConfig, DemoSettings, GatewayCounters, GatewayHandle, PolicyScore, run_demo
from gateway.sim.demo_view import print_summary, showing
from gateway.sim.releases import Dialect
from gateway.telemetry import set_up_logging

_READY_WITHIN_S = 30.0


def run(*, duration_s: float, engines: int, dialects: tuple[Dialect, ...], seed: int, as_json: bool) -> int:
    """The whole demo; the exit code: 0, 1 when a request failed."""
    console = Console(stderr=as_json, highlight=False)
    settings = DemoSettings(duration_s=duration_s, engines=engines, dialects=dialects, seed=seed)
    if not as_json:
        kinds = " and ".join(dialects)
        console.print(
            f"{engines} simulated {kinds} engines behind each gateway, "
            f"the same conversations to both for {duration_s:g} s.",
        )
    # Only what went wrong: the table has the screen.
    set_up_logging(form="console", level="error", stream=sys.stderr.buffer, wall=time.time)  # noqa: TID251
    with showing(console, duration_s=duration_s) as show:
        result = uvloop.run(
            run_demo(
                settings,
                start_gateway=_gateway,
                clock=time.monotonic,  # noqa: TID251  the clock of this process
                wall_clock=time.time,  # noqa: TID251  time stamps on the wire
                show=show if not as_json else _silent,
            )
        )
    if as_json:
        typer.echo(json.dumps(result.summary()))
    else:
        print_summary(console, result, warm_up_share=settings.warm_up_share)
    return 1 if result.failed else 0


def _silent(elapsed_s: float, scores: Sequence[PolicyScore]) -> None:
    """Shows nothing on the way: only the JSON at the end counts."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A gateway of the demo (`gateway.sim.demo.GatewayHandle`)."""

    gateway: Gateway
    url: str
    admin_url: str | None

    def counters(self) -> GatewayCounters:
        counts = self.gateway.metrics.counts
        return GatewayCounters(sum(counts.predictions.values()), sum(counts.misses.values()))


@asynccontextmanager
async def _gateway(config: DemoGatewayConfig) -> AsyncIterator[GatewayHandle]:
    settings = Settings(
        server=ServerSettings(host="127.0.0.1", port=0, admin_port=0, drain_timeout_s=5),
        models=(ModelSettings(name=config.model, tokenizer=config.tokenizer),),
        workers=tuple(WorkerSettings(url=worker.url, name=worker.name) for worker in config.workers),
        routing=RoutingSettings.model_validate({"policy": config.policy}),
    )
    gateway = Gateway(settings)
    ports = await gateway.start()
    try:
        await gateway.until_ready(_READY_WITHIN_S)
        yield _Running(gateway, ports.url, ports.admin_url)
    finally:
        await gateway.stop()
