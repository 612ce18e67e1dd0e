"""The recipe of `freemoe demo`: the bundled tiny model on the bundled benchmark."""

from __future__ import annotations

from freemoe.assets import BUNDLED, DOMAINS
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.recipes import recipe_from


def demo_recipe(
    output: str, seed: int = 0, limit: int | None = None, threads: int | None = None, workers: int | None = None
) -> BuildRecipe:
    """Build recipe of the demo; an ordinary recipe, which ``--print-recipe`` shows. ``limit``: documents per task and split."""
    recipe = recipe_from(
        {
            "command": "build",
            "model": BUNDLED,
            "domains": {domain: f"demo:{domain}" for domain in DOMAINS},
            "output": output,
            "seed": seed,
            "threads": threads,
            **({} if workers is None else {"workers": workers}),
            "dtype": "float32",
            "data": {"limit": limit},
            "subdomains": {"by": "field"},
        },
        "The demo",
    )
    assert isinstance(recipe, BuildRecipe)
    return recipe
