"""Workload traces: reading them, and turning them into arrivals at a wanted rate.

A trace is JSON lines, gzip allowed, one request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`
(one id for each block of the prompt, naming the block and everything before it; the last may be partial) and, for
sessions, `session_id`. The block size belongs to the file and is not in it.

Rules:
1. The same rows, rate and seed give the same arrivals.
2. Rows without sessions are compressed in time. Sessions are drawn again as a Poisson stream, each draw with private
   copies of the blocks that only its session uses; blocks that sessions share stay shared.
3. A turn is never released before the one before it has finished: `Turn.after` says which, the replay sees to it.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random

_TICK_MS = 3000.0
"""Width of the coarse clock ticks in the Mooncake traces."""

_MIN_HORIZON_S = 240.0
"""A drawn workload covers at least this much time, so that caches fill and turn over."""

TURN_GAP_S = 0.05
"""Least pause between the end of a turn and the next one."""

_SHARED = ""
"""Owner of a block that several sessions use; no session is called this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace. `blocks` are ids of full blocks and maybe a partial one; `session` is empty for none."""

    at_ms: float
    prompt_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    session: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One arrival. `blocks` are ids of full blocks. `after` is the number of the session's turn before it, `session`
    numbers the draw; both None for single requests. `at_s` is the earliest release."""

    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: int | None = None
    after: int | None = None


def read_trace(path: Path) -> list[Row]:
    """All rows of a file, ticks spread. Raises OSError, ValueError (also for a row without a needed field)."""
    opener = gzip.open if path.suffix == ".gz" else open
    rows = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    raw = json.loads(line)
                    rows.append(
                        Row(
                            float(raw["timestamp"]),
                            int(raw["input_length"]),
                            int(raw["output_length"]),
                            raw["hash_ids"],
                            str(raw.get("session_id", "")),
                        )
                    )
                except (KeyError, TypeError) as error:
                    raise ValueError(f"{path.name}, line {number}: no such field, or not a number: {error}") from error
    return spread_ticks(rows)


def spread_ticks(rows: Sequence[Row], *, seed: int = 1) -> list[Row]:
    """Rows whose timestamps are coarse ticks, each spread evenly over its tick; others as they are."""
    ticks = sorted({row.at_ms for row in rows})
    if len(ticks) < 2 or len(ticks) > len(rows) / 2:
        return list(rows)
    rng = Random(seed)
    widths = {tick: min(after - tick, _TICK_MS) for tick, after in pairwise(ticks)}
    spread = [replace(row, at_ms=row.at_ms + rng.random() * widths.get(row.at_ms, _TICK_MS)) for row in rows]
    return sorted(spread, key=lambda row: row.at_ms)


def arrivals(
    rows: Sequence[Row], *, block_size: int, rate: float = 1.0, max_rows: int | None = None, seed: int = 0
) -> list[Turn]:
    """Turns in order of `at_s`, at `rate` times the rate of the trace; about `max_rows` of them.

    Raises ValueError for an empty trace.
    """
    if not rows:
        raise ValueError("the trace is empty")
    if rows[0].session:
        return _sessions(rows, block_size, rate, max_rows, Random(seed))
    start = rows[0].at_ms
    return [
        Turn(
            number,
            (row.at_ms - start) / 1000.0 / rate,
            row.prompt_tokens,
            row.output_tokens,
            tuple(row.blocks[: row.prompt_tokens // block_size]),
        )
        for number, row in enumerate(rows[:max_rows])
    ]


def _sessions(rows: Sequence[Row], block_size: int, rate: float, max_rows: int | None, rng: Random) -> list[Turn]:
    by_session: dict[str, list[Row]] = defaultdict(list)
    owners: dict[int, str] = {}
    for row in rows:
        by_session[row.session].append(row)
    for session, own in by_session.items():
        for row in own:
            for block in row.blocks:
                if owners.setdefault(block, session) != session:
                    owners[block] = _SHARED
    names = sorted(by_session, key=lambda name: (len(name), name))  # numbers in their own order
    starts = [by_session[name][0].at_ms for name in names]
    span_s = (max(starts) - min(starts)) / 1000.0
    per_second = len(names) / span_s * rate
    horizon_s = span_s
    if max_rows is not None:
        horizon_s = min(span_s, max_rows / (len(rows) / len(names)) / per_second)
    horizon_s = max(_MIN_HORIZON_S, horizon_s)

    stride = max(owners) + 1
    drawn: list[Turn] = []
    bag: list[str] = []
    copy = 0
    at_s = rng.expovariate(per_second)
    while at_s <= horizon_s:
        if not bag:
            bag = list(names)
            rng.shuffle(bag)
        own = by_session[bag.pop()]
        copy += 1
        offset = copy * stride
        for position, row in enumerate(own):
            full = row.blocks[: row.prompt_tokens // block_size]
            drawn.append(
                Turn(
                    len(drawn),
                    at_s + (row.at_ms - own[0].at_ms) / 1000.0,
                    row.prompt_tokens,
                    row.output_tokens,
                    tuple([block if owners[block] == _SHARED else block + offset for block in full]),
                    session=copy,
                    after=len(drawn) - 1 if position else None,
                )
            )
        at_s += rng.expovariate(per_second)
    return _renumber(drawn)


def _renumber(drawn: list[Turn]) -> list[Turn]:
    """Sorted by time and numbered in that order."""
    order = sorted(drawn, key=lambda turn: turn.at_s)
    numbers = {turn.number: number for number, turn in enumerate(order)}
    return [
        replace(turn, number=number, after=None if turn.after is None else numbers[turn.after])
        for number, turn in enumerate(order)
    ]
