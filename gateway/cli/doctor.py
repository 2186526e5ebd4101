"""`kvgate doctor`: makes what the doctor needs, shows its progress, prints its report."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from random import Random
from typing import Any

import typer
import zmq.asyncio
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from gateway.cli.admin_port import AdminError, port_of
from gateway.config import ConfigError
from gateway.doctor import Checked, GatewaySeen, Plan, Tools, check_fleet, new_prompt, read_gateway, unseen, worst
from gateway.records import Finding, Severity, WorkerId, WorkerSpec
from gateway.runtime.models import Tokenizers
from gateway.runtime.tls import worker_context
from gateway.settings import Settings
from gateway.telemetry import set_up_logging
from gateway.upstream.control import open_control_client

_EXIT = {None: 0, Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
_STYLE = {Severity.INFO: "cyan", Severity.WARNING: "yellow", Severity.ERROR: "bold red"}
_GATEWAY = "gateway"
_REQUEST_S = 10.0
"""The longest one answer of a worker may take: a test prompt waits its turn on a busy one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line. `admin` is the address of a running gateway's admin port."""

    admin: str | None
    token: str | None
    probe: bool
    timeout_s: float
    as_json: bool


@dataclass(frozen=True, slots=True)
class _Report:
    workers: list[Checked]
    gateway: GatewaySeen | None

    @property
    def findings(self) -> list[tuple[str, Finding]]:
        """All of them with the worker's name, worst first."""
        known = {result.spec.name for result in self.workers}
        rows = [(str(result.spec.name), found) for result in self.workers for found in result.findings]
        if self.gateway is not None:
            rows += [
                (str(name), found)
                for name, many in self.gateway.findings.items()
                if name not in known
                for found in many
            ]
            rows += [(_GATEWAY, self.gateway.problem)] if self.gateway.problem is not None else []
        order = list(Severity)
        return sorted(rows, key=lambda row: -order.index(row[1].severity))

    @property
    def worst(self) -> Severity | None:
        return worst(found for _, found in self.findings)


def run(settings: Settings, asked: Asked) -> int:
    """Check and print; the exit code: 0, 1 with warnings, 2 with errors or when there is nothing to check."""
    if not settings.workers and asked.admin is None:
        typer.echo("kvgate: nothing to check: give --worker URL, --config FILE with workers, or --admin URL", err=True)
        return 2
    # What the shells below would log is in the report.
    set_up_logging(form="console", level="error", stream=sys.stderr.buffer, wall=time.time)  # noqa: TID251
    try:
        report = asyncio.run(_check(settings, asked))
    except ConfigError as error:
        for problem in error.problems:
            typer.echo(f"kvgate: {problem}", err=True)
        return 2
    if asked.as_json:
        typer.echo(json.dumps(_as_json(report, asked.admin)))
    else:
        _show(report)
    return _EXIT[report.worst]


async def _check(settings: Settings, asked: Asked) -> _Report:
    tokenizers = Tokenizers(settings.models, now=lambda: datetime.now().astimezone())
    await asyncio.to_thread(tokenizers.load_configured)
    tls = worker_context(settings.worker_tls, [])
    async with open_control_client(timeout_s=min(_REQUEST_S, asked.timeout_s), tls=tls) as client:
        gateway = await asyncio.to_thread(_asked_gateway, settings, asked)
        specs = _specs(settings, gateway)
        # A gateway compares token ids by itself; here it is done where its tokenizers are known, or could be.
        compares = bool(settings.models) or gateway is None
        plan = Plan(
            prompt=new_prompt(Random(secrets.randbits(64))),
            salt=f"kvgate-doctor-{secrets.token_hex(8)}",
            send_prompts=asked.probe,
            models_known=bool(settings.models),
            deadline_s=asked.timeout_s,
        )
        context = zmq.asyncio.Context()
        tools = Tools(
            client,
            context,
            tokenizers.prepare if compares else None,
            wall=time.time,  # noqa: TID251  compared with the workers' clocks
        )
        try:
            with _progress([spec.name for spec in specs]) as on_step:
                workers = await check_fleet(specs, tools, plan, on_step=on_step)
        finally:
            context.destroy(linger=0)
    if gateway is not None:
        for result in workers:
            result.add(gateway.findings.get(result.spec.name, []))
    return _Report(workers, gateway)


def _asked_gateway(settings: Settings, asked: Asked) -> GatewaySeen | None:
    if asked.admin is None:
        return None
    port = port_of(settings, asked.admin, asked.token)
    try:
        return read_gateway(port.get("/admin/workers").encode(), port.get("/metrics").encode())
    except AdminError as error:
        return unseen(error.message)


def _specs(settings: Settings, gateway: GatewaySeen | None) -> list[WorkerSpec]:
    """The configured workers and the gateway's members; one that is both is named as the gateway names it and has the
    configured key."""
    configured = {spec.url: spec for spec in settings.worker_specs()}
    specs = []
    for spec in gateway.servers if gateway is not None else ():
        known = configured.pop(spec.url, None)
        specs.append(spec if known is None else replace(known, name=spec.name))
    return [*configured.values(), *specs]


# --------------------------------------------------------------------------- progress and report


@contextmanager
def _progress(names: Sequence[WorkerId]) -> Iterator[Callable[[WorkerId, str], None]]:
    """A line a worker on a terminal; elsewhere one line as each is done. Both on stderr."""
    steps = dict.fromkeys(names, "")
    console = Console(stderr=True, highlight=False)

    def table() -> Table:
        rows = Table.grid(padding=(0, 2))
        for name, step in steps.items():
            rows.add_row(escape(name), f"[dim]{step}[/]" if step != "done" else "[green]done[/]")
        return rows

    if not console.is_terminal:

        def tell(name: WorkerId, step: str) -> None:
            steps[name] = step
            if step == "done":
                count = sum(one == "done" for one in steps.values())
                typer.echo(f"checked {name} ({count} of {len(steps)})", err=True)

        yield tell
        return
    with Live(table(), console=console, transient=True) as live:

        def show(name: WorkerId, step: str) -> None:
            steps[name] = step
            live.update(table())

        yield show


def _show(report: _Report) -> None:
    console = Console(highlight=False)
    rows = report.findings
    for result in report.workers:
        typer.echo(_summary(result))
    if rows:
        typer.echo("")
    if sys.stdout.isatty():
        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
        for column in ("severity", "worker", "what", "how to fix"):
            table.add_column(column, overflow="fold", no_wrap=column in ("severity", "worker"))
        for worker, found in rows:
            style = _STYLE[found.severity]
            table.add_row(
                f"[{style}]{found.severity}[/]",
                escape(worker),
                f"{escape(found.message)} [dim]({found.code})[/]",
                escape(found.fix),
            )
        console.print(table)
    else:
        width = max((len(worker) for worker, _ in rows), default=0)
        for worker, found in rows:
            typer.echo(f"{found.severity:<8} {worker:<{width}}  {found.message} ({found.code}); fix: {found.fix}")
    counts = [f"{sum(one.severity is level for _, one in rows)} {level}" for level in reversed(Severity)]
    typer.echo(f"\n{_count(len(report.workers), 'worker')} checked: {', '.join(counts)}")


def _summary(result: Checked) -> str:
    facts, name = result.facts, f"{result.spec.name} {result.spec.url}"
    if facts is None:
        return f"{name}: not checked"
    found = worst(result.findings)
    verdict = "nothing found" if found is None else f"{_count(len(result.findings), 'finding')}, worst: {found}"
    return (
        f"{name}: {facts.engine} {facts.version}, {', '.join(facts.models)}, blocks of {facts.block_size or 'unknown'} "
        f"tokens, {_count(len(facts.events), 'event feed')}: {verdict}"
    )


def _as_json(report: _Report, admin: str | None) -> dict[str, Any]:
    workers = [
        {
            "worker": result.spec.name,
            "url": result.spec.url,
            "engine": result.facts.engine if result.facts is not None else None,
            "version": result.facts.version if result.facts is not None else None,
            "models": list(result.facts.models) if result.facts is not None else [],
            "block_size": result.facts.block_size if result.facts is not None else None,
            "events": [source.endpoint for source in result.facts.events] if result.facts is not None else [],
        }
        for result in report.workers
    ]
    findings = [{"worker": worker} | found._asdict() for worker, found in report.findings]
    return {"worst": report.worst, "admin": admin, "workers": workers, "findings": findings}


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
