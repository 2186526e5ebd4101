"""Garbage collection of a process that routes: rarely, and not over what stays.

The index holds millions of objects that live long and make no cycles; a full collection walks all of them and stops
every stream for as long. Reference counts free what requests leave behind, so collecting less often costs little
memory.
"""

from __future__ import annotations

import gc

_YOUNG = 50_000
"""Allocations between two collections of the youngest generation: some hundred requests instead of about three."""
_MIDDLE, _OLD = 20, 100
"""Collections of one generation between two of the next."""


def tune_garbage_collection() -> None:
    """Call once when everything that stays has been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)
