"""Whether a worker answers nobody, as requests show that another worker had to answer in its place.

Who takes late requests away from a worker never sees it fail: a frozen one would look idle and attract the next. So
the time counts in which it had a request, sent after its last answer, and answered nobody. However soon requests are
taken away, it fails once for each `SILENT_S` of that, and at most once for all that were under way together. Who is in
the middle of an answer, or says that a request is wrong, answers.

No clock: `now` and `sent_at` are arguments, in seconds.
"""

from __future__ import annotations

import math
from typing import Final

SILENT_S: Final = 0.5
"""The default floor of what is called late. A worker may be slower than an impatient floor without being dead."""


class Silence:
    """Of one worker."""

    __slots__ = ("_answered_at", "_found_at", "_seconds")

    def __init__(self) -> None:
        self._answered_at = -math.inf
        self._found_at = -math.inf
        """When it was last found to have answered nobody."""
        self._seconds = 0.0
        """Of silence since its last answer, or since they made a failure."""

    def answered(self, now: float) -> None:
        """A request's answer has begun or goes on, or the worker has said that a request is wrong."""
        self._answered_at = now
        self._seconds = 0.0

    def overtaken(self, sent_at: float, now: float) -> bool:
        """A request sent at `sent_at` is taken away because another worker answers it. True when the worker has been
        silent for long enough to call it a failure."""
        if max(self._answered_at, self._found_at) >= sent_at:
            return False
        self._found_at = now
        self._seconds += now - sent_at
        if self._seconds < SILENT_S:
            return False
        self._seconds = 0.0
        return True
