"""Commands for the workers of a running gateway: clients of its admin port, and nothing else.

Each takes `--admin`, `--token`, `--config` and `--json`. Exit codes: 0 done, 1 the gateway does not answer, refused, or
knows nothing of that name, 2 wrong usage or configuration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.admin_port import AdminError, AdminOption, AdminPort, TokenOption, admin_port, told, worker_path
from gateway.cli.options import ConfigOption, JsonOption, hands_over

if TYPE_CHECKING:
    from rich.console import RenderableType

WorkerName = Annotated[str, typer.Argument(help="Name of the worker, or of the server for all its ranks.")]

_LOOK_EVERY_S = 0.5

worker_commands = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


def add_worker_commands(app: typer.Typer) -> None:
    """Give the root command all of these."""
    app.add_typer(worker_commands, name="workers")
    app.command()(drain)
    for action, text in _ACTIONS.items():
        app.command(action, help=cleandoc(text))(_doing(action))


# --------------------------------------------------------------------------- workers


@worker_commands.callback()
def workers(
    context: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between two looks of --watch.")] = 2.0,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """List the workers: state, load, what is known of their caches; add one, remove one.

    \b
    kvgate workers                                    all of them, once
    kvgate workers --watch                            again every two seconds
    kvgate workers show w1                            everything about one
    kvgate workers add http://10.0.0.5:8000 --name w5
    kvgate workers remove w5

    Columns: `open` are requests of this gateway, `waiting` and `kv` what the worker said `load age` ago, in a poll or
    on its load socket (`load from`); `blocks` are known of its cache and believed as far as `trust` says; `missed` is
    the share of predicted hits that did not come; `slow` how much longer it takes than its pool; `found` counts what
    could be better (kvgate workers show).
    """
    if hands_over(context):
        return
    port = admin_port(admin, token, config)

    def look() -> RenderableType:
        from rich.console import Group
        from rich.markup import escape

        from gateway.admin.worker_answers import WorkerList
        from gateway.cli.tables import joining_workers, source_troubles, worker_table

        answer = port.read(WorkerList, "/admin/workers")
        lines = (*joining_workers(answer), *source_troubles(answer))
        if answer.workers:
            return Group(worker_table(answer), *lines)
        asked = ", ".join(source.source for source in answer.sources)
        return Group(*lines or (f"no workers: none is named by any source ({escape(asked)})",))

    if not watch:
        from gateway.cli.tables import console

        with told():
            if as_json:
                typer.echo(port.get("/admin/workers"))
            else:
                console().print(look())
    elif as_json:
        _repeat(lambda: typer.echo(_or_error(lambda: port.get("/admin/workers"))), every)
    else:
        _watch(look, every)


@worker_commands.command("show")
def show_worker(
    name: Annotated[str, typer.Argument(help="Name of the worker; of one rank where a server has several.")],
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Show everything about one worker: rates, load, trust and its evidence, the last changes of its state, findings.

    \b
    kvgate workers show w1
    """
    from rich.table import Table

    from gateway.admin.worker_answers import WorkerAnswer
    from gateway.cli.tables import console, worker_lines

    port = admin_port(admin, token, config)
    with told():
        answer = port.get(worker_path(name))
        if as_json:
            typer.echo(answer)
            return
        worker = port.parse(WorkerAnswer, answer)
    lines = Table.grid(padding=(0, 2, 0, 0))
    for topic, text in worker_lines(worker):
        lines.add_row(f"[bold]{topic}[/]", text)
    console().print(lines)


@worker_commands.command("add")
def add_worker(
    url: Annotated[str, typer.Argument(help="Base URL of the worker, such as http://10.0.0.5:8000.")],
    name: Annotated[str | None, typer.Option(help="Its name.", show_default="the next of w1, w2, ...")] = None,
    pool: Annotated[str | None, typer.Option(help="Name of the pool it belongs to.", show_default="default")] = None,
    weight: Annotated[float | None, typer.Option(help="Its share under policies that are blind.")] = None,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Probe a worker and let it join the running gateway. A restart of the gateway forgets it: what is to stay belongs
    into the configuration file, as do API keys and event endpoints.

    \b
    kvgate workers add http://10.0.0.5:8000 --name w5
    """
    given = {"url": url, "name": name, "pool": pool, "weight": weight}
    body = json.dumps({key: value for key, value in given.items() if value is not None}).encode()
    port = admin_port(admin, token, config)
    with told():
        answer = port.ask("POST", "/admin/workers", body=body)
        _tell(port, answer, as_json)


@worker_commands.command("remove")
def remove_worker(
    name: Annotated[str, typer.Argument(help="Name of the worker; of the server where it has several ranks.")],
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Take a worker out of the running gateway. Open requests run to their end; no new one goes there.

    \b
    kvgate workers remove w5
    """
    port = admin_port(admin, token, config)
    with told():
        port.ask("DELETE", worker_path(name))
    typer.echo(f"{name}: removed")


def drain(
    name: WorkerName,
    wait: Annotated[
        float, typer.Option(min=0, help="Wait up to so many seconds until none of its requests is open.")
    ] = 0.0,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Send no new requests to a worker; open ones run to their end. It stays so, over restarts of the worker too, until
    `kvgate undrain`. With --wait the exit code says whether it is safe to stop the worker: 0 when no request is open.

    \b
    kvgate drain w1 --wait 120 && systemctl restart vllm
    """
    from gateway.admin.worker_answers import WorkerList

    port = admin_port(admin, token, config)
    with told():
        answer = port.ask("POST", worker_path(name, "drain"))
        until = time.monotonic() + wait  # noqa: TID251  a command waits by the clock
        while wait and (left := sum(one.inflight_requests for one in port.parse(WorkerList, answer).workers)):
            if time.monotonic() >= until:  # noqa: TID251
                raise AdminError(f"{name}: {left} requests are still open after {wait:g} s; it stays drained")
            time.sleep(_LOOK_EVERY_S)
            answer = port.ask("POST", worker_path(name, "drain"))  # once more changes nothing and shows them all
        _tell(port, answer, as_json)


_ACTIONS = {
    "undrain": """Send new requests to a drained worker again.

        \b
        kvgate undrain w1
        """,
    "resync": """Forget what the index knows of a worker and learn it anew from its events: for when requests miss on it
        and kvgate has not found out by itself. It gets requests all the while, without credit for its cache until that
        is known again.

        \b
        kvgate resync w1
        """,
    "reset": """Forget what is held against a worker's health: an ejected one is used again at once, without a slow
        start.

        \b
        kvgate reset w1
        """,
}
"""Commands that only ask the gateway to do something to a worker, and their help."""


_DONE = {"resync": "its index is learned anew; ", "reset": "nothing is held against it; "}


def _doing(action: str) -> Callable[..., None]:
    def act(
        name: WorkerName,
        as_json: JsonOption = False,
        admin: AdminOption = None,
        token: TokenOption = None,
        config: ConfigOption = None,
    ) -> None:
        port = admin_port(admin, token, config)
        with told():
            _tell(port, port.ask("POST", worker_path(name, action)), as_json, _DONE.get(action, ""))

    return act


# --------------------------------------------------------------------------- inside


def _tell(port: AdminPort, answer: str, as_json: bool, done: str = "") -> None:
    """The workers that were changed, a line each; `done` says what cannot be seen of them."""
    if as_json:
        typer.echo(answer)
        return
    from gateway.admin.worker_answers import WorkerList
    from gateway.cli.tables import console, state

    out = console()
    for worker in port.parse(WorkerList, answer).workers:
        out.print(f"{worker.id}: {done}{state(worker)}, {worker.inflight_requests} requests open")


def _watch(look: Callable[[], RenderableType], every_s: float) -> None:
    """In place on a terminal, one after the other elsewhere. A gateway that is away for a moment is waited for."""
    from rich.console import Group
    from rich.live import Live
    from rich.markup import escape

    from gateway.cli.tables import console

    out = console()

    def safely() -> RenderableType:
        try:
            return look()
        except AdminError as error:
            return Group(f"[bold red]kvgate:[/] {escape(error.message)}")

    if not out.is_terminal:
        _repeat(lambda: out.print(safely()), every_s)
        return
    with Live(safely(), console=out, screen=False, auto_refresh=False) as live:
        _repeat(lambda: live.update(safely(), refresh=True), every_s)


def _or_error(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except AdminError as error:
        return json.dumps({"error": {"message": error.message, "code": error.code}})


def _repeat(show: Callable[[], None], every_s: float) -> None:
    """Until Ctrl-C, which is how this ends well."""
    try:
        while True:
            show()
            time.sleep(every_s)
    except KeyboardInterrupt:
        return
