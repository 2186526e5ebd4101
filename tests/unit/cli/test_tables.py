"""How numbers and troubles are shown to people."""

from __future__ import annotations

import pytest
from rich.markup import render

from gateway.admin.worker_answers import JoiningAnswer, SourceAnswer, WorkerList
from gateway.cli.tables import count, joining_workers, seconds, share, source_troubles, worker_table


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0"), (950, "950"), (12_345, "12.3k"), (4_120_000, "4.12M"), (2.5e9, "2.5G")],
)
def test_counts_are_short(number: float, shown: str) -> None:
    assert count(number) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.012, "12ms"), (3.44, "3.4s"), (90, "90.0s"), (300, "5m"), (7200, "2h"), (200_000, "2d")],
)
def test_durations_have_the_unit_that_fits(value: float | None, shown: str) -> None:
    assert seconds(value) == shown


def test_shares() -> None:
    assert (share(None), share(0.05)) == ("-", "5%")


def test_a_source_of_workers_in_trouble_is_told() -> None:
    sources = [
        SourceAnswer(source="config", workers=2, left_out=0, age_s=3.0, error=None),
        SourceAnswer(source="dns:llama", workers=2, left_out=3, age_s=40.0, error="no such name"),
        SourceAnswer(source="kubernetes", workers=0, left_out=0, age_s=None, error="403"),
    ]
    lines = list(source_troubles(WorkerList(workers=[], joining=[], sources=sources)))
    assert ["dns:llama" in line for line in lines] == [True, True, False]
    assert "no such name; its list of 40.0s ago stays" in lines[0]
    assert "no room for 3 of its workers" in lines[1]
    assert "403; it has said nothing yet" in lines[2]


def test_a_worker_that_has_not_joined_is_a_line_with_its_reason() -> None:
    """In a column of the table it would push the others out of sight."""
    reason = "no connection to http://127.0.0.1:9666 ([Errno 111] Connection refused); is the worker running?"
    answer = WorkerList(
        workers=[], joining=[JoiningAnswer(id="w1", error=reason), JoiningAnswer(id="w2", error=None)], sources=[]
    )
    assert worker_table(answer).row_count == 0
    first, second = map(render, joining_workers(answer))
    assert first.plain == f"w1 has not joined: {reason}"
    assert second.plain == "w2 has not joined: it is being asked"
