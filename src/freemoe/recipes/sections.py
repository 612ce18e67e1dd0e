"""What every recipe's sections share: they are frozen, and an unknown key is an error."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# numpy and scikit-learn take no seed outside this range.
Seed = Annotated[int, Field(ge=0, lt=2**32)]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
