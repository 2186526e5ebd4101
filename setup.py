"""What pyproject.toml cannot say: modules that are compiled when the build is asked for it.

    KVGATE_COMPILED=1 pip wheel --no-build-isolation --no-deps .

compiles with mypyc the modules that every request passes (docs/adr/0013-compiled-data-plane.md). It needs mypy, the
packages that kvgate depends on and a C compiler; without the variable it is a package of Python alone. `quick` instead
of `1` leaves out the C compiler's optimisations: for tests of what is compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

COMPILED = """
keys leases router weighing admission checks
kv: approximate index lives overlap position recency runs speculation tables truncation
policy: pick seam seconds simple
pool: adapters crew eligible evidence fleet health hedging misses pool rates regret reservations routes silence worker
prefix: chains hasher known messages run template text tokens
api: asking request
edge: attempts body exchange gate heads hedge locate notes relay turns
upstream: connection connections deadlines headers http members membership sse usage
telemetry: requests
"""
"""Left as they are, though requests pass them: classes that mypyc cannot make (of msgspec, of uvicorn, exceptions with
words of the class, generic ones), `kv.ingest`, where numbers that several tables hold would be kept once in each,
and `api.pieces` and `pausing`, in whose loops and calls other threads get their turn.
"""

_LEVELS = {"1": "2", "quick": "0"}
"""Value of the variable -> the C compiler's level of optimisation."""


def compiled_paths() -> list[str]:
    """The modules' files."""
    paths = []
    for line in COMPILED.strip().splitlines():
        package, inside, names = line.rpartition(":")
        paths += [str(Path("gateway", package if inside else "", f"{name}.py")) for name in names.split()]
    return paths


def extensions(wanted: str) -> list[Extension]:
    """What the variable asks for."""
    if not wanted:
        return []
    if wanted not in _LEVELS:
        raise SystemExit(f"KVGATE_COMPILED is {wanted!r}; it can be {' or '.join(_LEVELS)}")
    try:
        from mypyc.build import mypycify
    except ImportError:
        raise SystemExit("KVGATE_COMPILED needs mypy in this environment, and pip --no-build-isolation") from None
    config = ["--config-file", "pyproject.toml"]
    level = _LEVELS[wanted]
    debug = "0" if wanted == "quick" else "1"
    made = mypycify([*config, *compiled_paths()], group_name="kvgate", opt_level=level, debug_level=debug)
    for extension in made:
        # Nothing but Python looks into the library: without this every call inside it is one that could be replaced
        # from outside, by way of a table and never inlined.
        extension.extra_compile_args.append("-fvisibility=hidden")
    return made


# A build's only way to be told something by pip's user; the gateway itself reads the environment in `config.py` alone.
setup(ext_modules=extensions(os.environ.get("KVGATE_COMPILED", "")))  # noqa: TID251
