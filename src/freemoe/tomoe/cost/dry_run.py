"""What a conversion would do, before it does it: `freemoe convert --dry-run`."""

from __future__ import annotations

import time
from typing import Any

from freemoe.evals.speed import timed_tokens
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.offload import resident_bytes
from freemoe.models.sublayers import find_sublayers
from freemoe.text.blocks import seconds_per_token
from freemoe.tomoe.cost.memory import estimate_memory
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.material import read_blocks
from freemoe.tomoe.recipe import ConvertRecipe
from freemoe.tomoe.structures.rivals import RIVALS
from freemoe.tomoe.structures.structure import dense_parameters
from freemoe.training.loop import eval_steps

# A pass with gradients, in passes without: forward, and backward as long as two of them; a step has the teacher's too.
_WITH_GRADIENTS, _STEP, _AGAIN = 3, 4, 1


def plan_conversion(recipe: ConvertRecipe) -> dict[str, Any]:
    """Tokens, steps, parameters, memory and time of a conversion; text and model are read, nothing is written.

    The last word of a key is its unit.
    """
    began = time.perf_counter()
    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, "cpu")
    sublayers = find_sublayers(model)
    blocks, _ = read_blocks(recipe, model, tokenizer)
    loading = time.perf_counter() - began
    length, tokens = blocks["train"].row_length, {name: part.num_tokens for name, part in blocks.items()}
    dense = dense_parameters(sublayers)
    trained = sum(p.numel() for p in Hypernetwork(sublayers, recipe).parameters() if p.requires_grad)
    seen = recipe.train.steps * recipe.train.batch_tokens
    size = estimate_memory(recipe, sublayers, resident_bytes(model), model.config.vocab_size, length, trained)
    per_token = seconds_per_token(model, blocks["train"])
    every = passed_tokens(recipe, tokens) | {"speed": timed_tokens(recipe.timing, length)}
    stages = {stage: per_token * passed for stage, passed in every.items() if passed}
    return {
        "text_tokens": tokens,
        "block_tokens": length,
        "steps": recipe.train.steps,
        "step_tokens": recipe.train.batch_tokens,
        "passes_over_the_text": seen / max(1, tokens["train"]),
        "weights_of_linears": dense,
        "active_weights_of_linears": round(recipe.active * dense),
        "active_share": recipe.active,
        "trained_numbers": trained,
        "memory_bytes": size.peak_bytes,
        "base_bytes": size.base,
        "activations_bytes": size.activations,
        "logits_bytes": size.logits,
        # With their gradients, Adam's moments and their mean.
        "training_bytes": size.optimizer,
        "clustering_bytes": size.clustering,
        "time_by_stage_seconds": {"loading": loading, **stages},
        "time_on_this_processor_seconds": loading + sum(stages.values()),
        "output": recipe.output,
    }


def passed_tokens(recipe: ConvertRecipe, tokens: dict[str, int]) -> dict[str, float]:
    """Tokens that go through the model, by stage, those with gradients counted as often as they cost more."""
    held_out, test = (min(tokens[part], recipe.train.evaluation_tokens) for part in ("held_out", "test"))
    statistics = min(tokens["train"], recipe.train.statistics_tokens)
    variants = 2 * held_out + test
    if recipe.method != "tomoe" or recipe.active == 1:
        return {"statistics": statistics, "evaluation": variants + test}
    again = _AGAIN * recipe.train.checkpointing
    states = len(eval_steps(recipe.train.steps, recipe.train.save_every)) * (1 + bool(recipe.train.mean_window))
    return {
        "statistics": statistics * (_WITH_GRADIENTS + again) * (recipe.gates.start == "statistics"),
        "training": recipe.train.steps * recipe.train.batch_tokens * (_STEP + again),
        "evaluation": states * held_out + 2 * test,
        "rivals": (statistics + len(RIVALS.names()) * variants) if recipe.rivals else 0,
    }
