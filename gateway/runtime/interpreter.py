"""The interpreter of a process that routes: how it collects garbage and how its threads take turns.

Garbage is collected rarely, and not over what stays. The index holds millions of objects that live long and make no
cycles; a full collection walks all of them and stops every stream for as long. Reference counts free what requests
leave behind, so collecting less often costs little memory.

A thread that runs Python code (it renders, cuts or hashes a long prompt) gives up the interpreter when another one has
asked for it and a while has passed. A small request takes four turns of the event loop, and waits as long at each.
"""

from __future__ import annotations

import gc
import sys

from gateway import router

_YOUNG = 50_000
"""Allocations between two collections of the youngest generation: some hundred requests instead of about three."""
_MIDDLE, _OLD = 20, 100
"""Collections of one generation between two of the next."""

_TURN_S = 0.0005
"""A tenth of the usual; a change of turns costs some 20 us, and there are some only while a thread has such work."""


def is_compiled() -> bool:
    """Whether the modules that every request passes are compiled here (`setup.py`)."""
    return not router.__file__.endswith(".py")


def tune_interpreter() -> None:
    """Call once when everything that stays has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
    sys.setswitchinterval(_TURN_S)
