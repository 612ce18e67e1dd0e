"""The recipe of `freemoe eval`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from freemoe.recipes.data import DataSection, DomainRecipe, Domains
from freemoe.recipes.sections import BatchTokens, Devices, Dtype, Seed, Threads, UnitSeconds, Where, Workers


class EvalRecipe(DomainRecipe):
    """Everything `freemoe eval` needs: a model or an artefact, and tasks."""

    SHORT: ClassVar[dict[str, str]] = {"data_root": "data.root"}

    command: Literal["eval"] = "eval"
    artefact: str = Field(description="Folder that freemoe wrote, or a plain model.")
    base: str | None = Field(default=None, description="Base model; the artefact's own if absent.")
    experts: tuple[str, ...] = Field(
        default=("base", "auto"),
        max_length=10_000,
        description="base, auto (the router), names; a+b is a union of experts, a&b an intersection.",
    )
    domains: Domains
    output: str | None = Field(default=None, description="Also write the result as JSON here.")
    seed: Seed | None = Field(
        default=None,
        description="Carves tasks that have no split of their own; the artefact's own if absent, 0 for a model.",
    )
    dtype: Dtype = "auto"
    device: Devices = "auto"
    threads: Threads = None
    place: Where = "local"
    workers: Workers = 1
    unit_seconds: UnitSeconds = None
    batch_tokens: BatchTokens = 4096
    data: DataSection = DataSection()
