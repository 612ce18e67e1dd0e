"""What every recipe's sections share: they are frozen, and an unknown key is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# numpy and scikit-learn take no seed outside this range.
Seed = Annotated[int, Field(ge=0, lt=2**32, description="Seed of everything random.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Field(description="Number format of the base.")]
Device = Annotated[str, Field(description="auto, cpu, cuda, cuda:N.")]
Threads = Annotated[int | None, Field(ge=1, description="CPU threads.")]
Revision = Annotated[str | None, Field(description="Revision of the hub repository.")]
BatchTokens = Annotated[int, Field(ge=16, description="Padded tokens per batch.")]
Output = Annotated[str, Field(description="Folder to write.")]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
