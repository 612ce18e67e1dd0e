"""What an artefact of experts can be evaluated as: the base, each expert, and each document where the router sends it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freemoe.domain_experts.mixture import FreeMoE
from freemoe.evals.engine.answering import AUTO, BASE
from freemoe.evals.engine.evaluator import DocumentScore, Evaluator
from freemoe.evals.evaluation import EvalTarget, Row, make_variant
from freemoe.evals.tasks.documents import Document
from freemoe.models.mixed.rows import rows_by_key
from freemoe.recipes import EvalRecipe


def eval_target(recipe: EvalRecipe) -> EvalTarget:
    """The base and the experts that a recipe names.

    Raises:
        FreeMoEError: Its child that says what is wrong with artefact or base, or which expert there is not.
    """
    moe = FreeMoE.from_pretrained(recipe.base, recipe.artefact, dtype=recipe.dtype, device=recipe.device)
    rows: dict[str, Row] = {}
    for expert in dict.fromkeys([BASE, *recipe.experts]):
        if expert not in (BASE, AUTO):
            moe.require(expert)
        rows[expert] = (
            _routed_variant(moe) if expert == AUTO else make_variant(lambda expert=expert: moe.expert(expert))
        )
    return EvalTarget(moe.model, moe.tokenizer, rows)


def _routed_variant(moe: FreeMoE) -> Row:
    """Every document under the expert that the router picks; switches once per expert."""

    def score_routed(
        evaluator: Evaluator, documents: tuple[Document, ...]
    ) -> tuple[Sequence[DocumentScore], Sequence[str]]:
        ids = [torch.tensor([evaluator.scorer.prompt_ids(d)]) for d in documents]
        names = [moe.route(i)[0][0] for i in ids]
        found: dict[int, DocumentScore] = {}
        for name, mine in rows_by_key(names).items():
            with moe.expert(name):
                found.update(zip(mine, evaluator.score([documents[i] for i in mine]), strict=True))
        return [found[i] for i in range(len(documents))], names

    return score_routed
