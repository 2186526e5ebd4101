"""Background tasks: the only place that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

_FIRST_BACKOFF_S = 0.2
_LONGEST_BACKOFF_S = 10.0
_STEADY_S = 30.0
"""A task that ran this long before it failed starts again with the first backoff."""

_CANCELLED_AGAIN_S = 2.0
"""A library may swallow a cancellation (`asyncio.wait_for` of Python 3.11 does, when what it waits for is done at the
same moment), and whoever waited for such a task's end waited for ever. Longer than any task takes to clean up."""


class Supervisor:
    """Background tasks: named, restarted with backoff when they fail, cancelled and awaited on shutdown.

    A task that returns is done and is not restarted. Names are unique while the task runs. Once it closes, nothing is
    started any more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = structlog.get_logger("kvgate.supervisor")
        self._closing = False
        self.restarts = 0

    @property
    def names(self) -> list[str]:
        """Names of the tasks that run."""
        return sorted(self._tasks)

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run `run()` in the background under `name`. Raises ValueError when the name is taken, RuntimeError when all
        tasks end: what would run then would run for ever."""
        if self._closing:
            raise RuntimeError(f"task {name!r} is not started: the process ends")
        if name in self._tasks:
            raise ValueError(f"a task named {name!r} runs already")
        task = asyncio.get_running_loop().create_task(self._keep(name, run), name=name)
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    async def stop(self, name: str) -> None:
        """Cancel one task and wait for its end; unknown names are done already."""
        task = self._tasks.get(name)
        if task is not None:
            await _end([task])

    async def join(self, name: str) -> None:
        """Wait until a task that was told to end by itself is done."""
        task = self._tasks.get(name)
        if task is not None:
            await asyncio.wait([task])

    async def close(self) -> None:
        """Cancel all tasks and wait for them; none is started from now on."""
        self._closing = True
        await _end(list(self._tasks.values()))

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began = self._clock()
            try:
                await run()
                return
            except Exception:  # noqa: BLE001  see the next line
                # The one place where any failure is caught: it is logged with its traceback and the task runs again.
                self.restarts += 1
                if self._clock() - began > _STEADY_S:
                    backoff_s = _FIRST_BACKOFF_S
                self._log.exception("task failed", task=name, again_in_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_CANCELLED_AGAIN_S)
