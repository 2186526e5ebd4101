"""`kvgate explain`: ask a running gateway for a decision and print it as a table."""

from __future__ import annotations

import sys
from typing import Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

_TIMEOUT_S = 30.0
_PIPE_COLUMNS = 140


def run(body: bytes, *, admin: str, path: str, tenant: str | None, headers: dict[str, str], as_json: bool) -> int:
    """Post `body` to `/admin/explain`; print the decision. The exit code: 0, or 1 when the gateway refuses it."""
    try:
        answer = httpx.post(
            f"{admin.rstrip('/')}/admin/explain",
            params={"path": path} | ({"tenant": tenant} if tenant is not None else {}),
            content=body,
            headers=headers,
            timeout=_TIMEOUT_S,
        )
    except httpx.HTTPError as error:
        typer.echo(
            f"kvgate: no gateway answers at {admin}: {error}. Is `kvgate serve` running? "
            "--admin takes its admin port, such as http://127.0.0.1:8001",
            err=True,
        )
        return 1
    if answer.status_code != 200:
        typer.echo(f"kvgate: {_message(answer)}", err=True)
        return 1
    if as_json:
        typer.echo(answer.text)
        return 0
    _show(answer.json())
    return 0


_HINTS = {
    "invalid_admin_token": "; explain sends the one of --config or KVGATE_AUTH__ADMIN_TOKEN",
    "not_found": "; --admin takes the address of the admin port",
}


def _message(answer: httpx.Response) -> str:
    try:
        error = answer.json()["error"]
        return f"{error['message']}{_HINTS.get(error['code'], '')}"
    except (ValueError, KeyError, TypeError):
        return f"the admin port answered {answer.status_code}"


def _show(decision: dict[str, Any]) -> None:
    # Columns that do not fit are cut: a file or a pipe has room for all of them.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS)
    console.print(
        f"model [bold]{decision['model']}[/]  pool {decision['pool']}  policy {decision['policy']}  "
        f"prompt {decision['prompt_tokens']} tokens in blocks of {decision['block_size']} ({decision['mode']}"
        + (f": {decision['reason']}" if decision.get("reason") else "")
        + ")"
    )
    table = Table(box=None, header_style="bold")
    for column in (
        "worker",
        "overlap",
        "trust",
        "cost s",
        "hit s",
        "wait s",
        "own s",
        "decode s",
        "evict s",
        "kv s",
        "affinity s",
    ):
        table.add_column(column, justify="left" if column == "worker" else "right")
    for row in decision["candidates"]:
        terms = row["terms"]
        chosen = row["worker"] == decision["worker"]
        table.add_row(
            f"{'-> ' if chosen else '   '}{row['worker']}",
            str(row["overlap_tokens"]),
            f"{row['trust']:.2f}",
            *(
                f"{terms[k]:.4f}"
                for k in ("cost", "hit_s", "wait_s", "own_s", "decode_s", "evict_s", "kv_s", "affinity_s")
            ),
            style="bold green" if chosen else None,
        )
    console.print(table)
    for worker, reason in decision.get("excluded", []):
        console.print(f"   {worker}: not considered: {reason}")
    console.print(
        f"predicted hit {decision['predicted_tokens']} tokens, best in the pool {decision['available_tokens']}; "
        "score = alpha*hit - beta*queue - gamma*load, shown as a cost: the lowest wins"
    )
