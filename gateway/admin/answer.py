"""What all answers of the admin port have in common.

Rules:
1. No keys, no prompt text, no names of sessions but the one that was asked for.
2. Times are ages in seconds: the monotonic clock of the process means nothing outside.
3. The text below a field is its description in the schema and in docs/reference/admin-api.md.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of every answer. Fields that a newer gateway adds are ignored by an older client."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)
