"""What an artefact of experts can be evaluated as: the base, each expert, and each document where the router sends it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freemoe.domain_experts.mixture import FreeMoE
from freemoe.evals.engine.answering import AUTO, BASE
from freemoe.evals.engine.evaluator import Evaluator, Score
from freemoe.evals.evaluation import Row, Subject, under
from freemoe.evals.tasks.documents import Document
from freemoe.recipes import EvalRecipe


def experts_of(recipe: EvalRecipe) -> Subject:
    """The base and the experts that a recipe names.

    Raises:
        FreeMoEError: Its child that says what is wrong with artefact or base, or which expert there is not.
    """
    moe = FreeMoE.from_pretrained(recipe.base, recipe.artefact, dtype=recipe.dtype, device=recipe.device)
    rows: dict[str, Row] = {}
    for expert in dict.fromkeys([BASE, *recipe.experts]):
        if expert not in (BASE, AUTO):
            moe.require(expert)
        rows[expert] = _routed(moe) if expert == AUTO else under(lambda expert=expert: moe.expert(expert))
    return Subject(moe.model, moe.tokenizer, rows)


def _routed(moe: FreeMoE) -> Row:
    """Every document under the expert that the router picks; switches once per expert."""

    def row(evaluator: Evaluator, documents: tuple[Document, ...]) -> tuple[Sequence[Score], Sequence[str]]:
        ids = [torch.tensor([evaluator.scorer.prompt_ids(d)]) for d in documents]
        names = [moe.route(i)[0][0] for i in ids]
        found: dict[int, Score] = {}
        for name in dict.fromkeys(names):
            mine = [i for i, n in enumerate(names) if n == name]
            with moe.expert(name):
                found.update(zip(mine, evaluator.score([documents[i] for i in mine]), strict=True))
        return [found[i] for i in range(len(documents))], names

    return row
