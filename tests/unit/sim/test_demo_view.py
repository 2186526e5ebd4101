"""What the demo shows on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from gateway.sim.demo import DemoResult, PolicyScore
from gateway.sim.demo_view import print_summary, showing
from gateway.sim.workload import TurnResult


def scores() -> list[PolicyScore]:
    made = []
    for policy, cached, ttft_s in (("seconds", 90, 0.1), ("round_robin", 40, 0.4)):
        score = PolicyScore(policy, admin_url="http://127.0.0.1:1")
        score.add(TurnResult("s", 0, 1.0, ttft_s, 1.0, 100, 10, cached, "w1"))
        made.append(score)
    return made


def shown(*, terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, _environ={"TERM": "xterm"})
    with showing(console, duration_s=10, line_every_s=1) as show:
        show(0.5, scores())
        show(2.0, scores())
    return file.getvalue()


def test_a_terminal_gets_a_table_and_a_pipe_gets_lines() -> None:
    live, plain = shown(terminal=True), shown(terminal=False)
    assert "share of w1" in live
    assert plain.count("\n") == 2
    assert "90.0%" in plain
    assert "\x1b" not in plain


def test_the_summary_says_what_was_gained() -> None:
    file = io.StringIO()
    print_summary(
        Console(file=file, width=100), DemoResult({score.policy: score for score in scores()}), warm_up_share=0.3
    )
    text = " ".join(file.getvalue().split())
    assert "seconds 90%, round_robin 40%" in text
    assert "4.0 times shorter" in text


def test_a_summary_without_figures_is_still_a_table() -> None:
    file = io.StringIO()
    print_summary(Console(file=file, width=100), DemoResult({"seconds": PolicyScore("seconds")}), warm_up_share=0.3)
    assert "time to first token, median" in file.getvalue()
