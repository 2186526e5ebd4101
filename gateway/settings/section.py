"""What all sections are made of: frozen, unknown keys refused, numbers with a unit in their name and a sane limit."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, SecretStr

WHY = "x-why"

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65_535)]


def _one_word(token: SecretStr) -> SecretStr:
    # It becomes a header: a line break in it would begin another one, and what refuses such a header shows it.
    if re.fullmatch(r"[\x21-\x7e]*", token.get_secret_value()) is None:
        raise ValueError("expected one line of plain letters, without spaces; does it end with a line break?")
    return token


BearerToken = Annotated[SecretStr, AfterValidator(_one_word)]


class Section(BaseModel):
    """One section of the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def why(reason: str) -> dict[str, JsonValue]:
    """For `json_schema_extra` of a key: why its default is what it is. Shown in the reference and in the schema."""
    return {WHY: reason}
