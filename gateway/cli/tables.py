"""What the commands show of a fleet: tables of rich, made from the admin port's answers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from gateway.admin.prefix_answers import ApplicationAnswer, PrefixAnswer
    from gateway.admin.state_answers import PoolAnswer, SessionsAnswer
    from gateway.admin.worker_answers import WorkerAnswer, WorkerList

DASH = "-"
"""Nobody knows."""

_LEARNED = 8
"""Prefills; speeds from fewer are an assumption."""

_PIPE_COLUMNS = 160
"""Columns that do not fit are cut: a file or a pipe has room for all of them."""

STATE_STYLES = {"ready": "green", "degraded": "yellow", "ejected": "bold red", "draining": "cyan", "gone": "red"}


def console() -> Console:
    """Standard output: a terminal as wide as it is, anything else wide enough."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)


def columns(*names: str) -> Table:
    """An empty table; a name that ends with `>` is a column of numbers."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name.removesuffix(">"), justify="right" if name.endswith(">") else "left", no_wrap=True)
    return table


def count(number: float) -> str:
    """A number in at most five characters: 950, 12.3k, 4.1M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"


def seconds(value: float | None) -> str:
    """A duration as people read it: 12ms, 3.4s, 5m, 2h, 3d."""
    if value is None:
        return DASH
    if value < 1:
        return f"{value * 1000:.3g}ms"
    for unit, scale in (("d", 86_400), ("h", 3600), ("m", 120)):
        if value >= scale:
            return f"{value / (60 if unit == 'm' else scale):.0f}{unit}"
    return f"{value:.1f}s"


def share(value: float | None) -> str:
    """A share in percent."""
    return DASH if value is None else f"{value:.0%}"


# --------------------------------------------------------------------------- workers


def worker_table(answer: WorkerList) -> Table:
    """A line a worker that has joined."""
    table = columns(
        "worker", "state", "for>", "engine", "models", "open>", "waiting>", "kv>", "load age>", "load from", "blocks>",
        "trust>", "missed>", "slow>", "sessions>", "feed", "found>",
    )  # fmt: skip
    for worker in answer.workers:
        load = worker.load
        table.add_row(
            escape(worker.id),
            state(worker),
            seconds(worker.state_for_s),
            f"{worker.engine} {escape(worker.version)}",
            escape(", ".join((*worker.models, *worker.adapters))),
            str(worker.inflight_requests),
            DASH if load is None else f"{load.waiting:.0f}",
            DASH if load is None else share(load.kv_usage),
            DASH if load is None else seconds(load.age_s),
            DASH if load is None else load.source,
            count(sum(worker.index_blocks.values())),
            f"{worker.trust:.2f}",
            share(worker.index_trust.miss_rate),
            f"{worker.slowdown:.2f}",
            str(worker.sessions),
            feed(worker),
            str(len(worker.findings) or DASH),
        )
    return table


def joining_workers(answer: WorkerList) -> Iterable[str]:
    """A line for each worker that has not joined: its reason is longer than a column."""
    for joining in answer.joining:
        yield f"[bold]{escape(joining.id)}[/] has not joined: {escape(joining.error or 'it is being asked')}"


def source_troubles(answer: WorkerList) -> Iterable[str]:
    """A line for each source of workers that cannot look now, or names more than there is room for."""
    for source in answer.sources:
        if source.error is not None:
            ago = (
                f"its list of {seconds(source.age_s)} ago stays"
                if source.age_s is not None
                else "it has said nothing yet"
            )
            yield f"[yellow]source {escape(source.source)} does not answer[/]: {escape(source.error)}; {ago}"
        if source.left_out:
            yield f"[yellow]source {escape(source.source)}[/]: no room for {source.left_out} of its workers"


def state(worker: WorkerAnswer) -> str:
    """State and reason, coloured."""
    word = f"[{STATE_STYLES[worker.state]}]{worker.state}[/]"
    return f"{word} ({escape(worker.reason)})" if worker.reason else word


def feed(worker: WorkerAnswer) -> str:
    """Where its event feed stands: one word for all ranks that agree."""
    if worker.feed is None:
        return "none" if worker.index_from == "routing" else DASH
    return ", ".join(sorted(set(worker.feed.phases.values()))) or DASH


def worker_lines(worker: WorkerAnswer) -> Iterable[tuple[str, str]]:
    """Everything about one worker, a line a topic."""
    rates, work, trust, health = worker.rates, worker.work, worker.index_trust, worker.health
    yield "address", escape(worker.url) + ("" if worker.rank is None else f"  rank {worker.rank} of {worker.member}")
    yield "state", f"{state(worker)} for {seconds(worker.state_for_s)}"
    yield "engine", f"{worker.engine} {escape(worker.version)}, blocks of {worker.block_size} tokens"
    yield "serves", escape(", ".join((*worker.models, *worker.adapters))) + f"  (pool {escape(worker.pool)})"
    yield (
        "open",
        f"{worker.inflight_requests} requests, {worker.inflight_tokens} uncached tokens, {work.prefills} prefills",
    )
    yield "ahead", f"{seconds(work.prefill_s)} of prefills, {work.others:.0f} requests of others"
    yield "kv", f"{count(work.kv_tokens)} of {count(work.kv_capacity) if work.kv_capacity else DASH} tokens in use"
    load = worker.load
    said = (
        DASH if load is None else f"{load.running:.0f} running, {load.waiting:.0f} waiting, {share(load.kv_usage)} kv"
    )
    yield "it says", said if load is None else f"{said}, {seconds(load.age_s)} ago (from a {load.source})"
    if worker.load_socket is not None:
        socket = worker.load_socket
        heard = f"last message {seconds(socket.age_s)} ago" if socket.age_s is not None else "nothing heard yet"
        yield (
            "load socket",
            f"{'fresh' if socket.fresh else 'silent, so it is polled'}, {heard}, {socket.messages} messages, "
            f"{socket.errors} unreadable, {socket.restarts} restarts",
        )
    learned = f"(from {rates.samples} prefills)" if rates.samples >= _LEARNED else "(assumed: too few prefills yet)"
    yield (
        "rates",
        f"{count(1 / rates.prefill_token_s)} prefill tokens/s, {rates.inter_token_floor_s * 1000:.1f} ms a token "
        f"{learned}, slowdown {rates.slowdown:.2f}, hit rate of late about {share(rates.hit_rate)}",
    )
    blocks = ", ".join(f"{count(number)} {tier}" for tier, number in worker.index_blocks.items() if number)
    yield "index", f"{blocks or 'no'} blocks, known from {worker.index_from}"
    for tier, one in worker.tiers.items():
        life = "" if one.life_s is None else f", half of those lived less than {seconds(one.life_s)}"
        used = "" if one.hits_per_stored is None else f", a stored token is used {one.hits_per_stored:.2g}x"
        yield (
            f"{tier} tier",
            f"{count(one.stored)} blocks stored, {count(one.removed)} pushed out{life}; {count(one.hit_tokens)} tokens "
            f"taken from it{used}",
        )
    checked = f"{trust.misses} of {trust.predictions} predictions missed"
    doubt = ", requests contradict it" if trust.contradicted else ""
    yield (
        "trust",
        f"{worker.trust:.2f} {trust.state} (feed {trust.feed}; {checked}{doubt}; relearned {trust.relearned}x)",
    )
    if worker.feed is not None:
        told = worker.feed
        yield (
            "feed",
            f"{feed(worker)}, last message {seconds(told.age_s)} ago, {told.gaps} gaps, {told.resets} restarts, "
            f"{told.errors} unreadable",
        )
    yield "sessions", str(worker.sessions)
    trial = "" if health.trial_in_s is None else f", trial in {seconds(health.trial_in_s)}"
    yield "health", f"breaker {health.breaker}, {health.failures} failures{trial}"
    for change in health.changes:
        why = f" ({escape(change.reason)})" if change.reason else ""
        yield "", f"{seconds(change.age_s)} ago: {change.before} -> {change.state}{why}"
    for finding in worker.findings:
        yield "found", f"{finding.severity}: {escape(finding.message)} ({finding.code}); fix: {escape(finding.fix)}"


# --------------------------------------------------------------------------- pools, sessions


def pool_table(pools: Iterable[PoolAnswer]) -> Table:
    """A line a served name."""
    table = columns(
        "model", "base", "ready>", "not ready", "open>", "queued>", "wait>", "shed>", "block>", "prefill tok/s>",
        "ms/token>", "prompt>", "answer>", "retries>", "refused>",
    )  # fmt: skip
    for pool in pools:
        ready = f"{len(pool.ready)}/{len(pool.workers)}"
        reasons = ", ".join(f"{escape(one.worker)} {escape(one.reason)}" for one in pool.not_ready)
        table.add_row(
            escape(pool.name),
            escape(pool.model) if pool.adapter else DASH,
            f"[bold red]{ready} panic[/]" if pool.panic else ready,
            reasons or DASH,
            str(pool.inflight_requests),
            str(sum(pool.queued.values())),
            seconds(pool.drain_s) if any(pool.queued.values()) else DASH,
            str(sum(pool.shed.values())),
            str(pool.block_size),
            count(1 / pool.prefill_token_s),
            f"{pool.inter_token_floor_s * 1000:.1f}",
            f"{pool.prompt_tokens:.0f}",
            f"{pool.output_tokens:.0f}",
            str(pool.retries),
            str(pool.retries_refused),
        )
    return table


def session_table(answer: SessionsAnswer) -> Table:
    """Sessions by worker, and all of them."""
    table = columns("worker", "sessions>")
    for worker, number in answer.by_worker.items():
        table.add_row(escape(worker), str(number))
    table.add_row("[bold]all[/]", str(answer.sessions))
    return table


# --------------------------------------------------------------------------- prefixes


def application_table(applications: Iterable[ApplicationAnswer]) -> Table:
    """A line an application."""
    table = columns(
        "application", "model", "prompts>", "tokens>", "shared>", "stable>", "drifted>", "lost>", "of all>", "at>"
    )
    for one in applications:
        at = max(one.drift_at, key=lambda parting: parting.prompts, default=None)
        table.add_row(
            one.head,
            escape(one.model),
            str(one.prompts),
            count(one.prompt_tokens),
            share(one.shared_tokens / one.prompt_tokens if one.prompt_tokens else None),
            DASH if one.stable_tokens is None else str(one.stable_tokens),
            str(one.drifted),
            count(one.drift_tokens),
            share(one.drift_share),
            DASH if at is None else f"<= {at.up_to_tokens}" if at.up_to_tokens is not None else "beyond",
        )
    return table


def prefix_table(prefixes: Iterable[PrefixAnswer]) -> Table:
    """A line a prefix."""
    table = columns("prefix", "application", "model", "tokens>", "reuse>", "saves>", "held by")
    for one in prefixes:
        table.add_row(
            one.key,
            one.head,
            escape(one.model),
            str(one.tokens),
            count(one.reuse),
            count(one.saved_tokens),
            escape(", ".join(one.workers)) or DASH,
        )
    return table
