"""How a row of ToMoE's tables is measured: one conversion, on text and on tasks that chose nothing, beside the dense model."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freemoe.assets import DOMAINS, benchmark_path
from freemoe.core.errors import DataError
from freemoe.core.run.progress import Progress
from freemoe.tomoe.recipe import ConvertRecipe
from reproduce.mode.work import SMALL_MODEL
from reproduce.scoring import scored
from reproduce.table import Scene

if TYPE_CHECKING:
    from freemoe.evals.evaluation import EvalTarget

DENSE, CONVERTED = "dense", "converted"

BUNDLED_TASKS = {domain: f"demo:{domain}" for domain in DOMAINS}
IN_DATA = ("wikitext2@2048", "arc_easy", "arc_challenge", "hellaswag", "mmlu")
"""Tasks whose files are in the data folder of ``small``."""

TINY = {
    "steps": 40,
    "batch_tokens": 1024,
    "block": 256,
    "save_every": 20,
    "evaluation_tokens": 16384,
    "statistics_tokens": 16384,
}
SMALL = TINY | {"steps": 60}
SHORT = {"steps": 4, "batch_tokens": 256, "save_every": 2, "evaluation_tokens": 1024, "statistics_tokens": 2048}
"""Of a run with ``--limit``."""

TINY_DOCUMENTS, SMALL_DOCUMENTS = 60, 100
BATCHES = {"tiny": (4, 8, 12), "small": (4, 8, 12), "paper": (512, 1024, 1536)}
"""Sequences in one call of the table of speed, of `SPEED_TOKENS` tokens each."""

SPEED_TOKENS = 64
NO_DATA = "The scale small needs the real data: --data-root with the folder that holds wikitext-2-raw, alpaca, code_alpaca and arc."
TEXTS = {
    "prose": "The harbour was quiet in the morning. Two boats came back from the night, and the men on the quay counted the "
    "baskets, wrote a number on a slate and carried them up to the market hall before the first train left.",
    "mathematics": "A line passes through the points (2, 3) and (6, 11). Its slope is (11 - 3) / (6 - 2) = 8 / 4 = 2. With "
    "y = 2x + b and the first point, 3 = 2 * 2 + b, so b = -1. The line is y = 2x - 1.",
}
"""What the tables of tokens show; ours, as the paper's are Wikipedia's."""


def at_scale(recipe: dict[str, Any], scene: Scene, tasks: dict[str, str]) -> dict[str, Any]:
    """A paper's conversion cut down to a scale, with its table's tasks beside it as ``arguments``.

    Below ``paper`` the project's own default profile trains it: the paper's begins at random masks and needs its 10,000 steps.
    What a row changes stays.

    Raises:
        DataError: At ``small`` without a model or data.
    """
    data: dict[str, Any] = {} if scene.limit is None else {"limit": scene.limit}
    if scene.data_root is not None and scene.scale != "tiny":
        data["root"] = str(scene.data_root)
    if scene.scale == "paper":
        root = {} if scene.data_root is None else {"data_root": str(scene.data_root)}
        own = {**recipe, **root, "model": scene.model or recipe["model"]}
        return own | {"arguments": {"tasks": tasks, "data": {**data, "fewshot_draw": "document"}}}
    if scene.scale == "small" and (scene.model is None or scene.data_root is None):
        raise DataError(SMALL_MODEL if scene.model is None else NO_DATA)
    tiny = scene.scale == "tiny"
    short = {} if scene.limit is None else SHORT
    found = {k: v for k, v in recipe.items() if k not in ("profile", "mix")}
    found["train"] = {**recipe.get("train", {}), **(TINY if tiny else SMALL), **short}
    gates = dict(recipe.get("gates", {}))
    if gates.get("attention") == "heads" and scene.profile in (None, "default"):
        # The statistics of the default's start rank dimensions, not heads.
        gates |= {"budget": "loss", "start": "random"}
    # What the conversion times itself stands in no table.
    found |= {"gates": gates, "dtype": "float32", "device": "auto", "timing": {"rounds": 0}}
    if tiny:
        # One of three texts stands for one of three data sets.
        domains = DOMAINS[-1:] if recipe["mix"] == "wikitext" else DOMAINS
        found |= {
            "model": scene.model or "freemoe-demo",
            "text": [str(benchmark_path(d, "reference")) for d in domains],
        }
        own = BUNDLED_TASKS
    else:
        root = scene.data_root
        assert root is not None
        found |= {"model": scene.model, "data_root": str(root), "mix": recipe["mix"]}
        own = {name: task for name, task in tasks.items() if {task, re.split("[@:]", task)[0]} & {*IN_DATA}}
    return found | {"arguments": {"tasks": own, "data": {"limit": TINY_DOCUMENTS if tiny else SMALL_DOCUMENTS, **data}}}


def for_speed(recipe: dict[str, Any], scene: Scene, tasks: dict[str, str]) -> dict[str, Any]:
    """The same without tasks; its speed in batches instead."""
    found = at_scale(recipe, scene, {})
    found["arguments"] |= {"tasks": {}, "batches": list(BATCHES[scene.scale])}
    return found


# ------------------------------------------------------------------------------------------- the run


def conversion_record(
    recipe: ConvertRecipe,
    folder: Path,
    progress: Progress,
    tasks: dict[str, str],
    data: dict[str, Any],
    batches: Sequence[int] = (),
) -> dict[str, Any]:
    """Convert, then score the dense and the converted model on tasks (column -> task), and their speed in calls of ``batches``.

    Returns:
        ``text``: way (dense, converted, the rivals) -> perplexity and its interval over blocks; ``tasks``: column -> way ->
        score and gain; ``active``: way -> share of the weights that a token uses; ``trained``: tokens; and what `reading` shows.
    """
    from freemoe.tomoe.measure.usage import expert_similarity, expert_widths, layer_widths, training_dynamics
    from freemoe.tomoe.pipeline import convert
    from freemoe.tomoe.structures.structure import read_structure

    file = Path(recipe.output) / "result.json"
    if not file.is_file():
        convert(recipe, progress=progress)
    result = json.loads(file.read_text(encoding="utf-8"))
    similarity = [_off_diagonal(layer) for layer in expert_similarity(read_structure(recipe.output))]
    return {
        "text": {way: _perplexity(score) for way, score in result["scores"].items()},
        "tasks": scored(
            recipe.output, lambda _: _both(recipe), recipe, {c: [t] for c, t in tasks.items()}, data, progress
        ),
        "active": {
            DENSE: 1.0,
            CONVERTED: result["parameters"]["active_share"],
            **{name: variant["active"] for name, variant in result["rivals"].items()},
        },
        "parameters": result["parameters"],
        "trained": recipe.train.steps * recipe.train.batch_tokens,
        "layers": layer_widths(result),
        "boxes": [
            {**box, "dense": layer["width"]} for box, layer in zip(expert_widths(result), result["layers"], strict=True)
        ],
        "similarity": similarity,
        "usage": result["usage"],
        "dynamics": training_dynamics(result),
        **_seen_in(recipe, batches),
    }


def _perplexity(score: dict[str, Any]) -> dict[str, float]:
    """Of all tokens, and its 95 % interval over blocks."""
    from freemoe.evals.verdict import perplexity_against

    found = perplexity_against(score["nll"], [0.0] * len(score["nll"]), score["tokens"])
    return {"value": found.pop("mean"), **found}


def _off_diagonal(shares: list[list[float]]) -> dict[str, float]:
    others = [v for i, row in enumerate(shares) for j, v in enumerate(row) if i != j]
    return {"least": min(others), "mean": statistics.fmean(others), "most": max(others)}


def _both(recipe: ConvertRecipe) -> EvalTarget:
    """The dense model, and under the conversion's masks: what the folder computes, in one model's memory."""
    from freemoe.evals.evaluation import EvalTarget, make_variant
    from freemoe.models.checkpoints.loading import load_base
    from freemoe.tomoe.structures.masked import apply_structure
    from freemoe.tomoe.structures.structure import read_structure

    model, tokenizer = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    structure = read_structure(recipe.output)

    return EvalTarget(
        model,
        tokenizer,
        {DENSE: make_variant(nullcontext), CONVERTED: make_variant(partial(apply_structure, model, structure))},
    )


def _seen_in(recipe: ConvertRecipe, batches: Sequence[int]) -> dict[str, Any]:
    """What the written folder itself shows: the experts of two short texts' tokens, and its speed beside the dense model's."""
    from freemoe.models.checkpoints.loading import load_base
    from freemoe.tomoe.measure.usage import token_experts

    new, tokenizer = load_base(recipe.output, device=recipe.device)
    layers = sorted({0, len(new.config.tomoe["layers"]) // 2, len(new.config.tomoe["layers"]) - 1})
    tokens = {name: token_experts(new, tokenizer, text, layers) for name, text in TEXTS.items()}
    speed = {}
    if batches:
        dense, _ = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
        speed = {str(batch): _tokens_per_second(dense, new, batch, recipe.seed) for batch in batches}
    return {"tokens": {"layers": layers, **tokens}, "speed": speed}


def _tokens_per_second(dense: Any, new: Any, batch: int, seed: int) -> dict[str, float]:
    """Tokens per second of both, in turns: a prompt of `SPEED_TOKENS` tokens in every row, the logits of the last one."""
    import torch

    ids = torch.randint(
        3, dense.config.vocab_size, (batch, SPEED_TOKENS), generator=torch.Generator().manual_seed(seed)
    )
    seconds: dict[str, list[float]] = {DENSE: [], CONVERTED: []}
    with torch.no_grad():
        for number in range(4):
            for way, model in ((DENSE, dense), (CONVERTED, new)):
                began = time.perf_counter()
                logits = model(ids.to(model.device), use_cache=False, logits_to_keep=1).logits
                # Reading a number waits for the device.
                assert math.isfinite(float(logits[0, -1, 0]))
                if number:  # the first round warms up
                    seconds[way].append(time.perf_counter() - began)
    return {way: ids.numel() / statistics.median(values) for way, values in seconds.items()}
