"""What a command loads before it does anything: a shell, and a script that asks for every worker, waits for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gateway.cli.tables import STATE_STYLES
from gateway.pool import WorkerState
from gateway.settings import POLICIES

HEAVY = ("fastapi", "redis", "uvicorn", "zmq", "tokenizers", "prometheus_client", "jinja2")
"""Of the gateway, the engines and the demo. What of it was loaded when the command ended:"""

SCRIPT = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr))
from gateway.cli import main
main()
"""

NOBODY = ("--admin", "http://127.0.0.1:1")
"""An admin port at which nobody answers: all that comes before the answer has run, and so has what tells of it."""


def _run(*words: str) -> tuple[list[str], str]:
    """The heavy modules that a command has loaded, and its output."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120)
    *said, loaded = done.stderr.splitlines()
    return json.loads(loaded), done.stdout + "\n".join(said)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("serve", "--help"),
        ("key",),
        ("config", "show"),
        ("workers", *NOBODY),
        ("workers", "show", "w1", *NOBODY),
        ("drain", "w1", *NOBODY),
        ("pools", *NOBODY),
        ("sessions", *NOBODY),
        ("decisions", *NOBODY),
        ("prefixes", *NOBODY),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_command_that_only_asks_loads_no_gateway(words: tuple[str, ...]) -> None:
    loaded, output = _run(*words)
    assert "Traceback" not in output
    if NOBODY[0] in words:
        assert "no gateway answers" in output
    assert loaded == []


def test_help_names_every_policy() -> None:
    _, output = _run("serve", "--help")
    assert all(policy in output for policy in POLICIES)


def test_every_state_of_a_worker_has_a_style() -> None:
    assert set(STATE_STYLES) == set(WorkerState)
