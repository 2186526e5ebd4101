"""Signals that end `kvgate serve`: the first lets requests finish, the second ends the process at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import asyncio, os, signal, sys
from gateway.cli import serve

class Slow:
    "A gateway whose start or stop takes for ever."
    class files:
        now = staticmethod(lambda: None)
    async def start(self):
        if sys.argv[1] == "starts":
            await self.twice()
        else:
            os.kill(os.getpid(), signal.SIGTERM)
    async def stop(self):
        await self.twice()
    async def twice(self):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
        await asyncio.sleep(3600)

asyncio.run(serve._serve(Slow()))
"""


@pytest.mark.parametrize("while_it", ["starts", "stops"])
def test_a_second_signal_ends_the_process_at_once(while_it: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, while_it], timeout=60, capture_output=True, text=True)
    assert done.returncode == -15, done.stderr
