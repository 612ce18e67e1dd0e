"""Likelihoods and greedy generations of a causal LM: the answers of lm-eval's HF backend, with less work.

The same answers as `lm_eval.models.huggingface.HFLM`. Texts are tokenised once per scorer, few-shot prefixes run once
per call, the answers of a question share its context, batches hold a number of tokens rather than of rows, and the
head runs on the answers' positions only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from freemoe.core.errors import NumericError
from freemoe.evals.engine.generation import BatchDecoder
from freemoe.evals.engine.likelihoods import GroupTensors, score_requests, tensors_of
from freemoe.evals.engine.row_plan import Ids, TokenPair, plan
from freemoe.evals.engine.sampling import GREEDY, SamplingConfig
from freemoe.evals.engine.sharing import FORWARD_COST, masks_are_dense, sharing_problem, sliding_window
from freemoe.evals.engine.tokens import PromptTokenizer, context_length

log = logging.getLogger(__name__)

# Tokens in plans that are kept: a search scores the same documents hundreds of times.
_KEPT_TOKENS = 1 << 22


class ContinuationScore(NamedTuple):
    """Log-likelihood of a continuation in nats, whether greedy decoding gives it, and its length in tokens."""

    loglikelihood: float
    is_greedy: bool
    tokens: int


class Scorer(PromptTokenizer):
    """Scores documents on one model; keeps tokenised requests and how to run them, never what the weights made of them.

    ``model``: A causal LM of transformers, in eval mode; its weights may change between calls. ``max_length``: longest
    input in tokens; the model's context by default. ``batch_tokens``: padded tokens of a batch: rows times shared prefix
    and longest row. ``overflow``: ``truncate`` cuts contexts from the left, as lm-eval does, and counts them in
    ``truncated``; ``error`` refuses them. ``share_prefixes``: run shared prefixes and contexts once; without it every row
    is run whole, which gives the same answers.

    Attributes:
        fallback: Why rows are run whole although sharing was asked for; None where they are not.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        overflow: str = "truncate",
        share_prefixes: bool = True,
    ) -> None:
        super().__init__(tokenizer, max_length or context_length(model, tokenizer), overflow)
        self.model = model
        self.batch_tokens = batch_tokens
        self.share_prefixes = share_prefixes
        self.fallback: str | None = None
        self._checked = False
        self._plans: OrderedDict[tuple, tuple[list[TokenPair], list[GroupTensors]]] = OrderedDict()

    def loglikelihoods(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Log-likelihood of every (context, continuation), and whether greedy decoding would give it."""
        scored = self.score([self.encode_pair(context, continuation) for context, continuation in pairs])
        return [(s.loglikelihood, s.is_greedy) for s in scored]

    @torch.no_grad()
    def score(self, pairs: Sequence[TokenPair], tasks: Sequence[str] | None = None) -> list[ContinuationScore]:
        """Score token pairs; the result is in the order of ``pairs``.

        Raises:
            DataError: As `fit`.
            NumericError: When a log-likelihood is NaN: the weights or the model's dtype are broken.
        """
        values, greedy = score_requests(self.model, self._plan_pairs(pairs, tasks), len(pairs))
        if any(value != value for value in values):
            raise NumericError(
                "A log-likelihood is NaN. The base model or its dtype is broken for this text; try --dtype float32, and "
                "check the checkpoint."
            )
        return [ContinuationScore(v, g, len(p.continuation)) for v, g, p in zip(values, greedy, pairs, strict=True)]

    @torch.no_grad()
    def generate(self, prompts: Sequence[str], until: Sequence[str], max_new_tokens: int) -> list[str]:
        """Greedy continuations, cut at the first stop string; the same text as lm-eval's ``generate_until``.

        Raises:
            RecipeError: When ``max_new_tokens`` leaves no room for a prompt.
            DataError: When ``overflow="error"`` and a prompt is too long.
        """
        return [texts[0] for texts in self.samples(prompts, until, max_new_tokens, GREEDY)]

    @torch.no_grad()
    def samples(
        self, prompts: Sequence[str], until: Sequence[str], max_new_tokens: int, sampling: SamplingConfig
    ) -> list[list[str]]:
        """For each prompt its continuations; drawn ones are the same however prompts are batched.

        Errors as of `generate`.
        """
        rows = [self.encode_prompt(text, max_new_tokens) for text in prompts]
        share = any(rows) and self.can_share(max(rows, key=len))
        return BatchDecoder(self, share, sampling).generate_texts(rows, until, max_new_tokens)

    # ------------------------------------------------------------------- plans

    @property
    def forward_cost(self) -> int:
        """Tokens that one more forward pass is worth."""
        return FORWARD_COST["cpu" if self.model.device.type == "cpu" else "accelerator"]

    def _plan_pairs(self, pairs: Sequence[TokenPair], tasks: Sequence[str] | None) -> list[GroupTensors]:
        """What to run for these very pairs; it depends on tokens only and is kept while it fits."""
        # Pairs are kept beside their plan, so that no other object can get their identities.
        key = (str(self.model.device), *map(id, pairs))
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key][1]
        requests = [self.fit_to_context(pair, tasks[i] if tasks else "") for i, pair in enumerate(pairs)]
        groups = plan(
            requests,
            self.batch_tokens,
            forward_cost=self.forward_cost,
            share=self.share_prefixes,
            branch=self.share_prefixes and masks_are_dense(self.model),
            window=sliding_window(self.model),
        )
        if any(group.has_sharing for group in groups) and not self.can_share(requests[0].inputs):
            groups = plan(requests, self.batch_tokens, share=False, branch=False)
        work = tensors_of(groups, self.model.device)
        self._plans[key] = list(pairs), work
        kept = sum(batch.ids.numel() for _, works in self._plans.values() for w in works for batch in w.batches)
        while kept > _KEPT_TOKENS:
            _, (_, oldest) = self._plans.popitem(last=False)
            kept -= sum(batch.ids.numel() for w in oldest for batch in w.batches)
        return work

    def can_share(self, ids: Ids) -> bool:
        """Whether prefixes may be shared: asked for, and found to change nothing on this model, once per scorer."""
        if not self.share_prefixes:
            return False
        if not self._checked:
            self.fallback = sharing_problem(self.model, ids, self.max_length)
            self._checked = True
            if self.fallback:
                log.warning("Prefixes are not shared: %s", self.fallback)
        return self.fallback is None
