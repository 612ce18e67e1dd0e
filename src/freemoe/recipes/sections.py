"""What every recipe's sections share: they are frozen, and an unknown key is an error."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _one_device(value: str) -> str:
    if value in ("split", "disk") or "=" in value:
        raise ValueError(
            f"{value!r} spreads the base, and what is trained here needs all of it on one device: auto, cpu, cuda, cuda:N"
        )
    return value


# numpy and scikit-learn take no seed outside this range.
Seed = Annotated[int, Field(ge=0, lt=2**32, description="Seed of everything random.")]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], Field(description="Number format of the base.")]
Device = Annotated[str, AfterValidator(_one_device), Field(description="auto, cpu, cuda, cuda:N.")]
Chat = Annotated[
    Literal["auto", "on", "off"],
    Field(
        description="The model's chat template: auto (where it has one and the data is conversations), on (every prompt is a "
        "message of the user), off."
    ),
]
Devices = Annotated[
    str | dict[str, str],
    Field(
        description="auto, cpu, cuda, cuda:N; split: over every accelerator, then memory, then disk; disk: layers are read from "
        "their files as they are needed; cuda:0=20GiB,cpu=8GiB: as much as that on each, the rest on disk."
    ),
]
Threads = Annotated[int | None, Field(ge=1, description="CPU threads.")]
Revision = Annotated[str | None, Field(description="Revision of the hub repository.")]
BatchTokens = Annotated[int, Field(ge=16, description="Padded tokens per batch.")]
Output = Annotated[str, Field(description="Folder to write.")]


class Section(BaseModel):
    """A part of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True)
