"""A decision depends on what happened and the seed: not on the order of hashes, nor on whether its code is compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gateway.runtime.interpreter import is_compiled

_ROOT = Path(__file__).parents[2]


def _life(path: str, hash_seed: str) -> list[str]:
    """What `tests.integration.decisions` writes with the package that is found on `path`; its last line says which."""
    script = (
        "from tests.integration.decisions import main; from gateway.runtime.interpreter import is_compiled;"
        " main(); print(is_compiled())"
    )
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": hash_seed}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=_ROOT, capture_output=True, check=True)
    return done.stdout.decode().splitlines()


def test_what_is_compiled_decides_as_its_source_does() -> None:
    """Without anything compiled it holds for two orders of hashes."""
    here = _life(os.pathsep.join(path for path in sys.path if path), "1")
    source = _life(str(_ROOT), "2")
    assert (here.pop(), source.pop()) == (str(is_compiled()), "False")
    assert len(source) > 5000
    for number, (line, expected) in enumerate(zip(here, source, strict=True)):
        assert line == expected, f"line {number}"
