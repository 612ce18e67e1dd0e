"""A trimmed mixture against its base and against the plan alone: on tasks, or on its own text again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from freemoe.core.artifacts import tensor_checksums
from freemoe.core.environment import use_threads
from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.ledger import count_openings
from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.evals.evaluation import EvalTarget, make_variant, only_known
from freemoe.evals.held_out import ProvenanceRecord, read_record, set_aside_text
from freemoe.hookmoe.adapter import Trimmed, load_adapter, load_trimmed
from freemoe.hookmoe.artefact import inspect_artefact
from freemoe.hookmoe.material import TextParts, load_text
from freemoe.hookmoe.measure import count_parameters
from freemoe.hookmoe.pipeline import measure_rows, rows_of
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.hookmoe.report import trim_table
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from freemoe.models.checkpoints.placement import Placement, require_one_device
from freemoe.recipes import EvalRecipe, load_recipe
from freemoe.report.tables import plain_table
from freemoe.text.blocks import row_texts


def evaluate_text(
    artefact: str,
    base: str | None = None,
    dtype: str = "auto",
    device: Placement = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the artefact on its own text's test part again.

    Rows of the test part that overlap with what the trim saw, as after a change of the file, are set aside.

    Returns:
        Tokens and rows, as in the artefact's ``result.json``, and ``set_aside``.

    Raises:
        DataError: Nothing of the test part is left.
    """
    progress = progress or QuietProgress()
    use_threads(threads)
    recipe = _recipe_of(artefact)
    require_one_device(device, "A trimmed mixture")
    model, tokenizer = load_base(base or recipe.model, recipe.revision, dtype, device)
    trimmed = load_adapter(artefact, model, tokenizer)
    record = read_record(artefact)
    assert record is not None
    if record.seen is None:
        progress.say(record.missing_record_warning())
    text, apart = unseen_test(load_text(recipe, tokenizer), tokenizer, record)
    if apart["documents"]:
        progress.say(set_aside_text(apart))
    rows = measure_rows(model, text, rows_of(model, trimmed), recipe.training, recipe.seed, progress)
    opening = ["own text", tensor_checksums(artefact), base, dtype]
    cost = {"openings": count_openings(row_texts(tokenizer, text.test), opening)}
    return {**rows, "costs": costs_of(model, trimmed), "set_aside": apart, "seen": record.as_json(), "cost": cost}


def evaluate_own_text(*where: Any) -> tuple[Table, dict[str, Any]]:
    """Measure a trim's own text again (`evaluate_text`); a table beside the plain data."""
    found = evaluate_text(*where)
    return plain_table(*trim_table(found["rows"])), found


def _recipe_of(artefact: str) -> TrimRecipe:
    recipe = load_recipe(Path(artefact) / "recipe.yaml")
    if not isinstance(recipe, TrimRecipe):
        raise ArtifactError(f"{artefact!r} holds a recipe of {recipe.command!r}, not of trim. Build it anew.")
    return recipe


def plan_evaluation(artefact: str, base: str | None = None) -> dict[str, Any]:
    """What `evaluate_text` would measure: its text is read, no model is loaded.

    Raises:
        DataError: The text is not there, or nothing of its test part is left.
    """
    recipe = _recipe_of(artefact)
    tokenizer = load_tokenizer(base or recipe.model, recipe.revision)
    record = read_record(artefact)
    assert record is not None
    text, apart = unseen_test(load_text(recipe, tokenizer), tokenizer, record)
    held = inspect_artefact(Path(artefact))
    rows = ["full", "plan"]
    rows += ["rescaled"] if held["rescale"] != "none" else []
    rows += ["hooks"] if held["hooks"] else []
    return {
        "artefact": artefact,
        "base": base or recipe.model,
        "text": recipe.text,
        "test_blocks": len(text.test),
        "block_tokens": text.test.row_length,
        "set_aside_blocks": apart["documents"],
        "rows": rows,
        "forward_tokens": (2 * len(rows) + 2) * text.test.num_tokens,
    }


def costs_of(model: Any, trimmed: Trimmed) -> dict[str, dict[str, Any]]:
    """Way -> Act, also per layer, and parameters, counted from the live model."""
    base = plan_of(model)
    bare = Trimmed(trimmed.plan, None, trimmed.rescale)
    ways = {"full": Trimmed(base), "plan": bare, "rescaled": bare, "hooks": trimmed}
    return {
        name: {
            "act": ways[name].plan.act,
            "act_per_layer": {str(n): float(k) for n, k in enumerate(ways[name].plan.ks) if k is not None},
            **vars(count_parameters(model, ways[name].plan, ways[name].hooks)),
        }
        for name in rows_of(model, trimmed)
    }


def unseen_test(text: TextParts, tokenizer: Any, record: ProvenanceRecord) -> tuple[TextParts, dict[str, Any]]:
    """The text without the rows of its test part that the trim saw, and the count of these as `set_aside` has it."""
    rows, seen = len(text.test), record.seen
    if seen is None:
        return text, {"documents": 0, "of": rows, "by": {}}
    kept = [n for n in range(rows) if not any(map(seen.has_text, row_texts(tokenizer, text.test.select_rows([n]))))]
    dropped = rows - len(kept)
    apart = {"documents": dropped, "of": rows, "by": {"text": dropped} if dropped else {}}
    if not kept:
        raise DataError(
            f"{set_aside_text(apart)}; nothing of the test part is left. The text of {record.folder!r} is another one than "
            "when it was trimmed: put the file back, or name other text: --domain NAME=text:FILE."
        )
    return (replace(text, test=text.test.select_rows(kept)) if dropped else text), apart


def eval_target(recipe: EvalRecipe) -> EvalTarget:
    """The base, the plan alone and the artefact.

    Raises:
        FreeMoEError: Its child that says what is wrong with artefact or base.
    """
    model, tokenizer, trimmed = load_trimmed(recipe.artefact, recipe.base, recipe.dtype, recipe.device)
    contexts = rows_of(model, trimmed)
    only_known(recipe, list(contexts))
    # A context can be entered once, and there may be several domains.
    rows = {name: make_variant(lambda n=name: rows_of(model, trimmed)[n]) for name in contexts}
    return EvalTarget(model, tokenizer, rows, costs_of(model, trimmed))
