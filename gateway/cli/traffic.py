"""Commands for what runs through a gateway: pools, sessions, decisions. Options and exit codes as in `workers`."""

from __future__ import annotations

from typing import Annotated

import typer

from gateway.cli.admin_port import AdminError, AdminOption, TokenOption, admin_port, told
from gateway.cli.options import ConfigOption, JsonOption, hands_over

_MOST = 256
"""What the admin port gives at a time."""

session_commands = typer.Typer(rich_markup_mode=None, invoke_without_command=True)


def add_traffic_commands(app: typer.Typer) -> None:
    """Give the root command all of these."""
    app.add_typer(session_commands, name="sessions")
    for command in (pools, decisions, prefixes):
        app.command()(command)


def pools(
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """List the served names: workers ready and not, and why; requests that wait; speeds learned, mean lengths.

    \b
    kvgate pools

    Columns: `queued` requests wait at the gateway, about `wait` long; `shed` were sent away, and `refused` retries not
    made, since the start; `prompt` and `answer` are mean lengths in tokens.
    """
    from gateway.admin.state_answers import PoolList
    from gateway.cli.tables import console, pool_table

    port = admin_port(admin, token, config)
    with told():
        answer = port.get("/admin/pools")
        if as_json:
            typer.echo(answer)
        else:
            served = port.parse(PoolList, answer).pools
            console().print(pool_table(served) if served else "no worker has told what it serves yet: kvgate workers")


@session_commands.callback()
def sessions(
    context: typer.Context,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Count the sessions by worker; find, move or forget one. They are never listed: their names are your clients'.

    \b
    kvgate sessions                                   how many, by worker
    kvgate sessions find chat-4711                    where one is
    kvgate sessions move chat-4711 w2
    kvgate sessions forget chat-4711
    """
    if hands_over(context):
        return
    from gateway.admin.state_answers import SessionsAnswer
    from gateway.cli.tables import console, session_table

    port = admin_port(admin, token, config)
    with told():
        answer = port.get("/admin/sessions")
        if as_json:
            typer.echo(answer)
        else:
            console().print(session_table(port.parse(SessionsAnswer, answer)))


_SessionId = Annotated[str, typer.Argument(help="The session, as its requests name it.")]


@session_commands.command("find")
def find_session(
    session: _SessionId,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Say which worker served a session last. Exit code 1 when nothing is remembered of it.

    \b
    kvgate sessions find chat-4711
    """
    from gateway.admin.state_answers import SessionsAnswer

    port = admin_port(admin, token, config)
    with told():
        answer = port.get("/admin/sessions", {"id": session})
        found = port.parse(SessionsAnswer, answer)
        if found.worker is None:
            raise AdminError(f"nothing is remembered of session {session!r}")
        typer.echo(answer if as_json else f"{session}: {found.worker}, last request {found.age_s or 0:.0f} s ago")


@session_commands.command("move")
def move_session(
    session: _SessionId,
    worker: Annotated[str, typer.Argument(help="Its new worker.")],
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Draw the next requests of a session to another worker: a credit in its score, not an order.

    \b
    kvgate sessions move chat-4711 w2
    """
    port = admin_port(admin, token, config)
    with told():
        port.ask("PUT", "/admin/sessions", params={"id": session, "worker": worker})
    typer.echo(f"{session}: {worker}")


@session_commands.command("forget")
def forget_session(
    session: _SessionId, admin: AdminOption = None, token: TokenOption = None, config: ConfigOption = None
) -> None:
    """Forget where a session is; its next request goes where the score says.

    \b
    kvgate sessions forget chat-4711
    """
    port = admin_port(admin, token, config)
    with told():
        port.ask("DELETE", "/admin/sessions", params={"id": session})
    typer.echo(f"{session}: forgotten")


def decisions(
    request: Annotated[
        str | None, typer.Argument(help="The x-request-id of an answer: that decision alone, with every term.")
    ] = None,
    worker: Annotated[str | None, typer.Option(help="Placed on this worker.")] = None,
    model: Annotated[str | None, typer.Option(help="For this model.")] = None,
    missed: Annotated[bool | None, typer.Option("--missed/--hit", help="With a route miss, or without.")] = None,
    miss_cause: Annotated[
        str | None, typer.Option(help="Missed for this cause: stale_index, identity, evicted, spilled, ...")
    ] = None,
    status: Annotated[int | None, typer.Option(help="Ended with this HTTP status.")] = None,
    result: Annotated[
        str | None, typer.Option(help="Ended so: completed, client_gone, worker_failed, timed_out, ...")
    ] = None,
    since: Annotated[float | None, typer.Option(min=0, help="Not older than this many seconds.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Most of them.")] = 20,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Show recent decisions, newest first: where requests went, what hit was predicted and what came.

    \b
    kvgate decisions --missed --since 600             route misses of the last ten minutes
    kvgate decisions --worker w1 --status 502
    kvgate decisions 0b6f8a1e                         one request: every worker's terms, and how it ended

    Columns: `of` workers were considered; `best` is what the best of them held, in tokens, `predicted` what the chosen
    one held, `delivered` what it reported. The gateway keeps the last 256.
    """
    from gateway.admin.decision_answers import DecisionList
    from gateway.cli.explain import decision_table, show_decision
    from gateway.cli.tables import console

    asked = {
        "request_id": request,
        "worker": worker,
        "model": model,
        "missed": None if missed is None else str(missed).lower(),
        "miss_cause": miss_cause,
        "status": status,
        "result": result,
        "since_s": since,
        "limit": limit,
    }
    port = admin_port(admin, token, config)
    with told():
        answer = port.get("/admin/decisions", {key: value for key, value in asked.items() if value is not None})
        if as_json:
            typer.echo(answer)
            return
        found = port.parse(DecisionList, answer).decisions
        if request is not None and not found:
            raise AdminError(f"no decision of request {request!r} is kept; the gateway keeps the last 256")
    out = console()
    if request is None:
        out.print(decision_table(found) if found else "no decisions yet, or none like that among the last 256")
    for decision in found if request is not None else ():
        show_decision(out, decision)


def prefixes(
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Most applications, and most prefixes.")] = 20,
    as_json: JsonOption = False,
    admin: AdminOption = None,
    token: TokenOption = None,
    config: ConfigOption = None,
) -> None:
    """Show what prompts have in common: where those of an application drift apart, and which prefixes save most.

    \b
    kvgate prefixes

    An application is a model and the first 64 tokens of its prompts, named by a number (no text is kept). `stable` is
    the length its prompts usually share; `lost` are prompt tokens of those that parted earlier, mostly `at` so many
    tokens: look there in the prompt for a date, an id or a list in another order.
    """
    from gateway.admin.prefix_answers import PrefixesAnswer
    from gateway.cli.tables import application_table, console, prefix_table

    port = admin_port(admin, token, config)
    with told():
        answer = port.get("/admin/prefixes", {"limit": limit})
        if as_json:
            typer.echo(answer)
            return
        seen = port.parse(PrefixesAnswer, answer)
    out = console()
    if not seen.applications:
        out.print("no prompts of 64 tokens or more yet")
        return
    out.print(application_table(seen.applications))
    out.print()
    out.print(prefix_table(seen.prefixes))
