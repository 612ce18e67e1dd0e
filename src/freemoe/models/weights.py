"""The weights that can be switched off: every linear of the decoder layers, fused experts included.

Embeddings, heads (tied or not), norms, biases, gates and routers are never among them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.compat.transformers import is_conv1d
from freemoe.core.errors import FamilyError
from freemoe.models.offload import OffloadedParameter, stored_parameters
from freemoe.models.spec import ModelFamily, family_of, find_layers, find_module, modules_seen

SUBLAYERS = ("attention", "mlp", "both")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class MoERouter:
    """The router that chooses among the experts of a weight."""

    module: nn.Module  # Its forward returns (logits, weights, index)
    top_k: str  # Its attribute that says how many experts a token is given

    @property
    def experts_per_token(self) -> int:
        """How many experts a token is given."""
        return int(getattr(self.module, self.top_k))


@dataclass(frozen=True, eq=False)
class WeightMatrix:
    """One weight matrix of a decoder layer, or the matrices of all its fused experts.

    Its canonical order is (experts, rows, columns), rows being outputs and columns inputs, whatever the order
    in memory; a dense matrix has one expert.
    """

    name: str  # The parameter's name, as in ``model.named_parameters()``
    layer: int  # Number of the decoder layer, from 0
    sublayer: str  # ``"attention"`` or ``"mlp"``
    tap: str  # Name of the input that it multiplies; weights with equal tap share one input
    module: nn.Module  # The module whose parameter it is
    param_name: str  # The parameter's name there
    # Order in memory: ``"rows"`` (out, in), ``"columns"`` (in, out), ``"experts"`` (experts, out, in) or
    # ``"experts_columns"`` (experts, in, out)
    layout: str
    gate: MoERouter | None = None  # The router of fused experts, where the family's row names it
    # How it is read, where it is not in memory: the parameter then holds no values
    stored: OffloadedParameter | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that stands in the model now, also where others have put another one there."""
        return getattr(self.module, self.param_name)

    @property
    def device(self) -> torch.device:
        """Where the model computes with it."""
        return self.parameter.device if self.stored is None else self.stored.device

    @property
    def is_fused(self) -> bool:
        """Whether this holds the matrices of several routed experts."""
        return self.layout.startswith("experts")

    @property
    def num_experts(self) -> int:
        """Number of experts; 1 for a dense matrix."""
        return self.parameter.shape[0] if self.is_fused else 1

    @property
    def num_rows(self) -> int:
        """Number of outputs of one expert's matrix."""
        return self.parameter.shape[-1 if self.layout.endswith("columns") else -2]

    @property
    def num_columns(self) -> int:
        """Number of inputs of one expert's matrix."""
        return self.parameter.shape[-2 if self.layout.endswith("columns") else -1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The canonical shape (experts, rows, columns)."""
        return self.num_experts, self.num_rows, self.num_columns

    @property
    def size(self) -> int:
        """Number of single weights, over all experts."""
        return self.parameter.numel()

    def canonical_view(self) -> Tensor:
        """The weight as a live view (experts, rows, columns); edits go to the parameter, in any grad mode.

        Raises:
            FamilyError: It is not in memory.
        """
        # Asked first, as this is called for every weight at every step.
        if self.stored is not None:
            require_in_memory([self])
        return self.to_canonical(self.parameter.detach())

    def read_values(self) -> Tensor:
        """The weight (experts, rows, columns) to read, wherever it is."""
        return (
            self.canonical_view()
            if self.stored is None
            else self.to_canonical(self.stored.read_values()).to(self.device)
        )

    def to_canonical(self, tensor: Tensor) -> Tensor:
        """See a tensor of the parameter's own shape (say, its gradient) as (experts, rows, columns)."""
        if self.layout.endswith("columns"):
            tensor = tensor.transpose(-1, -2)
        return tensor if self.is_fused else tensor.unsqueeze(0)

    def flat_memory(self) -> Tensor:
        """The parameter's numbers in the order in which they lie in memory: a live view (n,), n >= ``size``."""
        own = self.parameter.detach()
        # A parameter that is itself part of a larger tensor has others' numbers in between.
        span = 1 + sum((n - 1) * step for n, step in zip(own.shape, own.stride(), strict=True))
        return own.as_strided((span,), (1,))

    def memory_indices(self, indices: Tensor) -> Tensor:
        """Turn flat indices in canonical order into indices into ``memory()``.

        ``indices``: (n,) int64, into (experts, rows, columns) flattened.

        Returns:
            (n,) int64; the same tensor where the two orders agree.
        """
        expert_step, row_step, column_step = self.canonical_view().stride()
        matrix = self.num_rows * self.num_columns
        if (row_step, column_step) == (self.num_columns, 1) and (self.num_experts == 1 or expert_step == matrix):
            return indices
        expert = torch.div(indices, matrix, rounding_mode="floor")
        inside = indices - expert * matrix
        row = torch.div(inside, self.num_columns, rounding_mode="floor")
        return expert * expert_step + row * row_step + (inside - row * self.num_columns) * column_step


def find_weights(
    model: nn.Module, sublayers: str = "both", layers: tuple[int, int] | None = None
) -> list[WeightMatrix]:
    """List the weights of a model, layer by layer, attention before mlp, in the family's order.

    Of ``"attention"``, ``"mlp"`` or ``"both"``; ``layers`` is the range [first, end) of decoder layers.

    Raises:
        FamilyError: Unknown family; a layer without linears; a quantised, wrapped or unloaded (meta) base; an
            unknown sublayer; a range that the model does not have.
    """
    if sublayers not in SUBLAYERS:
        raise FamilyError(f"Unknown sublayers {sublayers!r}. Allowed: {', '.join(SUBLAYERS)}.")
    family = family_of(model)
    path, modules = find_layers(model, family)
    first, end = (0, len(modules)) if layers is None else layers
    if not 0 <= first < end <= len(modules):
        raise FamilyError(
            f"The range of layers [{first}, {end}) does not fit {type(model).__name__}, which has "
            f"{len(modules)} decoder layers: choose 0 <= first < end <= {len(modules)}."
        )
    names = {id(p): n for n, p in model.named_parameters()}
    stored = stored_parameters(model)
    found: list[WeightMatrix] = []
    for number in range(first, end):
        here = list(_layer_weights(modules[number], f"{path}.{number}", number, family, names))
        if not here:
            looked = [p for group in family.attention + family.mlp for p in group]
            looked += [family.experts.path] if family.experts else []
            raise FamilyError(
                f"No linear was found in decoder layer {number} ({path}.{number}) of {type(model).__name__}, "
                f"family {family.name!r}: looked for {', '.join(looked)}; "
                f"{modules_seen(modules[number])}. If the layer is right, correct the family's row in "
                "src/freemoe/models/spec.py."
            )
        found += [w for w in here if sublayers in ("both", w.sublayer)]
    if not found:
        raise FamilyError(f"{type(model).__name__} has no {sublayers} linears in layers [{first}, {end}).")
    if missing := [w.name for w in found if w.parameter.is_meta and w.name not in stored]:
        raise FamilyError(
            f"{missing[0]} is on the meta device, so it holds no numbers: load the model with its weights."
        )
    seen: dict[str, str] = {}
    for weight in found:
        if weight.name in seen:
            raise FamilyError(
                f"{weight.name} is one parameter with two uses (inputs {seen[weight.name]} and "
                f"{weight.tap}): layers that share weights cannot be switched one by one."
            )
        seen[weight.name] = weight.tap
    return [replace(w, stored=stored.get(w.name)) for w in found]


def describe_weights(model: nn.Module) -> dict[str, Any]:
    """What ``find_weights`` finds, in numbers; raises like that.

    Returns:
        ``family``, ``decoder_layers``, ``matrices`` (every routed expert counts) and ``switchable_weights`` by sublayer,
        ``parameters`` (tied ones count once), and ``switchable_share``, the weights as a share of them, 0 to 1.
    """
    weights, both = find_weights(model), SUBLAYERS[:2]
    found = {s: sum(w.size for w in weights if w.sublayer == s) for s in both}
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "family": family_of(model).name,
        "decoder_layers": weights[-1].layer + 1,
        "matrices": {s: sum(w.num_experts for w in weights if w.sublayer == s) for s in both},
        "switchable_weights": found,
        "parameters": parameters,
        "switchable_share": sum(found.values()) / parameters,
    }


def require_in_memory(weights: Sequence[WeightMatrix], what: str = "This", *, together: bool = False) -> None:
    """Raise unless all weights can be edited and have gradients. ``together``: they must also lie on one device.

    Raises:
        FamilyError: Some are read as they are needed, or lie elsewhere.
    """
    places = list(dict.fromkeys(str(w.device) for w in weights)) if together else []
    if len(places) > 1:
        raise FamilyError(f"{what} needs all weights on one device; they lie on {', '.join(places)}.")
    away = [w.name for w in weights if w.stored is not None]
    if away:
        raise FamilyError(
            f"{what} needs all weights in memory, and {len(away)} of {len(weights)} are read as they are needed (the first is "
            f"{away[0]}). Bands (--metric wanda, magnitude or random) do without; or load the base with --device auto, cpu "
            "or cuda, or over several devices with --device split."
        )


def _layer_weights(
    layer: nn.Module, path: str, number: int, family: ModelFamily, names: dict[int, str]
) -> Iterator[WeightMatrix]:
    for sublayer, groups in (("attention", family.attention), ("mlp", family.mlp)):
        for group in groups:
            present = [p for p in group if find_module(layer, p) is not None]
            for relative in present:
                full = f"{path}.{relative}"
                module: Any = find_module(layer, relative)
                parameter = _plain_parameter(module, "weight", full)
                layout = "rows" if isinstance(module, nn.Linear) else "columns"
                if layout == "columns" and not is_conv1d(module):
                    raise _unsupported_error(full, module, ", not a Linear, a Conv1D or fused experts")
                yield WeightMatrix(
                    names[id(parameter)], number, sublayer, f"{path}.{present[0]}", module, "weight", layout
                )
    experts = family.experts
    # A dense layer of a mixture model, and a mixture block that keeps a list of plain linears, have no such
    # module.
    if experts is not None and (module := find_module(layer, experts.path)) is not None:
        router = None if family.gate is None else find_module(layer, family.gate.path)
        gate = None if router is None or family.gate is None else MoERouter(router, family.gate.top_k)
        for own in (experts.up, experts.down):
            full = f"{path}.{experts.path}.{own}"
            parameter = _plain_parameter(module, own, full)
            if parameter.ndim != 3:
                raise FamilyError(
                    f"{full} of {type(module).__name__} has shape {tuple(parameter.shape)}; fused experts "
                    "need three dimensions (experts, rows, columns)."
                )
            yield WeightMatrix(names[id(parameter)], number, "mlp", full, module, own, experts.layout, gate)


def _plain_parameter(module: nn.Module | None, name: str, path: str) -> nn.Parameter:
    """The parameter, if it is plain floating-point numbers."""
    parameter = None if module is None else dict(module.named_parameters(recurse=False)).get(name)
    if parameter is None:
        raise _unsupported_error(path, module, f" without a plain parameter {name!r}")
    if parameter.dtype not in _DTYPES or type(parameter.data) is not Tensor:
        kind = f"{parameter.dtype} ({type(parameter.data).__name__})"
        raise _unsupported_error(path, module, f" with weights of type {kind}")
    return parameter


def _unsupported_error(path: str, module: object, what: str) -> FamilyError:
    return FamilyError(
        f"{path} is a {type(module).__name__}{what}: quantised or wrapped weights cannot be ranked or switched. Load the base in "
        "float32, bfloat16 or float16, without adapters."
    )
