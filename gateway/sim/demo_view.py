"""How `kvgate demo` shows itself: a live table on a terminal, plain lines elsewhere, a summary at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from gateway.sim.demo import DemoResult, PolicyScore, Show


@contextmanager
def showing(console: Console, *, duration_s: float, line_every_s: float = 5.0) -> Iterator[Show]:
    """What to pass to `run_demo` as `show`."""
    if console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            yield lambda elapsed_s, scores: live.update(_table(elapsed_s, duration_s, scores), refresh=True)
    else:
        yield _Lines(console, line_every_s)


class _Lines:
    """One line a policy every few seconds."""

    def __init__(self, console: Console, every_s: float) -> None:
        self._console = console
        self._every_s = every_s
        self._next_s = every_s

    def __call__(self, elapsed_s: float, scores: Sequence[PolicyScore]) -> None:
        if elapsed_s < self._next_s:
            return
        self._next_s = elapsed_s + self._every_s
        for score in scores:
            self._console.print(
                f"{elapsed_s:5.0f} s  {score.policy:<12} requests {score.requests:>4}  in flight {score.in_flight:>3}  "
                f"hit rate {score.hit_rate:6.1%}  ttft p50 {_ms(score.ttft_s(0.5))} p99 {_ms(score.ttft_s(0.99))}  "
                f"errors {score.errors.total()}",
                highlight=False,
                soft_wrap=True,
            )


def print_summary(console: Console, result: DemoResult, *, warm_up_share: float) -> None:
    """The final table and what the first policy gained over the last."""
    scores = list(result.scores.values())
    console.print(_table(None, 0.0, scores))
    best, other = scores[0], scores[-1]
    first, second = best.ttft_s(0.5), other.ttft_s(0.5)
    if best is not other and first and second:
        console.print(
            f"From cache: {best.policy} {best.hit_rate:.0%}, {other.policy} {other.hit_rate:.0%} of prompt tokens. "
            f"Median time to first token: {second / first:.1f} times shorter.",
            highlight=False,
        )
    console.print(
        f"Not counted: the first {warm_up_share:.0%} of the time, while the caches fill. The system prompts fit the "
        "caches of all engines together, not those of one: the case this routing is for. Real traces: "
        "benchmarks/README.md.",
        highlight=False,
        style="dim",
    )


def _table(elapsed_s: float | None, duration_s: float, scores: Sequence[PolicyScore]) -> Table:
    title = "result" if elapsed_s is None else f"{min(elapsed_s, duration_s):.0f} of {duration_s:.0f} s"
    table = Table(title=f"kvgate demo, {title}", title_justify="left")
    table.add_column("")
    for score in scores:
        table.add_column(score.policy, justify="right")
    table.add_row("prompt tokens from cache", *(f"{score.hit_rate:.1%}" for score in scores))
    table.add_row("time to first token, median", *(_ms(score.ttft_s(0.5)) for score in scores))
    table.add_row("time to first token, p99", *(_ms(score.ttft_s(0.99)) for score in scores))
    table.add_row("route misses", *(_share(score.route_miss_rate) for score in scores))
    table.add_row("requests", *(str(score.requests) for score in scores))
    if elapsed_s is not None:
        table.add_row("in flight", *(str(score.in_flight) for score in scores))
    table.add_row("errors", *(str(score.errors.total()) for score in scores))
    for worker in sorted({worker for score in scores for worker in score.shares}):
        table.add_row(f"share of {worker}", *(_share(_part(score, worker)) for score in scores))
    if elapsed_s is not None and any(score.admin_url for score in scores):
        table.add_row("admin port", *(score.admin_url or "" for score in scores))
    return table


def _part(score: PolicyScore, worker: str) -> float | None:
    return score.shares[worker] / score.requests if score.requests else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _ms(seconds: float | None) -> str:
    return "     -" if seconds is None else f"{seconds * 1000:5.0f} ms"
