"""Signed purification: switch off the weights whose removal lowers the loss, greedily (`docs/methods.md`).

To first order, switching w off changes the loss L by -w * dL/dw; beyond, by w^2 h / 2 (`curvature`); and a gradient of n
tokens is uncertain by sqrt(h / n). The weights that gain most when all three are counted are the noise weights. Each round
takes the gradient at the model as it is by then, switches off the top of the ranking, and looks at documents that gave no
gradient. A round that makes these worse by more than it promised to make them better is taken back, and the next one is
half as large; when they no longer improve, the best round is kept. No weight is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import DataError, NumericError
from freemoe.core.run.unit_state import NO_CHECKPOINT, UnitState
from freemoe.domain_experts.purify.batches import AnswerBatch, mean_loss
from freemoe.domain_experts.purify.curvature import Curvature, forecast_loss, measure_curvature
from freemoe.domain_experts.purify.gradients import noise_weights
from freemoe.domain_experts.recipe import SaliencySection
from freemoe.domain_experts.result import ForecastFacts
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix
from freemoe.training.states import State, pack_state, unpack_state

# A cut is a tiny share of the weights, so that a tensor can remember many times its fair part of it.
_SPREAD = 256

OnRound = Callable[[int, float, float], None]
"""Called with the round, the stopping loss and the share that is off, e.g. to draw progress."""


@dataclass(frozen=True)
class PurifyTask:
    """One subdomain to purify for."""

    model: Any  # A causal LM; bit-equal afterwards
    weights: Sequence[WeightMatrix]  # Weights that may be switched off
    gradient: Sequence[AnswerBatch]  # Documents that say which
    stop: Sequence[AnswerBatch]  # Other documents, which say when to stop
    text: bool = False  # Whether the documents are plain text rather than prompts with answers
    seed: int = 0  # Of everything random
    on_round: OnRound = lambda *_: None  # Told after every round
    checkpoint: UnitState = NO_CHECKPOINT  # Where the purification keeps how far it is

    def require_documents(self) -> None:
        """Raise `DataError` when one of the two lists is empty."""
        if not self.gradient or not self.stop:
            raise DataError(
                f"Signed purification needs documents for gradients and others for stopping; got {len(self.gradient)} and "
                f"{len(self.stop)} batches. Raise --limit or use fewer subdomains."
            )


@dataclass(frozen=True)
class PurifyResult:
    """What a purification found for one subdomain."""

    mask: Mask  # Switched-off weights
    # Loss on the stopping documents, in nats per answer token: the base's, then one per round
    losses: tuple[float, ...]
    best: int  # Round that is kept; 0 is the base, and then nothing is switched off
    # What the gradient of the base makes of this mask on stopping documents; None where none is off
    forecast: ForecastFacts | None = None


def to_state(result: PurifyResult) -> State:
    """What a purification found as tensors by name, for the run folder."""
    forecast = list(result.forecast.model_dump().values()) if result.forecast else []
    return {
        **result.mask.encode(),
        "|curve": torch.tensor(result.losses, dtype=torch.float64),
        "|best": torch.tensor(result.best),
        "|forecast": torch.tensor(forecast, dtype=torch.float64),
    }


def from_state(state: State, weights: Sequence[WeightMatrix]) -> PurifyResult:
    """Inverse of `to_state`: the result, with its mask decoded for ``weights``."""
    codes = {name: code for name, code in state.items() if not name.startswith("|")}
    seen = dict(zip(ForecastFacts.model_fields, state["|forecast"].tolist(), strict=False))
    mask = Mask.decode(codes, weights)
    losses = tuple(state["|curve"].tolist())
    return PurifyResult(mask, losses, int(state["|best"]), ForecastFacts(**seen) if seen else None)


def step_share(section: SaliencySection, text: bool) -> float:
    """Share of the weights that a greedy round switches off."""
    return section.text_step if text else section.step


def split_batches(batches: Sequence[AnswerBatch], tokens: int) -> list[list[AnswerBatch]]:
    """Deal batches into parts of about ``tokens`` answer tokens; one part where there are fewer than two times that."""
    count = max(1, min(len(batches), sum(b.answer_tokens for b in batches) // tokens))
    return [list(batches[i::count]) for i in range(count)]


def removal_penalty(curvature: Curvature, tokens: int) -> Callable[[WeightMatrix], Tensor]:
    """What must be taken off w * dL/dw, by weight: w^2 h / 2 beyond first order, and |w| sqrt(h / n) of uncertainty.

    ``tokens`` are the n answer tokens that the gradient is a mean over.
    """

    def weight_penalty(weight: WeightMatrix) -> Tensor:
        return curvature.second_order_cost(weight).add_(curvature.fisher_scale(weight), alpha=tokens**-0.5)

    return weight_penalty


def greedy_purify(task: PurifyTask, section: SaliencySection) -> PurifyResult:
    """Find the weights to switch off for one subdomain; the model is bit-equal afterwards.

    A round takes its gradient documents in parts of about ``section.part_tokens`` answer tokens. Each part ranks anew and
    switches off its share of the step: many small cuts by different documents follow the loss better than one large cut by
    all of them, at the same cost.

    Raises:
        DataError: When there are no documents for gradients, or none for stopping.
        NumericError: When a loss or gradient is NaN or infinite; says in which round.
    """
    task.require_documents()
    model, weights, stop, checkpoint = task.model, task.weights, task.stop, task.checkpoint
    checkpointing = section.checkpointing
    total = sum(w.size for w in weights)
    most = int(section.budget * total)
    parts = split_batches(task.gradient, section.part_tokens)
    search = _GreedySearch(weights, per_part=max(1, round(step_share(section, task.text) * total / len(parts))))
    try:
        search.before = mean_loss(model, stop, checkpoint.part_state("look 0"))
        search.losses = [search.before]
        curvature = measure_curvature(
            model, weights, parts[0], checkpointing=checkpointing, checkpoint=checkpoint.part_state("curvature")
        )
        search.load_state(checkpoint.read_state())
        while search.off < most:
            search.open_round()
            for part in parts[search.parts :]:
                room = min(search.per_part, most - search.off - search.rounds[-1].off)
                toll = removal_penalty(curvature, sum(b.answer_tokens for b in part))
                found = noise_weights(
                    model, weights, part, room, spread=_SPREAD, toll=toll, checkpointing=checkpointing
                )
                search.apply_cut(*found)
                checkpoint.write_state(search.to_state)
            if not search.rounds[-1].off:
                break
            loss = mean_loss(model, stop, checkpoint.part_state(f"look {search.number}"))
            task.on_round(search.number, loss, (search.off + search.rounds[-1].off) / total)
            if search.close_round(loss, section.patience):
                break
            checkpoint.write_state(search.to_state)
    except NumericError as error:
        raise NumericError(f"Greedy purification, round {search.number}, {search.off} weights off: {error}") from None
    finally:
        search.undo_cuts()
    expected = forecast_loss(model, weights, search.best_mask, curvature, stop, checkpointing=checkpointing)
    return PurifyResult(search.best_mask, tuple(search.losses), search.best, expected)


@dataclass(eq=False)
class GreedyRound:
    """What one round switched off, and what it promised."""

    cuts: list[Mask] = field(default_factory=list)  # What is off, one for every part of the documents
    undo: ExitStack = field(default_factory=ExitStack)  # The way back: closed, all weights of the round are restored
    promise: float = 0.0  # Gain in nats per token that the gradients named
    off: int = 0  # Weights that it switched off

    def apply_cut(self, weights: Sequence[WeightMatrix], mask: Mask, promise: float) -> None:
        """Switch weights off, and remember how to undo it and how much loss it promised to save."""
        self.undo.enter_context(switched_off(weights, mask))
        self.cuts.append(mask)
        self.promise += promise
        self.off += mask.count


def union_mask(rounds: Sequence[GreedyRound]) -> Mask:
    """What several rounds have off together."""
    return Mask().union(*(cut for r in rounds for cut in r.cuts))


def decode_mask(codes: State, weights: Sequence[WeightMatrix]) -> Mask:
    """A mask from a state, each weight's where the weight is."""
    devices = {w.name: w.device for w in weights}
    return Mask({name: own.to(devices[name]) for name, own in Mask.decode(codes, weights).items()})


@dataclass(eq=False)
class _GreedySearch:
    """A greedy search on its way: what is off, and how it came to it."""

    weights: Sequence[WeightMatrix]  # That may be off
    per_part: int  # Weights that a part of the documents switches off
    rounds: list[GreedyRound] = field(default_factory=list)  # Every round that was not taken back
    losses: list[float] = field(default_factory=list)  # On the stopping documents: the base's, then one per round
    before: float = 0.0  # The last one that was not taken back
    best: int = 0  # Number of the best round
    best_mask: Mask = field(default_factory=Mask)  # What it had off
    number: int = 0  # Of the round that is open, or was last
    off: int = 0  # Weights off behind all rounds that are closed
    parts: int = 0  # Of the open round that have been cut; 0 where none is open

    def open_round(self) -> None:
        """Begin a round, unless one that an earlier process began is open."""
        if not self.parts:
            self.number += 1
            self.rounds.append(GreedyRound())

    def apply_cut(self, mask: Mask, promise: float) -> None:
        """Switch off what a part of the documents says."""
        self.rounds[-1].apply_cut(self.weights, mask, promise)
        self.parts += 1

    def close_round(self, loss: float, patience: int) -> bool:
        """Judge a round by its stopping loss; says whether enough rounds were no better."""
        self.parts = 0
        self.losses.append(loss)
        if loss < self.losses[self.best]:
            self.best, self.best_mask = self.number, union_mask(self.rounds)
        if self.number - self.best >= patience:
            return True
        if loss - self.before > self.rounds[-1].promise:
            self.rounds.pop().undo.close()
            self.per_part = max(1, self.per_part // 2)
        else:
            self.before = loss
        self.off = sum(r.off for r in self.rounds)
        return False

    def undo_cuts(self) -> None:
        """Switch on again whatever is off."""
        for done in reversed(self.rounds):
            done.undo.close()

    def to_state(self) -> State:
        """Everything that the next part depends on: the rounds that stay are one, as none of them is taken back any more."""
        closed = self.rounds[:-1] if self.parts else self.rounds
        promise = self.rounds[-1].promise if self.parts else 0.0
        numbers = [self.per_part, self.best, self.number, self.parts]
        return {
            **pack_state("closed", union_mask(closed).encode()),
            **pack_state("open", union_mask(self.rounds[len(closed) :]).encode()),
            **pack_state("best", self.best_mask.encode()),
            "numbers": torch.tensor(numbers),
            "losses": torch.tensor([self.before, promise, *self.losses], dtype=torch.float64),
        }

    def load_state(self, state: State | None) -> None:
        """Go on from a state; None: begin."""
        if state is None:
            return
        closed, opened, self.best_mask = (
            decode_mask(unpack_state(part, state), self.weights) for part in ("closed", "open", "best")
        )
        self.per_part, self.best, self.number, self.parts = state["numbers"].tolist()
        self.before, promise, *self.losses = state["losses"].tolist()
        for mask, own in ((closed, 0.0), *([(opened, promise)] if self.parts else [])):
            self.rounds.append(GreedyRound())
            self.rounds[-1].apply_cut(self.weights, mask, own)
        self.off = closed.count
