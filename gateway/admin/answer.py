"""What all answers of the admin port have in common.

Rules:
1. No keys, no prompt text, no names of sessions but the one that was asked for.
2. Times are ages in seconds: the monotonic clock of the process means nothing outside.
3. Long lists are made a few rows at a time, so that streams go on, and are written as they are (`written`): FastAPI
   would check and convert each of their fields again, 80 ms for 200 workers.
4. The text below a field is its description in the schema and in docs/reference/admin-api.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from fastapi import Response
from pydantic import BaseModel, ConfigDict
from pydantic.config import JsonValue


class Answer(BaseModel):
    """Base of every answer. Fields that a newer gateway adds are ignored by an older client."""

    model_config = ConfigDict(use_attribute_docstrings=True, frozen=True)


def example(**fields: JsonValue) -> ConfigDict:
    """Configuration of an answer with an example for the schema and its page."""
    return ConfigDict(json_schema_extra={"examples": [fields]})


_Row = TypeVar("_Row")

ROWS_AT_ONCE = 16
"""Workers, or decisions of a large fleet: about a millisecond."""


async def paced(rows: Iterable[_Row], *, at_once: int = ROWS_AT_ONCE) -> AsyncIterator[_Row]:
    """The rows, with a turn for everybody else after some of them."""
    for number, row in enumerate(rows, start=1):
        yield row
        if number % at_once == 0:
            await asyncio.sleep(0)


def written(answer: Answer) -> Response:
    """As JSON."""
    return Response(answer.model_dump_json(), media_type="application/json")
