"""CPU that the kernel charged to a process, its threads and its children."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def cpu_s(root: int) -> float:
    """Seconds, user and system: the scheduler's nanoseconds, or clock ticks where the kernel keeps none."""
    total = 0.0
    for pid in [root, *_children(root)]:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            try:
                total += int((thread / "schedstat").read_text().split()[0]) / 1e9
            except FileNotFoundError:
                fields = (thread / "stat").read_text().rsplit(")", 1)[1].split()
                total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _children(root: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{root}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += [int(pid) for pid in (task / "children").read_text().split()]
    return found


def waited_s(pids: Iterable[int]) -> float:
    """Seconds the main threads of these processes have been ready to run without a core, so far; 0 where the kernel
    does not say."""
    return sum(_main_thread_s(pid)[1] for pid in pids)


def loop_cpu_s(pid: int) -> float:
    """Seconds of CPU of a process's main thread alone; 0 where the kernel does not say."""
    return _main_thread_s(pid)[0]


def _main_thread_s(pid: int) -> tuple[float, float]:
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return 0.0, 0.0
    return int(ran) / 1e9, int(waited) / 1e9
