"""Long answers are made a few rows at a time."""

from __future__ import annotations

import asyncio

from gateway.admin.rows import paced


async def test_others_get_their_turn_between_rows() -> None:
    seen: list[str] = []

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    async for row in paced("abcdef", at_once=2):
        seen.append(row)
    task.cancel()
    assert seen == ["a", "b", "other", "c", "d", "other", "e", "f", "other"]
