"""The workbench of a build: the base with its tokenizer, scorer, weights and run folder, and the domains' data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from freemoe.core.artifacts import fingerprint
from freemoe.core.errors import DataError
from freemoe.core.runs import Progress, Quiet, RunFolder, digest
from freemoe.domain_experts.purify.batches import AnswerBatch, answer_batches
from freemoe.domain_experts.select.scores import Evaluator, ReportedScores, Score
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.sandbox.runner import require_permission
from freemoe.evals.tasks.documents import Document, ReferenceSplit
from freemoe.evals.tasks.domains import domain_of
from freemoe.evals.tasks.task import DomainData
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from freemoe.models.switching import switched_off
from freemoe.models.weights import Weight, find_weights
from freemoe.recipes import BuildRecipe, EvalRecipe


@dataclass(eq=False)
class Workbench:
    """Everything a step of the build needs.

    The model's weights are the only thing that ever changes, and only inside ``switched_off``.
    """

    recipe: BuildRecipe
    model: Any
    scorer: Scorer
    weights: list[Weight]
    domains: dict[str, DomainData]
    evaluators: dict[str, Evaluator]
    fingerprint: str
    run: RunFolder | None = None
    progress: Progress = field(default_factory=Quiet)

    def rows(self, documents: Sequence[Document]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Prompt and gold answer of every document, as `answer_batches` takes them."""
        found = []
        for document in documents:
            pair = self.scorer.gold_pair(document)
            ids, _ = self.scorer.fit(pair, document.task)
            found.append((ids, pair.continuation))
        return found

    def batches(self, documents: Sequence[Document], labels: Sequence[int] | None = None) -> list[AnswerBatch]:
        """Padded batches of prompts with their gold answers."""
        return answer_batches(
            self.rows(documents), labels or [0] * len(documents), self.recipe.batch_tokens, self.model.device
        )

    def scores(
        self, domain: str, unit: str, positions: dict[str, Tensor], documents: Sequence[Document]
    ) -> list[Score]:
        """Score a domain's reference documents under switched-off positions, as one journalled unit of work."""

        def work() -> list[list[float]]:
            with switched_off(self.weights, positions):
                return [list(s) for s in self.evaluators[domain].score(documents)]

        if self.run is None:
            return [_score(s) for s in work()]
        name = f"score|{domain}|{unit}|{digest([f'{d.task}/{d.id}' for d in documents])}"
        return [_score(s) for s in self.run.journal.unit(name, work)]

    def reported_scores(
        self, domain: str, unit: str, positions: dict[str, Tensor], documents: Sequence[Document]
    ) -> ReportedScores:
        """Score a domain's reported documents; the result's type keeps it out of every choice."""
        return ReportedScores(self.scores(domain, f"reported|{unit}", positions, documents))


def _score(row: list[float]) -> Score:
    value, loglikelihood, tokens = row
    return Score(value, loglikelihood, int(tokens))


def load_domains(recipe: BuildRecipe | EvalRecipe, tokenizer: Any) -> dict[str, DomainData]:
    """Load every domain of a recipe; a domain of text cannot hold questions too.

    Raises:
        DataError: When a domain mixes text with tasks, or its documents are missing.
        SandboxError: When grading would run generated code and that is not allowed.
    """
    domains = {}
    for name in recipe.domains:
        data = domain_of(recipe, name, tokenizer)
        kinds = list(dict.fromkeys([*(d.kind for d in data.reference.documents), *data.reported.kinds()]))
        if "code" in kinds:
            require_permission(recipe.data.allow_code_execution)
        if "text" in kinds and len(kinds) > 1:
            raise DataError(
                f"Domain {name!r} mixes plain text with tasks; their figures differ. Make them two domains."
            )
        domains[name] = data
    return _apart(domains)


def _apart(domains: dict[str, DomainData]) -> dict[str, DomainData]:
    """Drop reference documents that another domain reports on: the router is trained on all domains together."""
    reported = {key for data in domains.values() for key in data.reported.keys()}  # noqa: SIM118
    found = {}
    for name, data in domains.items():
        kept = [i for i, d in enumerate(data.reference.documents) if d.key not in reported]
        dropped = len(data.reference) - len(kept)
        if not kept:
            raise DataError(f"Domain {name!r}: other domains report on all of its {dropped} reference documents.")
        notes = (
            *data.notes,
            *([f"{dropped} reference documents dropped: another domain reports on them"] if dropped else []),
        )
        found[name] = replace(data, reference=data.reference.take(kept), notes=notes)
    return found


def prepare(recipe: BuildRecipe, progress: Progress | None = None) -> Workbench:
    """Load data, then the base, and check everything that can be checked before the expensive part.

    Raises:
        FreeMoEError: Its child that fits: a missing file, an unknown family, an answer longer than the context.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    tokenizer = load_tokenizer(recipe.model, recipe.revision)
    domains = load_domains(recipe, tokenizer)
    model, _ = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    weights = find_weights(model, recipe.bands.sublayers, recipe.bands.layers)
    scorer = Scorer(model, tokenizer, batch_tokens=recipe.batch_tokens, overflow=recipe.data.overflow)
    gold = recipe.search.objective == "loglikelihood"
    evaluators = {name: Evaluator(scorer, data.graders, gold) for name, data in domains.items()}
    bench = Workbench(
        recipe, model, scorer, weights, domains, evaluators, fingerprint(model), progress=progress or Quiet()
    )
    for data in domains.values():
        _check_reference(bench, data)
    for task, count in scorer.truncated.items():
        bench.progress.say(
            f"note: {count} prompts of {task or 'a task'} are longer than the context of {scorer.max_length} tokens and are "
            "cut from the left, as lm-eval does (--overflow error refuses them)"
        )
    scorer.truncated.clear()
    return bench


def _check_reference(bench: Workbench, data: DomainData) -> None:
    """Every reference document has a gold answer that fits; there are enough to prove something."""
    split: ReferenceSplit = data.reference
    bench.rows(split.documents)
    if len(split) < 100:
        bench.progress.say(
            f"warning: domain {data.name!r} has {len(split)} reference documents; below 100 the guard can prove large "
            "gains only"
        )
