"""A served gateway may have as many open files as the system allows."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from gateway.cli.serve import allow_open_files
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
allow_open_files()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
"""


def test_the_limit_is_raised_to_what_is_allowed() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=60)
