"""What all answers of the admin port have in common.

Rules:
1. No keys, no prompt text, no names of sessions but the one that was asked for.
2. Times are ages in seconds: the monotonic clock of the process means nothing outside.
3. The text below a field is its description in the schema and in docs/reference/admin-api.md.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonValue


class Answer(BaseModel):
    """Base of every answer. Fields that a newer gateway adds are ignored by an older client."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


def example(**fields: JsonValue) -> ConfigDict:
    """Configuration of an answer with an example for the schema and its page."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


class ErrorBody(Answer):
    """OpenAI's error object."""

    model_config = example(
        message="no worker is named 'w11'; did you mean 'w1'? there are: w1, w2",
        type="not_found_error",
        code="worker_not_found",
        param=None,
    )

    message: str
    """What is wrong, and the fix where there is one."""
    type: str
    code: str
    """A fixed word, see docs/reference/errors.md."""
    param: str | None = None
    """The parameter or field at fault."""


class ErrorAnswer(Answer):
    """Every error of the admin port."""

    error: ErrorBody
