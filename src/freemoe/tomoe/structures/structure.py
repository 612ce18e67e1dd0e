"""What a conversion decides, apart from how it was found: which weights of a dense model each token uses.

A structure says nothing about training: learned ones (`gates.train`) and those of the rivals (`rivals`) are
measured as masks on the dense model (`masked`) and written as models (`tomoe.export`) by the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from freemoe.core.artifacts import ArtefactManifest, read_manifest, read_tensors
from freemoe.core.errors import ArtifactError, DataError
from freemoe.kernels.gates import top_k_mask, value_scores
from freemoe.models.sublayers import DecoderSublayers


@dataclass(frozen=True, eq=False)
class ValueGateTensors:
    """Chooses value dimensions per token (ToMoE Eq. 4): the K best of ``kernels.gates.value_scores``."""

    project: Tensor  # (e, hidden)
    embedding: Tensor  # (e,)
    norm_weight: Tensor  # (e,)
    norm_bias: Tensor  # (e,)
    decode: Tensor  # (head_dim, e)
    offset: Tensor  # (head_dim,)
    keep: Tensor  # () int64, K: how many dimensions of a head every token keeps

    def token_mask(self, x: Tensor) -> Tensor:
        """The attention's input (..., hidden), on the gate's device -> (..., head_dim) float32 of zeros and ones."""
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "keep"}
        return top_k_mask(value_scores(x, **numbers), int(self.keep))


@dataclass(frozen=True, eq=False)
class LayerStructure:
    """What each token uses of one decoder layer."""

    qk: Tensor  # (bits,) bool, the rotary bits (`models.sublayers.RotaryLayout`) that queries and keys of all heads keep
    vo: ValueGateTensors | Tensor  # A gate; or (head_dim,) bool, the dimensions that every token keeps
    router_weight: Tensor  # (experts, hidden) float32
    router_bias: Tensor  # (experts,) float32
    experts: Tensor  # (experts, width) bool, the neurons of each expert
    # (kv_heads,) bool, key and value heads that stay, with the query heads that they serve; None: all
    heads: Tensor | None = None

    def to_device(self, device: torch.device) -> LayerStructure:
        """The same on a device, but for `ValueGateTensors.keep`, which the host reads."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        if isinstance(self.vo, ValueGateTensors):
            gate = {f.name: getattr(self.vo, f.name).to(device) for f in fields(self.vo) if f.name != "keep"}
            moved["vo"] = replace(self.vo, **gate)
        return replace(self, **moved)

    def value_mask(self, x: Tensor) -> Tensor:
        """Of the attention's input (..., hidden) the mask of value dimensions, (..., head_dim) or one for all tokens."""
        return self.vo.token_mask(x) if isinstance(self.vo, ValueGateTensors) else self.vo.float()

    @property
    def head_share(self) -> Fraction:
        """Heads that stay, of all."""
        return Fraction(1) if self.heads is None else Fraction(int(self.heads.sum()), len(self.heads))

    @property
    def value_width(self) -> int:
        """Value dimensions of a head that a token uses."""
        return int(self.vo.keep) if isinstance(self.vo, ValueGateTensors) else int(self.vo.sum())

    @property
    def neuron_counts(self) -> list[int]:
        """Number of neurons of each expert."""
        return self.experts.sum(dim=1).tolist()

    @property
    def union_width(self) -> int:
        """Neurons that some expert uses."""
        return int(self.experts.any(dim=0).sum())


Structure = list[LayerStructure]
"""One entry per decoder layer."""

STRUCTURE = "structure.safetensors"
"""What the conversion decided, beside the model that it was written as."""


def dense_structure(sublayers: Sequence[DecoderSublayers], experts: int = 2) -> Structure:
    """The structure that keeps everything: the dense model itself, bit for bit."""
    return [
        LayerStructure(
            qk=torch.ones(layer.rotary.num_bits, dtype=torch.bool),
            vo=torch.ones(layer.rotary.head_dim, dtype=torch.bool),
            router_weight=torch.zeros(experts, layer.hidden_size),
            router_bias=torch.zeros(experts),
            experts=torch.ones(experts, layer.intermediate_size, dtype=torch.bool),
        )
        for layer in sublayers
    ]


def require_structure_fits(structure: Structure, sublayers: Sequence[DecoderSublayers]) -> None:
    """Raise unless a structure fits a model.

    Raises:
        DataError: Another number of layers, other shapes, an expert or a head that keeps nothing.
    """
    if len(structure) != len(sublayers):
        raise DataError(f"The structure has {len(structure)} layers, the model {len(sublayers)}.")
    for layer, own in zip(sublayers, structure, strict=True):
        experts = len(own.experts)
        wanted = {
            "qk": (layer.rotary.num_bits,),
            "experts": (experts, layer.intermediate_size),
            "router_weight": (experts, layer.hidden_size),
            "router_bias": (experts,),
        }
        for name, shape in wanted.items():
            seen = tuple(getattr(own, name).shape)
            if seen != shape:
                raise DataError(f"Layer {layer.number}: {name} has shape {seen}, and {shape} fits this model.")
        if not 1 <= own.value_width <= layer.rotary.head_dim:
            raise DataError(
                f"Layer {layer.number} keeps {own.value_width} value dimensions; 1 to {layer.rotary.head_dim} allowed."
            )
        if own.heads is not None and (own.heads.shape != (layer.kv_heads,) or not bool(own.heads.any())):
            raise DataError(f"Layer {layer.number}: heads must be {layer.kv_heads} flags, at least one of them set.")
        if not bool(own.qk.any()) or min(own.neuron_counts) < 1:
            raise DataError(f"Layer {layer.number} keeps no query dimension, or has an expert without neurons.")


def active_parameters(structure: Structure, sublayers: Sequence[DecoderSublayers]) -> int:
    """Weights that a token uses in the decoder's linears: ToMoE Eq. 8's T(d), an expert's width being the largest.

    Embeddings, heads, norms, biases and routers are not counted, here and in ``dense_parameters``.
    """
    found = 0
    for layer, own in zip(sublayers, structure, strict=True):
        queries = int(layer.rotary.expand_bits(own.qk.float()).sum())
        attention = int(own.head_share * linear_parameters(layer, own.value_width, queries, 0))
        found += linear_parameters(layer, 0, 0, max(own.neuron_counts)) + attention
    return found


def dense_parameters(sublayers: Sequence[DecoderSublayers]) -> int:
    """Weights of the decoder's linears (ToMoE's T_total)."""
    return sum(linear_parameters(s, s.rotary.head_dim, s.rotary.head_dim, s.intermediate_size) for s in sublayers)


def active_share(structure: Structure, sublayers: Sequence[DecoderSublayers]) -> float:
    """The share of these weights that a token uses."""
    return active_parameters(structure, sublayers) / dense_parameters(sublayers)


Width = TypeVar("Width", int, Tensor)


def linear_parameters(layer: DecoderSublayers, value_width: Width, query_width: Width, mlp_width: Width) -> Width:
    """Weights of one layer's linears with the given widths of a head and of the MLP; differentiable in tensors."""
    attention = layer.hidden_size * (layer.heads + layer.kv_heads) * (value_width + query_width)
    return attention + (len(layer.up) + 1) * layer.hidden_size * mlp_width


def to_tensors(structure: Structure) -> dict[str, Tensor]:
    """Flatten into named tensors, ready for safetensors."""
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(structure):
        for name in ("qk", "router_weight", "router_bias", "experts"):
            found[f"{number}.{name}"] = getattr(layer, name)
        if isinstance(layer.vo, ValueGateTensors):
            found |= {f"{number}.vo.{f.name}": getattr(layer.vo, f.name) for f in fields(ValueGateTensors)}
        else:
            found[f"{number}.vo"] = layer.vo
        if layer.heads is not None:
            found[f"{number}.heads"] = layer.heads
    return found


def read_structure(folder: str | Path, manifest: ArtefactManifest | None = None) -> Structure:
    """What a conversion decided, from its folder.

    Raises:
        ArtifactError: There is none, or it is damaged.
    """
    tensors = read_tensors(folder, STRUCTURE, manifest or read_manifest(folder))
    try:
        structure = from_tensors(tensors)
        sound = all(
            min(own.neuron_counts) > 0 and own.union_width and own.value_width > 0 and own.head_share
            for own in structure
        )
    except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ArtifactError(
            f"{STRUCTURE!r} in {str(folder)!r} is no structure ({type(error).__name__}: {error}). Copy the artefact again."
        ) from None
    if not sound or to_tensors(structure).keys() != tensors.keys():
        raise ArtifactError(f"{STRUCTURE!r} in {str(folder)!r} keeps nothing of a layer, or holds more than layers.")
    return structure


def from_tensors(tensors: Mapping[str, Tensor]) -> Structure:
    """Rebuild, bit by bit, from ``to_tensors``."""
    layers = 1 + max(int(name.partition(".")[0]) for name in tensors)
    structure = []
    for number in range(layers):
        own = {name: tensors[f"{number}.{name}"] for name in ("qk", "router_weight", "router_bias", "experts")}
        static = tensors.get(f"{number}.vo")
        gate = {f.name: tensors.get(f"{number}.vo.{f.name}") for f in fields(ValueGateTensors)}
        vo = static if static is not None else ValueGateTensors(**gate)  # pyright: ignore[reportArgumentType]
        structure.append(LayerStructure(vo=vo, heads=tensors.get(f"{number}.heads"), **own))
    return structure
