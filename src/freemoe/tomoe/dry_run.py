"""What a conversion would do, before it does it: `freemoe convert --dry-run`."""

from __future__ import annotations

from typing import Any

from freemoe.models.checkpoints.loading import load_base
from freemoe.models.sublayers import find_sublayers
from freemoe.recipes import ConvertRecipe
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.material import read_blocks
from freemoe.tomoe.structures.structure import dense_parameters


def plan(recipe: ConvertRecipe) -> dict[str, Any]:
    """Tokens, steps, parameters and memory of a conversion; text and model are read, nothing is written.

    Returns:
        Plain data in the order to print it; the last word of a key is its unit.
    """
    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, "cpu")
    sublayers = find_sublayers(model)
    blocks = read_blocks(recipe, model, tokenizer)
    length, tokens = blocks["train"].length, {name: part.tokens for name, part in blocks.items()}
    dense = dense_parameters(sublayers)
    trained = sum(
        p.numel() for p in Hypernetwork(sublayers, recipe.experts, recipe.seed).parameters() if p.requires_grad
    )
    seen = recipe.train.steps * recipe.train.batch_tokens
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
        # With their gradients and Adam's moments.
        "training_bytes": 16 * trained,
        "output": recipe.output,
    }
