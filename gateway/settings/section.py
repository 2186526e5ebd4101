"""What all sections are made of: frozen, unknown keys refused, numbers with a unit in their name and a sane limit."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue

WHY = "x-why"

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65_535)]


class Section(BaseModel):
    """One section of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def why(reason: str) -> dict[str, JsonValue]:
    """For `json_schema_extra` of a key: why its default is what it is. Shown in the reference and in the schema."""
    return {WHY: reason}
