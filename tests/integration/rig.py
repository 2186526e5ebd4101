"""A whole gateway with simulated engines in this process: real ports, real event sockets."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml

from gateway.config import Sources
from gateway.runtime import Gateway, Ports
from gateway.settings import Settings
from gateway.sim.server import EngineSettings, SimulatedWorker, Speech

PATIENCE_S = 20.0
"""Generous: a condition that needs this long on a busy machine is still met."""


@dataclass(frozen=True)
class Rig:
    """The gateway, its engines in order of their names (w1, w2, ...), and a client for the client port."""

    gateway: Gateway
    ports: Ports
    engines: list[SimulatedWorker]
    http: httpx.AsyncClient

    async def admin(self, path: str, **kwargs: Any) -> Any:
        """GET on the admin port, decoded."""
        answer = await self.http.get(self.ports.admin_url + path, **kwargs)
        assert answer.status_code == 200, answer.text
        return answer.json()

    @property
    def announced(self) -> int:
        """Blocks that the index has from events, of all workers and tiers."""
        return sum(sum(tiers.values()) for tiers in self.gateway.index.stats().blocks.values())

    def engine(self, name: str) -> SimulatedWorker:
        """By worker name."""
        return next(engine for engine in self.engines if engine.settings.name == name)

    def quiet(self) -> bool:
        """No request is open anywhere: leases, streams, gauges, engines."""
        workers = self.gateway.fleet.workers.values()
        return (
            self.gateway.router.open_leases == 0
            and self.gateway.upstream.open_streams() == 0
            and self.gateway.edge.open_exchanges == 0
            and all((w.inflight_requests, w.inflight_tokens, w.pending_s) == (0, 0, 0.0) for w in workers)
            and all(e.state()["running"] == 0 and e.state()["waiting"] == 0 for e in self.engines)
        )


async def until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  conditions of several parts, none of which has an event
            await asyncio.sleep(0.01)


def fast(**kwargs: Any) -> EngineSettings:
    """An engine whose times are a hundredth of the demo's."""
    return replace(EngineSettings(speed=100.0), **kwargs)


def write_yaml(path: Path, tree: Mapping[str, Any]) -> None:
    """As an editor does: a new file, renamed over the old one (where a link leads, that one)."""
    path = path.resolve()
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(dict(tree)))
    os.replace(new, path)


@asynccontextmanager
async def rig(
    engines: int = 2,
    *,
    engine: EngineSettings | None = None,
    each: Sequence[dict[str, Any]] = (),
    labels: Sequence[dict[str, Any]] = (),
    settings: dict[str, Any] | None = None,
    wait: bool = True,
    file: Path | None = None,
) -> AsyncIterator[Rig]:
    """Start engines and a gateway over them; everything ends with the context. `each` has what differs from `engine`
    for the first, the second, ...; `labels` are further keys of their entries under `workers`; `file` is where
    the configuration is written, and may be written again."""
    model = engine or fast()
    speech = Speech.load(model.tokenizer)
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(1, engines + 1):
            own = each[number - 1] if number <= len(each) else {}
            worker = SimulatedWorker(replace(model, name=f"w{number}", **own), wall_clock=time.time, speech=speech)
            await worker.start()
            stack.push_async_callback(worker.stop)
            workers.append(worker)
        tree: dict[str, Any] = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_timeout_s": 5},
            "workers": [
                {"url": worker.url, "name": worker.settings.name} | (labels[at] if at < len(labels) else {})
                for at, worker in enumerate(workers)
            ],
            "load": {"poll_s": 0.2},
            "timeouts": {"connect_s": PATIENCE_S},  # engines share this process: on a busy machine they accept late
        }
        for section, keys in (settings or {}).items():
            tree[section] = tree.get(section, {}) | keys if isinstance(keys, dict) else keys
        sources = None
        if file is not None:
            write_yaml(file, tree)
            sources = Sources(file, environ={})
        gateway = Gateway(Settings(**tree), sources=sources, rng=Random(1))
        ports = await gateway.start()
        stack.push_async_callback(gateway.stop)
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=ports.url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None))
        )
        if wait:
            await gateway.until_ready(PATIENCE_S)
        yield Rig(gateway, ports, workers, http)
