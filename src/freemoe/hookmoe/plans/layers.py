"""The mixture layers of a model: where the gate is, where its k is read, what its experts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.errors import FamilyError
from freemoe.hookmoe.plans.plan import LayerPlan, parse_plan
from freemoe.models.spec import FAMILIES, family_of, find_layers


@dataclass(frozen=True, eq=False)
class MoELayer:
    """One decoder layer's mixture block."""

    number: int  # Of the decoder layer, from 0; dense layers count too
    path: str  # Of the block in the model
    # The module that holds gate and experts (and shared experts); its input is what the layer's norm gives
    block: nn.Module
    gate: nn.Module  # The router
    experts: nn.Module  # The fused routed experts
    attribute: str  # Name of the gate's attribute that is read on every forward as k
    count: int  # Routed experts
    width: int  # Neurons of one routed expert
    hidden: int  # Width of the residual stream
    correction: str | None = None  # See `models.spec.GateLayout`

    def choice_order(self, logits: Tensor, weights: Tensor, index: Tensor) -> Tensor:
        """What the gate chooses its experts by, of the slots that it chose: (tokens, slots), the first choice largest.

        The weights themselves, but where a correction decides which experts run without counting in their weights.
        ``logits``: (tokens, experts), as the gate gives them out; the others (tokens, slots).
        """
        if self.correction is None:
            return weights
        scores = torch.sigmoid(logits.float()) + getattr(self.gate, self.correction)
        return scores.gather(-1, index)

    @property
    def device(self) -> torch.device:
        """Device of the block's first parameter."""
        return next(self.block.parameters()).device

    @property
    def k(self) -> int:
        """Experts per token, as the gate has it now."""
        return int(getattr(self.gate, self.attribute))

    def set_k(self, value: int) -> None:
        """Let the gate run so many; `applied` puts the old number back."""
        setattr(self.gate, self.attribute, value)


_PLAIN = (
    "Plans and hooks are found on experts in bfloat16, float16 or float32: give the checkpoint in one of these, or in Python "
    "a model that transformers has dequantised (from_pretrained(..., quantization_config=...(dequantize=True)))."
)


def require_plain(name: str, config: Any) -> None:
    """Raise where a checkpoint's weights are stored in fewer bits: before it is loaded, which may need kernels and hours.

    Raises:
        FamilyError: It is; names the way.
    """
    how = getattr(config, "quantization_config", None)
    if how is None:
        return
    kind = how if isinstance(how, dict) else vars(how)
    method = str(getattr(kind.get("quant_method"), "value", kind.get("quant_method") or "an unnamed way"))
    bits = next((f", {kind[key]} bits" for key in ("bits", "w_bit", "nbits") if isinstance(kind.get(key), int)), "")
    bits = ", 4 bits" if kind.get("load_in_4bit") or kind.get("_load_in_4bit") else bits
    if not kind.get("dequantize"):
        raise FamilyError(f"{name} is quantised ({method}{bits}), and quantised experts cannot be trimmed. {_PLAIN}")


def moe_layers(model: Any) -> list[MoELayer]:
    """List the mixture layers of a model; dense layers of a mixture model are left out.

    Raises:
        FamilyError: The model is dense, its family is unknown, or its experts are not fused.
    """
    family = family_of(model)
    if family.gate is None or family.experts is None:
        mixtures = [name for name in FAMILIES if FAMILIES.get(name).gate is not None]
        raise FamilyError(
            f"{type(model).__name__} is of the family {family.name!r}, which is dense: it has no router whose experts per "
            f"token could be cut. Families with a router: {', '.join(mixtures)}."
        )
    path, layers = find_layers(model, family)
    found = []
    for number, layer in enumerate(layers):
        gate, experts = _get_child(layer, family.gate.path), _get_child(layer, family.experts.path)
        if gate is None or experts is None:
            continue
        up = getattr(experts, family.experts.up, None)
        if up is None or up.ndim != 3:
            raise FamilyError(
                f"{path}.{number}.{family.experts.path} has no three-dimensional parameter {family.experts.up!r}: only fused "
                "experts, as transformers 5 loads them, can be trimmed."
            )
        if not up.dtype.is_floating_point or up.dtype.itemsize < 2:
            raise FamilyError(
                f"{path}.{number}.{family.experts.path} holds its weights as {str(up.dtype).removeprefix('torch.')}. {_PLAIN}"
            )
        columns = family.experts.layout.endswith("columns")
        count, hidden, twice = up.shape if columns else (up.shape[0], up.shape[2], up.shape[1])
        block = family.gate.path.rpartition(".")[0]
        found.append(
            MoELayer(
                number,
                f"{path}.{number}.{block}",
                layer.get_submodule(block),
                gate,
                experts,
                family.gate.top_k,
                count,
                twice // 2,
                hidden,
                family.gate.correction,
            )
        )
    if not found:
        raise FamilyError(
            f"{type(model).__name__} is of the family {family.name!r}, but none of its {len(layers)} decoder layers has "
            f"both {family.gate.path} and {family.experts.path}: all of them are dense."
        )
    return found


def plan_of(model: Any) -> LayerPlan:
    """The k that every layer has now."""
    ks = {layer.number: layer.k for layer in moe_layers(model)}
    return LayerPlan(tuple(ks.get(number) for number in range(len(decoder_layers(model)))))


def expert_counts(model: Any) -> list[int | None]:
    """Routed experts of every decoder layer; None where dense."""
    counts = {layer.number: layer.count for layer in moe_layers(model)}
    return [counts.get(number) for number in range(len(decoder_layers(model)))]


def read_plan(text: str, model: Any) -> LayerPlan:
    """A plan from its spelling, for a model.

    Raises:
        RecipeError: It cannot be read, or the model cannot run it.
    """
    return parse_plan(text, plan_of(model), expert_counts(model))


def decoder_layers(model: Any) -> list[nn.Module]:
    """All decoder layers of a model, dense ones too."""
    return find_layers(model, family_of(model))[1]


def _get_child(layer: nn.Module, path: str) -> nn.Module | None:
    found: object = layer
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, nn.Module) else None
