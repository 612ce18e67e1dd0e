"""A step of a conversion's training: gates learn by self-distillation, the base stays as it is (ToMoE Sec. 3.4).

A step is a function of the state before it and its number: the data's order, the noise and the budget follow from the
seed and the number alone, so that a run that goes on from a saved state ends like one that was never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freemoe.evals.engine.output_head import (
    DeferredLogits,
    distillation_loss,
    forward_blocks_to_head,
    summed_loss,
)
from freemoe.models.sublayers import DecoderSublayers
from freemoe.text.blocks import PackedBlocks
from freemoe.tomoe.devices import DistributedContext
from freemoe.tomoe.gates.budget import LayerWidths, LogitProfile, choose_widths, make_profile
from freemoe.tomoe.gates.gating import GateSampler, LayerMasks
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.gates.initialise import LayerImportance, initial_logits, initialise_gates
from freemoe.tomoe.gates.losses import balance_loss, mask_union, size_loss, union_loss
from freemoe.tomoe.recipe import ConvertRecipe, TrainSection
from freemoe.tomoe.structures.structure import dense_parameters, linear_parameters
from freemoe.training.descent import check_finite, cosine_decay, optimizer_step
from freemoe.training.mean import ParameterMean
from freemoe.training.states import State, load_optimizer, optimizer_state, pack_state, unpack_state

HISTORY_COLUMNS = ("loss", "distillation", "size", "union", "balance", "active", "target")
"""What every finished step says: the columns of a trainer's history."""


def base_rate(settings: TrainSection) -> float:
    """The learning rate of all but the offsets: in a long training smaller, so that routers go as far in all.

    Experts follow their routers: where these go on moving, the neurons that experts have learned serve other tokens.
    """
    longer = settings.steps / settings.rate_steps if settings.rate_steps else 1.0
    return settings.rate / max(1.0, longer)


class GateTrainer:
    """Trains the gates of one model."""

    def __init__(
        self,
        model: Any,
        sublayers: Sequence[DecoderSublayers],
        recipe: ConvertRecipe,
        train: PackedBlocks,
        devices: DistributedContext | None = None,
    ) -> None:
        self.model = model
        self.sublayers = list(sublayers)
        self.recipe = recipe
        self.train = train
        self.devices = devices or DistributedContext()
        self.gating = GateSampler(sublayers, recipe, self.devices.rank)
        self.hypernetwork = Hypernetwork(sublayers, recipe).to(next(model.parameters()).device)
        named = [(n, p) for n, p in self.hypernetwork.named_parameters() if p.requires_grad]
        groups = [{"params": [p for n, p in named if not n.endswith("offset")], "lr": base_rate(recipe.train)}]
        if recipe.gates.start == "statistics":
            own = [p for n, p in named if n.endswith("offset")]
            groups.append({"params": own, "lr": recipe.train.offset_rate})
        self.optimizer = torch.optim.AdamW(groups, weight_decay=recipe.train.weight_decay)
        self._rates = [g["lr"] for g in groups]
        self.step = 0
        self.history: list[list[float]] = []  # One row per finished step
        self.mean = ParameterMean(dict(named), recipe.train.mean_window)
        self._profiles: list[LogitProfile] = []

    def start_from_statistics(self, worth: Sequence[LayerImportance]) -> None:
        """Begin at the statistics; with an exact budget they also settle the widths, now and for good.

        Training says which weights a token uses, not how many of each layer: logits of a layer drift together, and widths
        that follow them empty the attention within a hundred steps.
        """
        initialise_gates(self.hypernetwork, worth, self.sublayers)
        local = self.recipe.gates.value_masks == "tokens" and self.recipe.gates.local_embedding
        for layer, own in zip(self.sublayers, initial_logits(worth, self.sublayers), strict=True):
            self._profiles.append(
                make_profile(own.qk, layer.rotary.bit_sizes, own.vo_ranked if local else own.vo, own.mlp)
            )

    def to_state(self) -> State:
        """Everything that the next step depends on."""
        history = torch.tensor(self.history, dtype=torch.float64).reshape(len(self.history), len(HISTORY_COLUMNS))
        own = {"step": torch.tensor(self.step), "history": history}
        return {
            **pack_state("own", self.hypernetwork.state_dict()),
            **optimizer_state(self.optimizer),
            **self.mean.to_state(),
            **own,
        }

    def load_state(self, state: State) -> None:
        """Continue from a state of `to_state`."""
        self.hypernetwork.load_state_dict(unpack_state("own", state))
        load_optimizer(self.optimizer, state)
        self.mean.load_state(state)
        self.step = int(state["step"])
        self.history = state["history"].tolist()

    def target_share(self, step: int) -> float:
        """The active share that a step trains for: it falls from one over the ramp, then stays."""
        end = self.recipe.active
        ramp = self.recipe.train.ramp * self.recipe.train.steps
        return end if ramp == 0 or step >= ramp else 1 - (1 - end) * (step + 1) / ramp

    def exact_widths(self, share: float) -> list[LayerWidths] | None:
        """The widths of an exact budget; None where thresholds decide."""
        if self.recipe.gates.budget == "loss":
            return None
        return choose_widths(self._profiles, self.sublayers, share, self.recipe.gates.query_masks)

    def step_batch(self, step: int) -> PackedBlocks:
        """This process's rows of a step: every epoch has a new order, the same for the same seed."""
        count = self.devices.count
        rows = min(len(self.train), max(1, self.recipe.train.batch_tokens // self.train.row_length))
        rows = max(1, rows // count) * count
        picked = []
        for place in range(step * rows + self.devices.rank, (step + 1) * rows, count):
            epoch, index = divmod(place, len(self.train))
            generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + epoch)
            picked.append(int(torch.randperm(len(self.train), generator=generator)[index]))
        return self.train.select_rows(picked)

    def train_until(self, until: int) -> None:
        """Train up to a step.

        Raises:
            NumericError: The loss is not a number; the state is that of the step before.
        """
        while self.step < until:
            self._train_step(self.step)
            if self.mean.window:
                self.mean.update_mean()
            self.step += 1

    @torch.enable_grad()
    def _train_step(self, step: int) -> None:
        settings, losses = self.recipe.train, self.recipe.losses
        batch = self.step_batch(step)
        share = self.target_share(step)
        width = self.exact_widths(share)
        made = self.gating.sample_masks(self.hypernetwork(), width, step)
        with torch.no_grad():
            teacher = self._run_to_head(batch) if settings.loss == "kd" else None
        with self.gating.apply_masks(self.hypernetwork, made, step):
            predicted = self._prediction_loss(batch, teacher)
            # The masks know by now what the tokens did with them.
            parts = {"distillation": predicted, **self._regularisation_terms(made, share)}
            weights = {
                "distillation": losses.distillation,
                "size": losses.size if width is None else 0.0,
                "union": losses.union,
                "balance": losses.balance,
            }
            loss = sum((weight * parts[name] for name, weight in weights.items()), torch.zeros_like(predicted))
            said = torch.stack(
                [loss, *(parts[n] for n in ("distillation", "size", "union", "balance", "active"))]
            ).detach()
            self.devices.all_reduce_mean([said])
            # All processes stop at a loss that one of them cannot go on from.
            numbers = said.tolist()
            check_finite(
                numbers[0],
                step,
                lambda: f" ({', '.join(f'{n} {parts[n].item():.4g}' for n in weights)}; see train.rate)",
            )
            factor = cosine_decay(step, settings.steps, 0.1) if settings.schedule == "cosine" else 1.0
            rates = [rate * factor for rate in self._rates]
            optimizer_step(self.optimizer, [loss], step, rates=rates, change=self._average_gradients)
        self.history.append([*numbers, share])

    def _average_gradients(self) -> None:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.devices.all_reduce_mean([p.grad for p in parameters if p.grad is not None])

    def _run_to_head(self, batch: PackedBlocks) -> DeferredLogits:
        """Every token of a batch, the rows' last ones too."""
        everywhere = torch.arange(batch.ids.numel(), device=self.model.device)
        return forward_blocks_to_head(self.model, batch, everywhere)

    def _prediction_loss(self, batch: PackedBlocks, teacher: DeferredLogits | None) -> Tensor:
        """What is learned from, in nats per token: the teacher's predictions, or the text's next tokens."""
        if teacher is not None:
            return distillation_loss(self._run_to_head(batch), teacher)
        at, wanted = batch.next_tokens(self.model.device)
        return summed_loss(forward_blocks_to_head(self.model, batch, at), wanted) / max(1, len(at))

    def _regularisation_terms(self, made: Sequence[LayerMasks], share: float) -> dict[str, Tensor]:
        losses = self.recipe.losses
        active = made[0].qk.new_zeros(())
        unions, balances = [], []
        for layer, masks in zip(self.sublayers, made, strict=True):
            assert masks.value_counts is not None
            assert masks.chosen is not None
            assert masks.probabilities is not None
            none = active.new_zeros(())
            queries = layer.rotary.expand_bits(masks.qk).sum()
            attention = linear_parameters(layer, masks.value_counts.amax(), queries, none)
            kept = 1.0 if masks.heads is None else masks.heads.mean()
            active = active + kept * attention + linear_parameters(layer, none, none, masks.mlp.sum(dim=1).amax())
            covered = union_loss(mask_union(masks.mlp), losses.size_smoothing)
            if masks.value_union is not None:
                covered = covered + union_loss(masks.value_union, losses.size_smoothing)
            unions.append(covered)
            balances.append(balance_loss(masks.chosen, masks.probabilities, losses.balance_form))
        active = active / dense_parameters(self.sublayers)
        return {
            "active": active,
            "size": size_loss(active, share, losses.size_smoothing),
            "union": torch.stack(unions).mean(),
            "balance": torch.stack(balances).mean(),
        }
