"""What every step of a build needs: the base with its tokenizer, scorer, weights and run folder, and the domains' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from freemoe.core.environment import require_cores, use_threads
from freemoe.core.files import json_digest
from freemoe.core.run.folder import RunFolder
from freemoe.core.run.progress import Progress, QuietProgress
from freemoe.domain_experts.purify.batches import AnswerBatch, Row, answer_batches, gold_rows
from freemoe.domain_experts.rank.importance import METRICS
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.domain_experts.select.scores import ReportedScores
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.engine.sampling import sampling_of
from freemoe.evals.engine.scorer import Scorer
from freemoe.evals.tasks.documents import Document
from freemoe.evals.tasks.domains import load_domains
from freemoe.evals.tasks.task import DomainData
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.identity import identify_base
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix, find_weights, require_in_memory

MakeMask = Callable[[], Mask]
"""Makes what is off when it is needed, so that one mask at a time is alive. ``Mask`` itself: nothing is off."""


@dataclass(eq=False)
class BuildContext:
    """Everything a step of the build needs.

    The model's weights are the only thing that ever changes, and only inside ``switched_off``.
    """

    recipe: BuildRecipe
    model: Any
    scorer: Scorer
    weights: list[WeightMatrix]
    domains: dict[str, DomainData]
    evaluators: dict[str, Evaluator]
    fingerprint: str
    identity: dict[str, Any]
    run: RunFolder | None = None
    progress: Progress = field(default_factory=QuietProgress)

    def answer_rows(self, documents: Sequence[Document]) -> list[Row]:
        """Prompt and gold answer of every document."""
        return gold_rows(self.scorer, documents)

    def make_batches(self, documents: Sequence[Document], labels: Sequence[int] | None = None) -> list[AnswerBatch]:
        """Padded batches of prompts with their gold answers."""
        return answer_batches(
            self.answer_rows(documents), labels or [0] * len(documents), self.recipe.batch_tokens, self.model.device
        )

    def score_documents(
        self, domain: str, unit: str, off: MakeMask, documents: Sequence[Document]
    ) -> list[DocumentScore]:
        """Score a domain's reference documents with weights off, as one journalled unit of work.

        ``unit`` names what is off; ``off`` is not called where the journal has the scores.
        """

        def score_with_mask() -> list[list[Any]]:
            with switched_off(self.weights, off()):
                return [_as_row(s) for s in self.evaluators[domain].score(documents)]

        if self.run is None:
            return [_score_from_row(s) for s in score_with_mask()]
        name = f"score|{domain}|{unit}|{json_digest([f'{d.task}/{d.id}' for d in documents])}"
        return [_score_from_row(s) for s in self.run.journal.run_unit(name, score_with_mask)]

    def reported_scores(self, domain: str, unit: str, off: MakeMask, documents: Sequence[Document]) -> ReportedScores:
        """Score a domain's reported documents; the result's type keeps it out of every choice."""
        return ReportedScores(self.score_documents(domain, f"reported|{unit}", off, documents))


def _as_row(score: DocumentScore) -> list[Any]:
    """A score as the journal has it."""
    return [*score[:3], *([list(score.also)] if score.also else [])]


def _score_from_row(row: list[Any]) -> DocumentScore:
    value, loglikelihood, tokens, *also = row
    return DocumentScore(
        value, loglikelihood, int(tokens), tuple((name, figure) for name, figure in (also[0] if also else ()))
    )


def prepare_context(recipe: BuildRecipe, progress: Progress | None = None) -> BuildContext:
    """Load data, then the base, and check everything that can be checked before the expensive part.

    Raises:
        FreeMoEError: Its child that fits: a missing file, an unknown family, an answer longer than the context.
    """
    use_threads(recipe.threads)
    require_cores("workers", recipe.workers)
    tokenizer = load_tokenizer(recipe.model, recipe.revision)
    domains = load_domains(recipe, tokenizer)
    model, _ = load_base(recipe.model, recipe.revision, recipe.dtype, recipe.device)
    weights = find_weights(model, recipe.bands.sublayers, recipe.bands.layers)
    if recipe.units.unit:
        require_in_memory(weights, f"--unit {recipe.units.unit}", together=True)
    for metric in recipe.search.metrics:
        if METRICS.get(metric).needs == "gradients":
            require_in_memory(weights, f"--metric {metric}")
    scorer = Scorer(model, tokenizer, batch_tokens=recipe.batch_tokens, overflow=recipe.data.overflow)
    gold = recipe.search.objective == "loglikelihood"
    sampling = sampling_of(recipe)
    evaluators = {name: Evaluator(scorer, data.graders, gold, sampling) for name, data in domains.items()}
    context = BuildContext(
        recipe,
        model,
        scorer,
        weights,
        domains,
        evaluators,
        fingerprint_model(model),
        identify_base(model, tokenizer),
        progress=progress or QuietProgress(),
    )
    for data in domains.values():
        context.answer_rows(data.reference.documents)  # every one has a gold answer that fits
    for task, count in scorer.truncated.items():
        context.progress.say(
            f"note: {count} prompts of {task or 'a task'} are longer than the context of {scorer.max_length} tokens and are "
            "cut from the left, as lm-eval does (--overflow error refuses them)"
        )
    scorer.truncated.clear()
    return context
