"""Reading traces and drawing arrivals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from gateway.sim.trace import Row, arrivals, read_trace, spread_ticks


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def row(at_ms: float, blocks: list[int], *, session: str = "", prompt: int | None = None) -> Row:
    return Row(at_ms, prompt if prompt is not None else 16 * len(blocks), 10, blocks, session)


def test_rows_are_read_with_their_session(tmp_path: Path) -> None:
    raw = {"timestamp": 1500, "input_length": 40, "output_length": 7, "hash_ids": [1, 2, 3], "session_id": 4}
    rows = read_trace(write(tmp_path / "t.jsonl.gz", [raw]))
    assert rows == [Row(1500.0, 40, 7, [1, 2, 3], "4")]


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"t\.jsonl\.gz, line 1: .*input_length"):
        read_trace(write(tmp_path / "t.jsonl.gz", [{"timestamp": 1}]))


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        arrivals([], block_size=16)


def test_coarse_ticks_are_spread_inside_their_tick_and_fine_clocks_kept() -> None:
    ticks = [row(3000.0 * tick, [tick]) for tick in range(3) for _ in range(10)]
    spread = spread_ticks(ticks)
    assert [int(r.at_ms // 3000) for r in spread] == [tick for tick in range(3) for _ in range(10)]
    assert len({r.at_ms for r in spread}) == 30
    assert spread == spread_ticks(ticks)
    fine = [row(float(number), [number]) for number in range(10)]
    assert spread_ticks(fine) == fine


def test_single_requests_are_compressed_and_lose_their_partial_block() -> None:
    turns = arrivals([row(1000.0, [1, 2]), row(5000.0, [1, 3, 4], prompt=40)], block_size=16, rate=2.0)
    assert [turn.at_s for turn in turns] == [0.0, 2.0]
    assert turns[1].blocks == (1, 3)
    assert turns[1].after is None


def test_drawn_sessions_keep_shared_blocks_and_copy_their_own() -> None:
    rows = [
        row(0.0, [0, 1], session="1"),
        row(400.0, [0, 1, 2], session="1"),
        row(1000.0, [0, 5], session="2"),
        row(2000.0, [0, 6], session="3"),
    ]
    turns = arrivals(rows, block_size=16, rate=1.0, max_rows=8, seed=3)
    assert turns == arrivals(rows, block_size=16, rate=1.0, max_rows=8, seed=3)
    assert [turn.number for turn in turns] == list(range(len(turns)))
    assert all(turn.blocks[0] == 0 for turn in turns)
    private = [block for turn in turns if turn.after is None for block in turn.blocks[1:]]
    assert len(private) == len(set(private))
    followers = [turn for turn in turns if turn.after is not None]
    assert followers
    for turn in followers:
        assert turn.after is not None
        before = turns[turn.after]
        assert before.session == turn.session
        assert turn.at_s == pytest.approx(before.at_s + 0.4)
        assert turn.blocks[: len(before.blocks)] == before.blocks
