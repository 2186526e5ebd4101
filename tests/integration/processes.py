"""`kvgate` commands as processes: what they print, as it comes, and how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx

KVGATE = [sys.executable, "-m", "gateway"]
PATIENCE_S = 60.0
"""Generous: a process starts in a second, on a busy machine in ten."""
_LOOK_EVERY_S = 0.05


class Program:
    """One running command. A thread reads what it prints."""

    def __init__(self, args: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")}
        self.process = subprocess.Popen(
            [*KVGATE, *args], stderr=subprocess.STDOUT, stdout=subprocess.PIPE, env=environment
        )
        self._printed = bytearray()
        self._closed = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """All that it has printed so far."""
        with self._news:
            return self._printed.decode()

    def found(self, pattern: str) -> str:
        """The first group of a pattern in the output, as soon as it is there."""
        match: re.Match[str] | None = None

        def there() -> bool:
            nonlocal match
            match = re.search(pattern, self._printed.decode())
            return match is not None or self._closed

        with self._news:
            self._news.wait_for(there, PATIENCE_S)
        assert match is not None, f"no {pattern!r} in:\n{self.output}"
        return match[1]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that nothing tells of; not longer than the process lives."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, f"in vain:\n{self.output}"
            try:
                ended = self.process.wait(_LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
            raise AssertionError(f"ended with {ended}:\n{self.output}")

    def ended(self) -> int:
        """Wait for its end and its last words; the exit code."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code

    def kill(self) -> None:
        """With -9."""
        self.process.kill()
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        while piece := os.read(self.process.stdout.fileno(), 65536):
            with self._news:
                self._printed += piece
                self._news.notify_all()
        with self._news:
            self._closed = True
            self._news.notify_all()


@contextmanager
def running(*args: str) -> Iterator[Program]:
    """A command that is killed in the end."""
    program = Program(args)
    try:
        yield program
    finally:
        program.kill()


def engine(stack: ExitStack, *args: str) -> tuple[Program, str]:
    """A simulated engine and its URL."""
    program = stack.enter_context(running("engine", "--port", "0", *args))
    return program, program.found(r"at (http://\S+),")


class Served:
    """A gateway that is ready: its process and its two addresses."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.url = program.found(r'"url":"([^"]+)')
        self.admin = program.found(r'"admin":"([^"]+)')
        program.until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)

    def value(self, metric: str, **labels: str) -> float:
        """The sum of the samples of `kvgate_<metric>` with these labels."""
        wanted = [f'{name}="{value}"' for name, value in labels.items()]
        lines = re.findall(rf"^kvgate_{metric}(?:\{{(.*)\}})? (\S+)$", self.page("/metrics"), re.MULTILINE)
        assert lines, metric
        return sum(float(value) for told, value in lines if all(label in told for label in wanted))

    def page(self, path: str) -> str:
        """Of the admin port."""
        answer = httpx.get(self.admin + path, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.text

    def json(self, path: str) -> Any:
        """The same, decoded."""
        return httpx.get(self.admin + path, timeout=PATIENCE_S).raise_for_status().json()


def gateway(stack: ExitStack, *args: str) -> Served:
    """`kvgate serve` with these arguments on free ports, ready."""
    return Served(stack.enter_context(running("serve", *args, "--port", "0", "--admin-port", "0")))
