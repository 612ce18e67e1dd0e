"""Units that are switched off as a whole, and which weights belong to each: data about a model, no method.

A *neuron* is a row of the MLP's first matrices and a column of its last one; a *KV group* a key and value head with the
query heads that read it; a *layer* a whole decoder layer; an *expert* one routed expert of a mixture.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from freemoe.core.errors import FamilyError, RecipeError
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.spec import ModelFamily, family_of, find_layers
from freemoe.models.weights import WeightMatrix, find_weights

Kind = Literal["neuron", "kv_group", "layer", "expert"]
KINDS: tuple[Kind, ...] = ("neuron", "kv_group", "layer", "expert")

UnitsOff = Mapping[int, Tensor]
"""Number of a decoder layer to the sorted numbers of its units that are off, (n,) int64; layers with none are absent."""


@dataclass(frozen=True, eq=False)
class UnitSlice:
    """What of one weight belongs to the units of a layer."""

    weight: WeightMatrix  # The weight
    axis: Literal["rows", "columns", "experts"]  # ``"rows"``, ``"columns"`` or ``"experts"``
    members: Tensor  # (count, n) int64: unit u owns these whole rows, columns or experts

    def member_indices(self, units: Tensor) -> Tensor:
        """Sorted rows, columns or experts of some units."""
        return self.members[units].flatten().sort().values


@dataclass(frozen=True, eq=False)
class LayerUnits:
    """The units of one decoder layer."""

    number: int  # Of the layer, from 0
    count: int  # Units that it has
    least: int  # Units that must stay
    # What is hooked to mask them: the linear that reads what the units give (neurons, KV groups), the layer itself,
    # or the router (experts)
    module: nn.Module
    parts: tuple[UnitSlice, ...]  # What of which weight is theirs

    @property
    def weights_of_one(self) -> int:
        """Single weights that one unit has."""
        sizes = {
            "rows": lambda w: w.num_columns,
            "columns": lambda w: w.num_rows,
            "experts": lambda w: w.num_rows * w.num_columns,
        }
        return sum(p.members.shape[1] * sizes[p.axis](p.weight) for p in self.parts)


@dataclass(frozen=True, eq=False)
class ModelUnits:
    """All units of one kind that a model has."""

    kind: Kind  # A name of `KINDS`
    layers: tuple[LayerUnits, ...]  # Those decoder layers that have such units, in order

    @property
    def num_units(self) -> int:
        """How many units there are."""
        return sum(layer.count for layer in self.layers)

    def mask(self, off: UnitsOff) -> Mask:
        """The single weights of units that are off."""
        shapes = {part.weight.name: part.weight.shape for layer in self.layers for part in layer.parts}
        lines = self.line_indices(off)
        return Mask({name: TensorMask.of_lines(shapes[name], *own) for name, own in lines.items()})

    def line_indices(self, off: UnitsOff) -> dict[str, tuple[str, Tensor]]:
        """The same as whole rows, columns or experts: name -> axis and sorted numbers."""
        self.require_valid(off)
        return {
            part.weight.name: (part.axis, part.member_indices(off[layer.number].cpu()))
            for layer in self.layers
            if layer.number in off and len(off[layer.number])
            for part in layer.parts
        }

    def of_lines(self, lines: Mapping[str, tuple[str, Tensor]]) -> dict[int, Tensor]:
        """Inverse of `lines`: the units all of whose rows, columns or experts are named."""
        found = {}
        for layer in self.layers:
            off = torch.ones(layer.count, dtype=torch.bool)
            for part in layer.parts:
                _, numbers = lines.get(part.weight.name, (part.axis, torch.empty(0, dtype=torch.long)))
                off &= torch.isin(part.members, numbers).all(1)
            if bool(off.any()):
                found[layer.number] = off.nonzero().flatten()
        return found

    def number_off(self, off: UnitsOff) -> int:
        """How many units are off."""
        return sum(len(numbers) for numbers in off.values())

    def share_off(self, off: UnitsOff) -> float:
        """Units that are off, as a share of all."""
        return self.number_off(off) / self.num_units

    def require_valid(self, off: UnitsOff) -> None:
        """Check that units can be off together.

        Raises:
            RecipeError: Unknown layer or unit, units that are not sorted, or too few that would stay.
        """
        known = {layer.number: layer for layer in self.layers}
        for number, numbers in off.items():
            if number not in known:
                raise RecipeError(
                    f"Layer {number} has no units of kind {self.kind!r}; layers that have: {', '.join(map(str, known))}."
                )
            layer = known[number]
            if len(numbers) and not (
                bool((numbers[1:] > numbers[:-1]).all()) and 0 <= int(numbers[0]) <= int(numbers[-1]) < layer.count
            ):
                raise RecipeError(
                    f"Units of layer {number} must ascend, each once, from 0 to {layer.count - 1}; got "
                    f"{numbers[:8].tolist()}{'...' if len(numbers) > 8 else ''}."
                )
            if layer.count - len(numbers) < layer.least:
                raise RecipeError(
                    f"Layer {number} would keep {layer.count - len(numbers)} of {layer.count} units of kind "
                    f"{self.kind!r}; at least {layer.least} must stay. Switch fewer off (--off)."
                )
        if self.kind == "layer" and self.number_off(off) >= self.num_units:
            raise RecipeError(f"All {self.num_units} decoder layers would be off; at least 1 must stay. Lower --off.")


def find_units(model: nn.Module, kind: str) -> ModelUnits:
    """List the units of a model.

    Raises:
        RecipeError: An unknown kind.
        FamilyError: A model that has no such units, or whose layers are not described for them.
    """
    finders = {"neuron": _neuron_units, "kv_group": _kv_group_units, "layer": _layer_units, "expert": _expert_units}
    if kind not in finders:
        raise RecipeError(f"Unknown unit {kind!r}. Allowed: {', '.join(KINDS)}.")
    family = family_of(model)
    path, layers = find_layers(model, family)
    weights = find_weights(model)
    found = []
    for number, layer in enumerate(layers):
        own = {w.name.removeprefix(f"{path}.{number}."): w for w in weights if w.layer == number}
        units = finders[kind](model, family, layer, number, own)
        if units is not None:
            found.append(units)
    if not found:
        raise FamilyError(
            f"{type(model).__name__}, family {family.name!r}, has no units of kind {kind!r}: "
            + (
                "it is dense and has no routed experts. Use neuron, kv_group or layer."
                if kind == "expert"
                else "its feed-forward layers are mixtures of experts. Use --unit expert."
            )
        )
    return ModelUnits(kind, tuple(found))  # pyright: ignore[reportArgumentType]


def _index_ranges(starts: Tensor, length: int) -> Tensor:
    """(count, ...) starts -> (count, n): the ``length`` numbers from every start on."""
    return (starts[..., None] + torch.arange(length)).flatten(1)


def _neuron_units(
    model: Any, family: ModelFamily, layer: nn.Module, number: int, weights: dict[str, WeightMatrix]
) -> LayerUnits | None:
    if family.experts is not None:
        return None
    first, (last,) = family.mlp
    down = weights[f"{last}.weight"]
    each = torch.arange(down.num_columns)
    # Gate and up may be one matrix, one above the other.
    parts = [
        UnitSlice(
            weight, "rows", _index_ranges(torch.stack([each + down.num_columns * k for k in range(copies)], 1), 1)
        )
        for weight in (weights[f"{path}.weight"] for path in first)
        for copies in (weight.num_rows // down.num_columns,)
    ]
    parts.append(UnitSlice(down, "columns", each[:, None]))
    return LayerUnits(number, down.num_columns, 1, layer.get_submodule(last), tuple(parts))


def _kv_group_units(
    model: Any, family: ModelFamily, layer: nn.Module, number: int, weights: dict[str, WeightMatrix]
) -> LayerUnits:
    if family.heads == "latent":
        raise FamilyError(
            f"Family {family.name!r} shares low-rank keys and values among all heads, so that no head can be cut alone. "
            "Use another --unit."
        )
    config = model.config.get_text_config()
    first, (last,) = family.attention
    out = weights[f"{last}.weight"]
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    dim, per = out.num_columns // heads, heads // groups
    each = torch.arange(groups)
    queries, single = _index_ranges(each[:, None] * per * dim, per * dim), _index_ranges(each[:, None] * dim, dim)
    if family.heads == "separate":
        parts = [
            UnitSlice(weights[f"{path}.weight"], "rows", m)
            for path, m in zip(first, (queries, single, single), strict=True)
        ]
    elif family.heads == "stacked":
        keys = single + heads * dim
        members = torch.cat([queries, keys, keys + groups * dim], 1)
        parts = [UnitSlice(weights[f"{first[0]}.weight"], "rows", members)]
    else:
        parts = [UnitSlice(weights[f"{first[0]}.weight"], "rows", _index_ranges(each[:, None] * 3 * dim, 3 * dim))]
    parts.append(UnitSlice(out, "columns", queries))
    return LayerUnits(number, groups, 1, layer.get_submodule(last), tuple(parts))


def _layer_units(
    model: Any, family: ModelFamily, layer: nn.Module, number: int, weights: dict[str, WeightMatrix]
) -> LayerUnits:
    biased = [
        path
        for path in (*family.attention[-1], *(family.mlp[-1] if family.mlp else ()))
        if (module := dict(layer.named_modules()).get(path)) is not None and getattr(module, "bias", None) is not None
    ]
    if biased:
        raise FamilyError(
            f"{', '.join(biased)} of layer {number} has a bias, which is no weight that can be off: with all its weights "
            "off the layer would still add something. Use --unit neuron or kv_group."
        )
    # The layer's only unit has every weight as a whole.
    parts = [
        UnitSlice(
            w, "experts" if w.is_fused else "rows", torch.arange(w.num_experts if w.is_fused else w.num_rows)[None]
        )
        for w in weights.values()
    ]
    return LayerUnits(number, 1, 0, layer, tuple(parts))


def _expert_units(
    model: Any, family: ModelFamily, layer: nn.Module, number: int, weights: dict[str, WeightMatrix]
) -> LayerUnits | None:
    fused = [w for w in weights.values() if w.is_fused]
    if not fused or (router := fused[0].gate) is None:
        return None
    each = torch.arange(fused[0].num_experts)[:, None]
    parts = tuple(UnitSlice(w, "experts", each) for w in fused)
    return LayerUnits(number, len(each), router.experts_per_token, router.module, parts)


def even_count(count: int, share: float, multiple: int, least: int = 1) -> int:
    """Units that are off in a layer of ``count`` so that at least ``share`` is off and a multiple is left.

    Raises:
        RecipeError: When that leaves fewer than ``least``, or nothing.
    """
    kept = int(count * (1 - share) + 1e-9) // multiple * multiple
    if kept < max(1, least):
        choices = [k for k in range(multiple, count + 1, multiple) if k >= least]
        raise RecipeError(
            f"{share:.0%} of {count} units off leaves no multiple of {multiple} units that is at least {max(1, least)} in a "
            f"layer. Kept counts that the layout 'even' allows here: {', '.join(map(str, choices[:8])) or 'none'}"
            f"{' ...' if len(choices) > 8 else ''}. Lower --off, or set units.multiple."
        )
    return count - kept


def numbers_off(units: ModelUnits, share: float, layout: str, multiple: int) -> list[int]:
    """How many units are off: one number per layer for the layout ``even``; for ``free``, and of layers, the number in all.

    Raises:
        RecipeError: A share outside (0, 1), or one that leaves a layer empty.
    """
    if not 0 < share < 1:
        raise RecipeError(f"units.off is {share}: a share of the units above 0 and below 1, e.g. 0.2.")
    if units.kind == "layer":
        number = round(share * units.num_units)
        if not 1 <= number < units.num_units:
            raise RecipeError(
                f"{share:.0%} of {units.num_units} layers is {number}; 1 to {units.num_units - 1} can be off."
            )
        return [number]
    if layout == "even":
        return [even_count(layer.count, share, multiple, layer.least) for layer in units.layers]
    number = round(share * units.num_units)
    most = sum(layer.count - layer.least for layer in units.layers)
    if not 1 <= number <= most:
        raise RecipeError(
            f"{share:.0%} of {units.num_units} units is {number}; 1 to {most} can be off, as every layer keeps at least "
            f"{units.layers[0].least}."
        )
    return [number]


def lowest_units(units: ModelUnits, scores: Sequence[Tensor], numbers: Sequence[int]) -> dict[int, Tensor]:
    """The units with the lowest scores: so many in every layer, or one number in all, with each layer's least left in.

    ``scores``: (count,) per layer; equal ones go off in the order of layers and numbers. A layer with none off is absent
    from what is returned.
    """
    if len(numbers) < len(units.layers):
        (number,) = numbers
        flat = torch.cat([s.detach().double().cpu() for s in scores])
        starts = torch.tensor([0, *(layer.count for layer in units.layers)]).cumsum(0).tolist()
        for start, layer in zip(starts, units.layers, strict=False):
            if layer.least:
                here = flat[start : start + layer.count]
                here[torch.sort(here, descending=True, stable=True).indices[: layer.least]] = torch.inf
        picked = torch.sort(flat, stable=True).indices[:number].sort().values
        chosen = [picked[(picked >= a) & (picked < b)] - a for a, b in itertools.pairwise(starts)]
    else:
        chosen = [
            torch.sort(s.detach().double().cpu(), stable=True).indices[:n].sort().values
            for s, n in zip(scores, numbers, strict=True)
        ]
    return {layer.number: at for layer, at in zip(units.layers, chosen, strict=True) if len(at)}
