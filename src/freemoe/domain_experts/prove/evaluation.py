"""`evaluate`: score an artefact's experts, or a plain model, on any tasks' reported split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from freemoe.core.artifacts import MANIFEST
from freemoe.core.environment import environment
from freemoe.core.errors import ArtifactError
from freemoe.core.runs import Progress, Quiet, digest, write_atomic
from freemoe.domain_experts.mixture import AUTO, BASE, FreeMoE
from freemoe.domain_experts.prove.evidence import summary
from freemoe.domain_experts.seen_requests import is_model
from freemoe.domain_experts.select.scores import Evaluator, Score
from freemoe.domain_experts.workbench import load_domains
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.held_out import read_record, seeded, set_aside
from freemoe.evals.tasks.documents import Document, FrozenChoice
from freemoe.models.checkpoints.gguf_header import is_gguf
from freemoe.models.checkpoints.loading import BUNDLED, load_base
from freemoe.recipes import EvalRecipe


def evaluate(recipe: EvalRecipe, *, progress: Progress | None = None, overwrite: bool = False) -> dict[str, Any]:
    """Score documents under each named expert; paired differences are to the base.

    Args:
        recipe: What to score; ``experts`` may hold ``base``, ``auto`` and names.
        progress: Where to report.
        overwrite: Replace an output file that is there.

    Returns:
        The result: per domain a row per expert and every per-document score; documents that the artefact's making saw are
        set aside and counted.

    Raises:
        FreeMoEError: Its child that says what is wrong.
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
    model, tokenizer, moe, experts = _load(recipe)
    loaded = {name: set_aside(data, record) for name, data in load_domains(recipe, tokenizer).items()}
    scorer = Scorer(model, tokenizer, batch_tokens=recipe.batch_tokens, overflow=recipe.data.overflow)
    # Nothing is chosen here, so the reported split may be read at once.
    choice = FrozenChoice(digest(recipe.model_dump(mode="json")))
    found = []
    for name, (data, apart) in loaded.items():
        for note in data.notes:
            progress.say(f"{name}: {note}")
        documents = data.reported.open(choice)
        evaluator = Evaluator(scorer, data.graders)
        rows: dict[str, list[Score]] = {}
        routed: list[str] = []
        with progress.stage(name, len(experts)) as advance:
            for expert in experts:
                if moe is None:
                    rows[expert] = evaluator.score(documents)
                elif expert == AUTO:
                    ids = [torch.tensor([scorer.prompt_ids(d)]) for d in documents]
                    routed = [moe.route(i)[0][0] for i in ids]
                    rows[expert] = _grouped(moe, evaluator, documents, routed)
                else:
                    with moe.expert(expert):
                        rows[expert] = evaluator.score(documents)
                advance(1)
        base = rows[experts[0]]
        found.append(
            {
                "name": name,
                "notes": list(data.notes),
                "set_aside": apart,
                "unit": "perplexity" if documents[0].kind == "text" else "points",
                "rows": {e: summary(s, base, documents, recipe.seed or 0) for e, s in rows.items()},
                "documents": [
                    {
                        "id": f"{d.task}/{d.id}",
                        "key": d.key,
                        **({"routed_to": routed[i]} if routed else {}),
                        **{e: s[i].value for e, s in rows.items()},
                    }
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


def _load(recipe: EvalRecipe) -> tuple[Any, Any, FreeMoE | None, list[str]]:
    """Model, tokenizer, mixture and the experts to score, the base first; a plain model has no mixture, and itself alone."""
    if (Path(recipe.artefact) / MANIFEST).is_file() and not is_model(recipe.artefact):
        moe = FreeMoE.from_pretrained(recipe.base, recipe.artefact, dtype=recipe.dtype, device=recipe.device)
        experts = list(dict.fromkeys([BASE, *recipe.experts]))
        for expert in experts:
            if expert not in (BASE, AUTO):
                moe.expert_positions(expert)
        return moe.model, moe.tokenizer, moe, experts
    if (
        recipe.artefact != BUNDLED
        and not (Path(recipe.artefact) / "config.json").is_file()
        and Path(recipe.artefact).exists()
        and not is_gguf(recipe.artefact)
    ):
        raise ArtifactError(
            f"{recipe.artefact!r} is neither an artefact ({MANIFEST}) nor a model (a folder with config.json, or a GGUF)."
        )
    model, tokenizer = load_base(recipe.artefact, None, recipe.dtype, recipe.device)
    return model, tokenizer, None, [BASE]


def _grouped(moe: FreeMoE, evaluator: Evaluator, documents: tuple[Document, ...], names: list[str]) -> list[Score]:
    """Score every document under its own expert, switching once per expert."""
    rows: dict[int, Score] = {}
    for name in dict.fromkeys(names):
        mine = [i for i, n in enumerate(names) if n == name]
        with moe.expert(name):
            rows.update(zip(mine, evaluator.score([documents[i] for i in mine]), strict=True))
    return [rows[i] for i in range(len(documents))]
