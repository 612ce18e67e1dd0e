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
    """Load base and text, run nothing but the probe, and say what the trim would be."""
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
        "base": f"{recipe.model}: {base.text()} experts per token (Act {base.act:.3f}), {full.total:,} parameters",
        "plan": given_plan(model, given).text() if given else f"searched: {recipe.plan.search}",
        "active_parameters": f"{full.active:,} -> {least.active:,}" + ("" if given else " at one expert per layer"),
        "hooks": f"{recipe.hooks.layers}: {2 * hidden * units:,} parameters in {units} hidden units",
        "text": f"{len(text.train)} blocks train, {len(text.held_out)} held out, {len(text.test)} test, {training.block} tokens each",
        "plans_measured_at_most": measured,
        "training": f"{training.steps} steps of {training.rows} blocks, loss {training.loss}"
        + (", and the control as long" if training.control else ""),
        "cached_inputs_bytes_at_most": cached,
    }
