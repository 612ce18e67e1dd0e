"""What a trim would do, said before it is done: layers, plans to measure, forward and backward passes, sizes."""

from __future__ import annotations

from typing import Any

from freemoe.hookmoe.metrics import count_parameters
from freemoe.hookmoe.plans.apply import plan_of
from freemoe.hookmoe.plans.methods import default_units, given_plan
from freemoe.hookmoe.plans.plan import uniform
from freemoe.hookmoe.plans.search import MOST_ACTS, profile_units
from freemoe.hookmoe.trim import prepare
from freemoe.recipes import TrimRecipe


def outlook(recipe: TrimRecipe) -> dict[str, Any]:
    """Load base and text, run nothing but the probe, and say what the trim would be.

    Returns:
        Plain data in the order to print it; the last word of a key is its unit.
    """
    model, text = prepare(recipe)
    base = plan_of(model)
    training = recipe.training
    units = recipe.hooks.units or default_units(model)
    hidden = model.config.get_text_config().hidden_size
    given = recipe.plan.given
    plan = given_plan(model, given) if given else uniform(base, 1)
    full, least = count_parameters(model, base), count_parameters(model, plan)
    cached = text.train.tokens * hidden * model.dtype.itemsize
    measured = 0
    if given is None and recipe.plan.search == "knapsack":
        layers = sum(k is not None for k in base.ks)
        budgets = min(sum(k - 1 for k in base.ks if k is not None) + 1, MOST_ACTS + 3)
        measured = len(profile_units(base)) + budgets * recipe.plan.best + layers
    return {
        "base": recipe.model,
        "experts_per_token": base.text(),
        "mean_experts_per_token": base.act,
        "plan": plan.text() if given else None,
        "search": None if given else recipe.plan.search,
        "parameters": full.total,
        "active_parameters": full.active,
        # Of the plan that is given, or of one expert in every layer.
        "least_active_parameters": least.active,
        "hook_layers": recipe.hooks.layers if isinstance(recipe.hooks.layers, str) else list(recipe.hooks.layers),
        "hook_units": units,
        "hook_parameters": 2 * hidden * units,
        "text_blocks": {"train": len(text.train), "held_out": len(text.held_out), "test": len(text.test)},
        "block_tokens": training.block,
        "plans_measured_at_most": measured,
        "steps": training.steps,
        "step_blocks": training.rows,
        "loss": training.loss,
        "control": training.control,
        "cached_inputs_bytes": cached,
        "output": recipe.output,
    }
