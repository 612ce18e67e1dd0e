"""The switches of one weight, and how fast they may turn: what `learned` trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from freemoe.domain_experts.purify.curvature import Curvature
from freemoe.domain_experts.purify.running_sums import RunningSum, running_sum
from freemoe.kernels.waits import in_groups
from freemoe.models.mask import TensorMask
from freemoe.models.weights import WeightMatrix
from freemoe.training.states import State, unpack_state

# A first step at this pace switches a half percent of the weights off, by noise alone: harmless, as they are near zero.
_PACE = 0.2
# While steps end downhill each is larger than the last; a look that finds the loss risen halves them.
_GROW, _HALVE = 1.2, 0.5
# Memory of the running mean of gradients: a step follows about ten batches, not one.
MOMENTUM = 0.9


@dataclass(eq=False)
class WeightSwitches:
    """The switches of one weight, all flat in (experts, rows, columns) order."""

    weight: WeightMatrix  # The weight they belong to
    mean: RunningSum  # The running mean of gradients
    evidence: RunningSum  # The sum of its paced states
    best: RunningSum  # The same at the best look so far
    off: TensorMask  # Which are off by now
    moved: TensorMask  # Which of them the last step switched
    change: Tensor  # ``(moved,)`` fp32: what that added to the weight: -w where it went off, +w where it came back
    slope: Tensor  # () fp64: dL of the last change, by the gradient that came after it

    @staticmethod
    def all_on(weight: WeightMatrix, seed: int = 0) -> WeightSwitches:
        """All on, and knowing nothing yet; ``seed`` as for `running_sum`."""
        device = weight.device
        mean, evidence = (running_sum(weight.shape, seed, device) for _ in range(2))
        none = TensorMask.empty_mask(weight.size, device)
        slope = torch.zeros((), dtype=torch.float64, device=device)
        return WeightSwitches(weight, mean, evidence, evidence.copy(), none, none, torch.empty(0, device=device), slope)

    def decay_gradients(self) -> None:
        """Before a pass: what older gradients said counts a little less."""
        self.mean.scale_by(MOMENTUM)
        self.slope = torch.zeros_like(self.slope)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add (a part of) a pass's gradient ``(E, R, C)`` to the mean; note what it says of the last change."""
        self.slope += (self.moved.gather_values(gradient).float() * self.change).sum(dtype=torch.float64)
        self.mean.add_matrix(gradient, 1 - MOMENTUM)

    def update_evidence(self, rate: float) -> None:
        """After a pass: let the mean count as evidence."""
        self.evidence.add_sum(self.mean, rate)

    def save_best(self) -> None:
        """This look is the best so far."""
        self.best = self.evidence.copy()

    def restore_best(self) -> None:
        """Take the evidence of the best look again, and forget what came after it."""
        self.evidence = self.best.copy()
        self.mean.scale_by(0.0)

    def switch_scores(self, curvature: Curvature) -> Tensor:
        """W * evidence - w^2 h of every switch: ``(n,)`` fp32."""
        own = self.weight.canonical_view().float()
        bent = own.square().mul_(curvature.weight_curvature(self.weight))
        return (own * self.evidence.to_dense()).sub_(bent).reshape(-1)

    def to_state(self) -> State:
        """As a part of a state; which are off stands there for all weights together."""
        sums = {"mean": self.mean, "evidence": self.evidence, "best": self.best}
        found = {f"{part}|{key}": t for part, own in sums.items() for key, t in own.to_state().items()}
        return {
            f"{self.weight.name}|{key}": t
            for key, t in {**found, "moved": self.moved.encode(), "change": self.change}.items()
        }

    def load_state(self, state: State, off: TensorMask) -> None:
        """Go on from a state, with what was off in it."""
        own, device = unpack_state(self.weight.name, state), self.weight.device
        for part, running in (("mean", self.mean), ("evidence", self.evidence), ("best", self.best)):
            running.load_state({key: t.to(device) for key, t in unpack_state(part, own).items()})
        self.moved = TensorMask.decode(own["moved"], self.weight.size).to(device)
        self.change, self.off = own["change"].to(device), off


def switch_all(switches: Sequence[WeightSwitches], masks: Sequence[TensorMask]) -> None:
    """Switch to the weights of each mask being off, the others on."""
    changes = in_groups(one.off.to_bools() ^ off.to_bools() for one, off in zip(switches, masks, strict=True))
    moved = [found for group in changes for found in TensorMask.of_several(group)]
    for one, off, gone_or_back in zip(switches, masks, moved, strict=True):
        own = gone_or_back.gather_values(one.weight.canonical_view()).float()
        one.change = torch.where(gone_or_back.gather_values(off.to_bools()), -own, own)
        one.moved, one.off = gone_or_back, off


@dataclass
class TrustRegion:
    """How much a step's gradients add to the evidence: the trust region of learned switches."""

    value: float = _PACE  # The pace, before the schedule takes its share
    growing: bool = True  # Whether steps still become larger
    trend: float | None = None  # Running mean of the slopes at the ends of steps

    def update_slope(self, slope: float) -> None:
        """A fresh gradient said how the last step ended: below 0 it still went downhill."""
        self.trend = slope if self.trend is None else 0.5 * (self.trend + slope)
        self.growing = self.growing and self.trend < 0
        if self.growing:
            self.value *= _GROW

    def freeze_growth(self) -> None:
        """All documents have been seen, so that no gradient is fresh any more."""
        self.growing = False

    def shrink_step(self) -> None:
        """The stopping loss rose since the last look."""
        self.growing = False
        self.value *= _HALVE
