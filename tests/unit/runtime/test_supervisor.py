"""Background tasks: restarted when they fail, ended together."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gateway.runtime import Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


def supervisor() -> Supervisor:
    return Supervisor(asyncio.get_running_loop().time)


async def test_a_failed_task_runs_again() -> None:
    tasks, runs, done = supervisor(), 0, asyncio.Event()

    async def fails_once() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise RuntimeError("boom")
        done.set()

    tasks.start("flaky", fails_once)
    async with asyncio.timeout(20):
        await done.wait()
        await tasks.join("flaky")
    assert runs == 2
    assert tasks.restarts == 1
    assert tasks.names == []


async def test_names_are_unique_while_they_run() -> None:
    tasks = supervisor()
    tasks.start("one", forever)
    with pytest.raises(ValueError, match="runs already"):
        tasks.start("one", forever)
    await tasks.stop("one")
    await tasks.stop("one")
    tasks.start("one", forever)
    await tasks.close()
    assert tasks.names == []


async def test_a_task_in_which_a_cancellation_was_swallowed_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.runtime.supervisor._CANCELLED_AGAIN_S", 0.01)
    tasks, running = supervisor(), asyncio.Event()

    async def deaf_once() -> None:
        running.set()
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
        await forever()

    tasks.start("deaf", deaf_once)
    await running.wait()
    async with asyncio.timeout(20):
        await tasks.stop("deaf")
    assert tasks.names == []


async def test_closing_waits_for_what_tasks_clean_up() -> None:
    tasks, cleaned, running = supervisor(), [], asyncio.Event()

    async def careful() -> None:
        try:
            running.set()
            await forever()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    tasks.start("careful", careful)
    await running.wait()
    await tasks.close()
    assert cleaned == [True]


async def test_what_is_started_while_all_end_does_not_run_for_ever() -> None:
    tasks = supervisor()

    async def leaves_one_behind() -> None:
        try:
            await forever()
        finally:
            with pytest.raises(RuntimeError, match="the process ends"):
                tasks.start("late", forever)

    tasks.start("early", leaves_one_behind)
    await asyncio.sleep(0)
    await tasks.close()
    assert tasks.names == []
    with pytest.raises(RuntimeError, match="the process ends"):
        tasks.start("later", forever)
