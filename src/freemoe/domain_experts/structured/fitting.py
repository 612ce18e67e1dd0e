"""Structured purification inside a build: per subdomain the curve, the candidate, single switches inside it, rivals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from freemoe.domain_experts.purify.greedy import PurifyTask
from freemoe.domain_experts.purify.methods import method_of
from freemoe.domain_experts.recipe import SaliencySection, UnitSection
from freemoe.domain_experts.structured.ranking import measure_importance
from freemoe.domain_experts.structured.rivals import random_scores, rival_scores
from freemoe.domain_experts.structured.training import CurvePoint, PruningCurve, train_units
from freemoe.domain_experts.structured.units import ModelUnits, UnitsOff, lowest_units
from freemoe.models.mask import Mask
from freemoe.models.precision import compute_dtype, held_in
from freemoe.models.switching import switched_off
from freemoe.models.weights import WeightMatrix

UNITS = "units"
"""Name of the candidate."""

_CPU_MULTIPLE, _ACCELERATOR_MULTIPLE = 8, 64


def multiple_of(section: UnitSection, device: torch.device) -> int:
    """What the units left in a layer are a multiple of: neurons make matrices, whose sides kernels want round."""
    if section.unit != "neuron":
        return 1
    return section.multiple or (_CPU_MULTIPLE if device.type == "cpu" else _ACCELERATOR_MULTIPLE)


@dataclass(frozen=True, eq=False)
class FoundUnits:
    """What a subdomain's structured purification found."""

    units: ModelUnits  # What there is to switch off
    curve: PruningCurve  # Its training: one point per share asked for
    singles: Mask = field(default_factory=Mask)  # Single weights that are off inside what the candidate's units leave
    single_losses: tuple[float, ...] = ()  # Stopping losses of that second purification
    rivals: tuple[Mapping[str, UnitsOff], ...] = ()  # Per point, units that each rival would switch off, as many

    @property
    def best_index(self) -> int:
        """Number of the point with the lowest stopping loss: the candidate."""
        losses = [p.loss for p in self.curve.points]
        return losses.index(min(losses))

    @property
    def best_point(self) -> CurvePoint:
        """The point of the curve that is the candidate."""
        return self.curve.points[self.best_index]

    @property
    def stopping_losses(self) -> tuple[float, ...]:
        """The stopping loss from the base on, look by look."""
        return (self.curve.base, *(loss for _, _, loss in self.curve.looks), *self.single_losses)

    def mask(self) -> Mask:
        """All weights that the candidate switches off."""
        return self.units.mask(self.best_point.off).union(self.singles)

    def random_units(self, number: int, seed: int) -> UnitsOff:
        """The control: as many units per layer as a point has, drawn at random."""
        counts = [len(self.curve.points[number].off.get(layer.number, ())) for layer in self.units.layers]
        scores = random_scores(self.units, seed)
        return lowest_units(self.units, scores, [sum(counts)] if self.units.kind == "layer" else counts)

    def to_tensors(self) -> dict[str, Tensor]:
        """Flatten, for the run folder."""
        found = {
            "base": torch.tensor(self.curve.base, dtype=torch.float64),
            "points": torch.tensor([[p.share, p.requested, p.loss] for p in self.curve.points], dtype=torch.float64),
            "looks": torch.tensor(self.curve.looks, dtype=torch.float64).reshape(-1, 3),
            "single_losses": torch.tensor(self.single_losses, dtype=torch.float64),
            f"start|{self.curve.start}": torch.zeros(1),
        }
        for i, point in enumerate(self.curve.points):
            found |= {f"off|{i}|{layer}": numbers for layer, numbers in point.off.items()}
        for i, rivals in enumerate(self.rivals):
            for name, off in rivals.items():
                found |= {f"rival|{i}|{name}|{layer}": numbers for layer, numbers in off.items()}
        return found | {f"single|{name}": code for name, code in self.singles.encode().items()}

    @staticmethod
    def from_tensors(units: ModelUnits, weights: Sequence[WeightMatrix], tensors: dict[str, Tensor]) -> FoundUnits:
        """Inverse of `to_tensors`, for a model's ``units`` and ``weights``."""
        rows = tensors["points"].tolist()
        offs: list[dict[int, Tensor]] = [{} for _ in rows]
        rivals: list[dict[str, dict[int, Tensor]]] = [{} for _ in rows]
        singles, start = {}, ""
        for key, value in tensors.items():
            part, _, rest = key.partition("|")
            if part == "start":
                start = rest
            elif part == "off":
                i, layer = map(int, rest.split("|"))
                offs[i][layer] = value
            elif part == "rival":
                i, name, layer = rest.split("|")
                rivals[int(i)].setdefault(name, {})[int(layer)] = value
            elif part == "single":
                singles[rest] = value
        points = tuple(CurvePoint(s, a, off, loss) for (s, a, loss), off in zip(rows, offs, strict=True))
        looks = tuple((int(step), share, loss) for step, share, loss in tensors["looks"].tolist())
        curve = PruningCurve(float(tensors["base"]), points, looks, start)
        return FoundUnits(
            units, curve, Mask.decode(singles, weights), tuple(tensors["single_losses"].tolist()), tuple(rivals)
        )


def documents_to_fit(section: UnitSection, stop_share: float, share: float, documents: int, tokens: int) -> float:
    """What fitting takes, as documents scored once: a backward pass costs as much as two forward passes.

    Of so many documents with so many answer tokens, ``share`` gives gradients and ``stop_share`` stops.
    """
    step = min(share * documents, max(1.0, section.step_tokens * documents / max(1, tokens)))
    looks = 4 + len(section.off) * (1 + 1.5 * math.ceil(section.steps / section.every))
    return 3 * (2 * share * documents + len(section.off) * section.steps * step) + looks * stop_share * documents


def fit_units(
    task: PurifyTask, units: ModelUnits, section: UnitSection, saliency: SaliencySection, singles: bool
) -> FoundUnits:
    """Train the curve for one subdomain, then single switches inside its best point; the model is bit-equal afterwards.

    The task is told after every look of the units' training; ``saliency`` has the format that units are trained in, and how
    single weights are switched off where ``singles`` asks for that.
    """
    found = _fit_curve(task, units, section, saliency)
    if not singles:
        return found
    inside = replace(task, on_round=lambda *_: None, checkpoint=task.checkpoint.part_state("single switches"))
    with switched_off(task.weights, units.mask(found.best_point.off)):
        result = method_of(saliency, task.text, task.weights).run(inside, saliency)
    return replace(found, singles=result.mask, single_losses=tuple(result.losses[1:]))


def _fit_curve(task: PurifyTask, units: ModelUnits, section: UnitSection, saliency: SaliencySection) -> FoundUnits:
    """The curve, and what its rivals would switch off; once."""
    model, checkpoint = task.model, task.checkpoint
    ended = checkpoint.part_state("units, their end")
    known = ended.read_state()
    if known is not None:
        return FoundUnits.from_tensors(units, (), known)
    with held_in(model, compute_dtype(saliency.compute, model)):
        curve = train_units(
            replace(task, checkpoint=checkpoint.part_state("units")),
            units,
            section,
            multiple=multiple_of(section, model.device),
            checkpointing=saliency.checkpointing,
        )
        scores = rival_scores(
            units,
            measure_importance(
                model, units, task.gradient, checkpoint.part_state("units, rivals"), saliency.checkpointing
            ),
        )
    rivals = []
    for point in curve.points:
        # As many as the point has: per layer for ``even``, else in all.
        per_layer = section.layout == "even" and units.kind != "layer"
        counts = [len(point.off.get(layer.number, ())) for layer in units.layers]
        rivals.append({n: lowest_units(units, s, counts if per_layer else [sum(counts)]) for n, s in scores.items()})
    found = FoundUnits(units, curve, rivals=tuple(rivals))
    ended.write_state(found.to_tensors, now=True)
    return found
