"""What a trim would do, said before it is done: layers, plans to measure, forward and backward passes, sizes."""

from __future__ import annotations

import math
import time
from typing import Any

from freemoe.evals.speed import timed_tokens
from freemoe.hookmoe.material import TextParts, prepare_trim
from freemoe.hookmoe.measure import count_parameters
from freemoe.hookmoe.plans.compare import read_variants
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.methods import given_plan, rules_asked, units_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from freemoe.hookmoe.plans.search import MOST_ACTS, even_plan, profile_units
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.text.blocks import seconds_per_token

# A pass with gradients, in passes without.
_WITH_GRADIENTS = 3


def plan_trim(recipe: TrimRecipe) -> dict[str, Any]:
    """Load base and text, run nothing but the probe, and say what the trim would be. The last word of a key is its unit."""
    began = time.perf_counter()
    model, _, text = prepare_trim(recipe)
    loading = time.perf_counter() - began
    base = plan_of(model)
    training = recipe.training
    hidden = model.config.get_text_config().hidden_size
    given = recipe.plan.given
    plan = given_plan(model, given) if given else uniform_plan(base, 1)
    # Hooks are paid from what is saved: of the plan that is given, of the Act that is asked for, or of the least.
    cut = even_plan(base, recipe.plan.act) if recipe.plan.act else plan
    units = units_of(model, recipe.hooks, cut)
    full, least = count_parameters(model, base), count_parameters(model, plan)
    cached = text.train.num_tokens * hidden * model.dtype.itemsize
    measured = _max_held_out_passes(recipe, base, len(rules_asked(model, recipe.plan.rescale)))
    compared = len(read_variants(recipe.plan.compare, model))
    per_token = seconds_per_token(model, text.train)
    stages = {
        stage: per_token * passed
        for stage, passed in _passed_tokens(recipe, text, measured, compared).items()
        if passed
    }
    return {
        "base": recipe.model,
        "experts_per_token": base.to_text(),
        "mean_experts_per_token": base.act,
        "plan": plan.to_text() if given else None,
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
        "compared_plans": compared,
        "steps": training.steps,
        "step_blocks": training.rows,
        "loss": training.loss,
        "control": training.control,
        "cached_inputs_bytes": cached,
        "time_by_stage_seconds": {"loading": loading, **stages},
        "time_on_this_processor_seconds": loading + sum(stages.values()),
        "output": recipe.output,
    }


def _passed_tokens(recipe: TrimRecipe, text: TextParts, measured: int, compared: int) -> dict[str, float]:
    """Tokens that go through the model at most, by stage, those with gradients counted as often as they cost more."""
    training = recipe.training
    hooks = recipe.hooks.layers != "none"
    steps = training.steps * training.rows * training.block * _WITH_GRADIENTS
    once = steps + math.ceil(training.steps / training.every) * text.held_out.num_tokens
    # Of every row its loss and its routes; the full model's answers, and the free compensators' fit.
    rows = 3 + hooks * (1 + training.control)
    return {
        "teacher": text.held_out.num_tokens + hooks * text.train.num_tokens,
        "plan": measured * text.held_out.num_tokens,
        "hooks": hooks * (once + 2 * text.train.num_tokens),
        "control": hooks * training.control * once,
        "test": (2 * rows + 2) * text.test.num_tokens + min(text.train.num_tokens, 64 * training.block),
        "compared_plans": compared * text.held_out.num_tokens,
        "speed": timed_tokens(recipe.timing, text.test.row_length),
    }


def _max_held_out_passes(recipe: TrimRecipe, base: LayerPlan, rules: int) -> int:
    """Passes over the held-out text at most, to settle the plan, its rule for router weights, and where hooks stand."""
    runs = [k for k in base.ks if k is not None]
    # What each layer has lost decides its hook's width.
    residual = 0 if recipe.hooks.layers == "none" else len(runs) + 1
    if recipe.plan.given is not None:
        return (rules if rules > 1 else 0) + residual
    if recipe.plan.search == "two_stage":
        return rules * (max(runs) - 2 + len(base.ks).bit_length()) + residual
    budgets = min(sum(runs) - len(runs) + 1, MOST_ACTS + 3)
    plans = budgets * recipe.plan.best + (max(runs) - 1) * (len(base.ks) + 1)
    profile = len(profile_units(base)) if recipe.plan.score == "kl" else 0
    return profile + rules * (plans + 1) + recipe.plan.swaps + residual
