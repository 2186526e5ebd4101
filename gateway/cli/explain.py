"""Decisions as tables: `kvgate explain` asks for one that would be made, `kvgate decisions` shows those that were."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gateway.admin.decision_answers import DecisionAnswer, TermsAnswer
from gateway.admission import WaitsFor
from gateway.cli.admin_port import AdminPort
from gateway.cli.tables import DASH, columns, console, seconds
from gateway.pool import NoSecond
from gateway.records import Endpoint

_WAITS_FOR = {
    WaitsFor.QUEUE: "others wait already",
    WaitsFor.ROOM: "no worker has room",
    WaitsFor.WAIT: "its best worker is busy for longer than requests are held for (routing.hold_s)",
}
_NO_SECOND = {
    NoSecond.REQUEST: "such a request is never computed twice",
    NoSecond.UNSEEN: "too few answers of its kind have been seen to say what is late",
}
_TERMS = tuple(TermsAnswer.model_fields)


def explain(
    port: AdminPort, body: bytes, *, path: str, tenant: str | None, headers: Mapping[str, str], as_json: bool
) -> None:
    """Post `body` to `/admin/explain` and print the decision. Raises AdminError when the gateway refuses it."""
    params = {"path": path} | ({"tenant": tenant} if tenant is not None else {})
    answer = port.ask("POST", "/admin/explain", params=params, body=body, headers=headers)
    if as_json:
        typer.echo(answer)
        return
    show_decision(console(), port.parse(DecisionAnswer, answer))


def path_for(body: bytes) -> str:
    """The inference path that a body is most likely for."""
    try:
        keys = json.loads(body)
    except ValueError:
        keys = None  # what is wrong with it, the gateway says
    plain = isinstance(keys, dict) and "prompt" in keys and "messages" not in keys
    path: str = (Endpoint.COMPLETIONS if plain else Endpoint.CHAT).value
    return path


def show_decision(out: Console, decision: DecisionAnswer) -> None:
    """One decision with every candidate's terms, and its outcome when there is one."""
    why = f": {decision.reason}" if decision.reason else ""
    shard = "" if decision.shard is None else f"  shard {decision.shard} (home {decision.home_shard})"
    out.print(
        f"model [bold]{escape(decision.model)}[/]  pool {escape(decision.pool)}  policy {decision.policy}  prompt "
        f"{decision.prompt_tokens} tokens in blocks of {decision.block_size} ({decision.mode}{why}){shard}"
    )
    table = columns("worker", "overlap>", "trust>", *(f"{name.removesuffix('_s')} s>" for name in _TERMS))
    for row in decision.candidates:
        chosen = row.worker == decision.worker
        terms = row.terms.model_dump()
        table.add_row(
            f"{'-> ' if chosen else '   '}{escape(row.worker)}",
            str(row.overlap_tokens),
            f"{row.trust:.2f}",
            *(f"{terms[name]:.4f}" for name in _TERMS),
            style="bold green" if chosen else None,
        )
    out.print(table)
    if decision.beside is not None:
        out.print(f"   a second copy: {escape(decision.beside)} has the request too and is late")
    for worker, reason in decision.excluded:
        out.print(f"   {escape(worker)}: not considered: {escape(reason)}")
    given_up = f", {decision.forgone_tokens} given up for {decision.forgone_for}" if decision.forgone_tokens else ""
    out.print(
        f"predicted hit {decision.predicted_tokens} tokens, best in the pool {decision.available_tokens}{given_up}; "
        "score = alpha*hit - beta*queue - gamma*load, shown as a cost: the lowest wins"
    )
    if decision.would_wait is not None:
        out.print(f"[yellow]it would wait at the gateway now[/]: {_WAITS_FOR[decision.would_wait]}")
    if decision.late_after_s is not None:
        out.print(f"without a first byte after {seconds(decision.late_after_s)} a second worker would get it too")
    elif decision.no_second in _NO_SECOND:
        out.print(f"no second worker would get it when it is late: {_NO_SECOND[decision.no_second]}")
    ended = decision.outcome
    if ended is not None:
        hedged = f", second copy {ended.hedged}" if ended.hedged is not None else ""
        status = f" with {ended.status}" if ended.status else ""
        missed = f", missed {ended.missed_tokens} ({ended.miss_cause})" if ended.missed_tokens else ""
        out.print(
            f"ended: {ended.result}{status}, delivered hit {_tokens(ended.delivered_tokens)}{missed}, "
            f"first byte after {seconds(ended.ttft_s)}, all of it {seconds(ended.duration_s)}{hedged}"
        )


def decision_table(decisions: Sequence[DecisionAnswer]) -> Table:
    """Many decisions, a line each."""
    table = columns(
        "age>", "request", "model", "worker", "of>", "prompt>", "best>", "predicted>", "delivered>", "miss", "ttft>",
        "ended",
    )  # fmt: skip
    for decision in decisions:
        ended = decision.outcome
        table.add_row(
            seconds(decision.age_s),
            escape(decision.request_id),
            escape(decision.model),
            escape(decision.worker),
            str(len(decision.candidates)),
            str(decision.prompt_tokens),
            str(decision.available_tokens),
            str(decision.predicted_tokens),
            DASH if ended is None else _tokens(ended.delivered_tokens),
            f"[yellow]{ended.miss_cause or 'unknown'}[/]" if ended is not None and ended.missed_tokens else DASH,
            DASH if ended is None else seconds(ended.ttft_s),
            "[dim]open[/]" if ended is None else f"{ended.status or ''} {ended.result}".strip(),
        )
    return table


def _tokens(number: int | None) -> str:
    return DASH if number is None else str(number)
