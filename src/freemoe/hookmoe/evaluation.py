"""`evaluate`: a trimmed mixture against its base and against the plan alone, on tasks or on its own text again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from freemoe.core.environment import environment
from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.core.runs import Progress, Quiet, digest, write_atomic
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.held_out import Record, read_record, seeded, set_aside, set_aside_text
from freemoe.evals.statistics import cluster_bootstrap
from freemoe.evals.tasks.documents import Document, FrozenChoice
from freemoe.evals.tasks.domains import domain_of
from freemoe.evals.tasks.task import Grader
from freemoe.hookmoe.adapter import load_adapter, load_trimmed
from freemoe.hookmoe.material import TextParts, load_text
from freemoe.hookmoe.trim import measure_rows, rows_of
from freemoe.models.checkpoints.loading import load_base
from freemoe.recipes import EvalRecipe, TrimRecipe, load_recipe
from freemoe.text.blocks import row_texts


def evaluate_text(
    artefact: str,
    base: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
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
    progress = progress or Quiet()
    if threads:
        torch.set_num_threads(threads)
    recipe = load_recipe(Path(artefact) / "recipe.yaml")
    if not isinstance(recipe, TrimRecipe):
        raise ArtifactError(f"{artefact!r} holds a recipe of {recipe.command!r}, not of trim. Build it anew.")
    model, tokenizer = load_base(base or recipe.model, recipe.revision, dtype, device)
    trimmed = load_adapter(artefact, model)
    record = read_record(artefact)
    assert record is not None
    if record.warning():
        progress.say(record.warning())
    text, apart = unseen_test(load_text(recipe, tokenizer), tokenizer, record)
    if apart["documents"]:
        progress.say(set_aside_text(apart))
    rows = measure_rows(model, text, rows_of(model, trimmed), recipe.training, recipe.seed, progress)
    return {**rows, "set_aside": apart, "seen": record.describe()}


def unseen_test(text: TextParts, tokenizer: Any, record: Record) -> tuple[TextParts, dict[str, Any]]:
    """The text without the rows of its test part that the trim saw, and the count of these as `set_aside` has it."""
    rows, seen = len(text.test), record.seen
    if seen is None:
        return text, {"documents": 0, "of": rows, "by": {}}
    kept = [n for n in range(rows) if not any(map(seen.has_text, row_texts(tokenizer, text.test.rows([n]))))]
    dropped = rows - len(kept)
    apart = {"documents": dropped, "of": rows, "by": {"text": dropped} if dropped else {}}
    if not kept:
        raise DataError(
            f"{set_aside_text(apart)}; nothing of the test part is left. The text of {record.folder!r} is another one than "
            "when it was trimmed: put the file back, or name other text: --domain NAME=text:FILE."
        )
    return (replace(text, test=text.test.rows(kept)) if dropped else text), apart


def evaluate(recipe: EvalRecipe, *, progress: Progress | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Score tasks under the base, the plan alone and the artefact; differences are paired, and to the base.

    Args:
        recipe: What to score; ``experts`` is not used.
        progress: Where to report.
        overwrite: Replace an output file that is there.

    Returns:
        Per domain a row each: score, difference with its 95 % interval, documents.
    """
    progress = progress or Quiet()
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    if recipe.output and Path(recipe.output).exists() and not overwrite:
        raise ArtifactError(f"{recipe.output!r} exists already. Choose another -o, or --overwrite to replace it.")
    record = read_record(recipe.artefact)
    recipe = seeded(recipe, record)
    if record is not None and record.warning():
        progress.say(record.warning())
    model, tokenizer, trimmed = load_trimmed(recipe.artefact, recipe.base, recipe.dtype, recipe.device)
    # Nothing is chosen here, so the reported split may be read at once.
    choice = FrozenChoice(digest(recipe.model_dump(mode="json")))
    scorer = Scorer(model, tokenizer, batch_tokens=recipe.batch_tokens, overflow=recipe.data.overflow)
    loaded = {name: set_aside(domain_of(recipe, name, tokenizer), record) for name in recipe.domains}
    found = []
    for name, (data, apart) in loaded.items():
        for note in data.notes:
            progress.say(f"{name}: {note}")
        documents = data.reported.open(choice)
        values: dict[str, list[float]] = {}
        rows = rows_of(model, trimmed)
        with progress.stage(name, len(rows)) as advance:
            for row, context in rows.items():
                with context:
                    values[row] = score_documents(scorer, data.graders, documents)
                advance(1)
        found.append(
            {
                "name": name,
                "notes": list(data.notes),
                "set_aside": apart,
                "rows": {r: _summary(v, values["full"], documents) for r, v in values.items()},
                "documents": [
                    {"id": f"{d.task}/{d.id}", "key": d.key, **{r: v[i] for r, v in values.items()}}
                    for i, d in enumerate(documents)
                ],
            }
        )
    result = {
        "format": 1,
        "kind": "evaluation",
        "recipe": recipe.model_dump(mode="json"),
        "seen": None if record is None else record.describe(),
        "domains": found,
        "environment": environment(),
    }
    if recipe.output:
        write_atomic(Path(recipe.output), (json.dumps(result, indent=1) + "\n").encode())
    return result


def score_documents(scorer: Scorer, graders: dict[str, Grader], documents: Sequence[Document]) -> list[float]:
    """One figure per document, higher is better: right or wrong, or log-likelihood per token for plain text.

    Raises:
        RecipeError: A task whose answers are generated.
    """
    if any(d.kind not in ("choice", "target", "text") for d in documents):
        kinds = sorted({d.kind for d in documents} - {"choice", "target", "text"})
        raise RecipeError(
            f"A trimmed mixture is scored by likelihood; tasks of kind {', '.join(kinds)} are not supported."
        )
    pairs = [(i, pair) for i, d in enumerate(documents) for pair in scorer.document_pairs(d)]
    scored = scorer.score([pair for _, pair in pairs], [documents[i].task for i, _ in pairs])
    answers: dict[int, list[Any]] = {}
    for (i, _), answer in zip(pairs, scored, strict=True):
        answers.setdefault(i, []).append(answer)
    values = []
    for i, document in enumerate(documents):
        if document.kind == "text":
            values.append(answers[i][0].loglikelihood / answers[i][0].tokens)
            continue
        grader = graders[document.task]
        graded = grader.grade(document, [(a.loglikelihood, a.is_greedy) for a in answers[i]])
        values.append(float(graded[grader.metric]))
    return values


def _summary(values: list[float], full: list[float], documents: Sequence[Document]) -> dict[str, Any]:
    """Score and paired difference, in points; nats per token for text."""
    scale = 1.0 if documents[0].kind == "text" else 100.0
    gain = cluster_bootstrap([a - b for a, b in zip(values, full, strict=True)], [d.key for d in documents])
    gain = gain.scaled(scale)
    return {
        "score": scale * sum(values) / len(values),
        "unit": "nats per token" if documents[0].kind == "text" else "points",
        "difference": [gain.mean, gain.low, gain.high],
        "documents": len(documents),
    }
