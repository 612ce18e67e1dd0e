"""The recipe of the toy."""

from typing import Literal

from pydantic import Field

from freemoe.recipes.sections import Dtype, Model, Output, Recipe, Revision, Seed, Threads, UnitSeconds, Where, Workers


class DampRecipe(Recipe):
    """Make the last layer's MLP weaker."""

    command: Literal["damp"] = "damp"
    model: Model
    revision: Revision = None
    output: Output = "freemoe-damped"
    seed: Seed = 0
    dtype: Dtype = "auto"
    threads: Threads = None
    place: Where = "local"
    workers: Workers = 1
    unit_seconds: UnitSeconds = None
    factor: float = Field(default=0.5, ge=0, le=1, description="What is left of the MLP's output.")
