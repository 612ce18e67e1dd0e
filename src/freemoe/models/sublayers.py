"""The linears of a decoder layer by what they do, and how its rotary dimensions go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.errors import FamilyError
from freemoe.models.spec import family_of, find_layers, find_module

CONVERTIBLE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "phi")
"""Families whose layers have separate query, key and value linears, a plain MLP and rotary halves."""


@dataclass(frozen=True)
class RotaryLayout:
    """Which dimensions of a head must be kept or dropped together.

    A dimension j < ``turned`` / 2 is turned together with j + ``turned`` / 2 and shares its bit; every dimension from
    ``turned`` on has a bit of its own.
    """

    head_dim: int  # Dimensions of a head
    turned: int  # Dimensions that the rotary embedding turns: all of them, or the first part (Phi)

    @property
    def num_bits(self) -> int:
        """Number of free choices: pairs, then single dimensions."""
        return self.turned // 2 + self.head_dim - self.turned

    @property
    def bit_sizes(self) -> Tensor:
        """(bits,) float32: how many dimensions each bit holds, 2 or 1."""
        pairs = self.turned // 2
        return torch.cat([torch.full((pairs,), 2.0), torch.ones(self.num_bits - pairs)])

    def expand_bits(self, bits: Tensor) -> Tensor:
        """Bits (..., bits) -> dimensions (..., head_dim); differentiable."""
        pairs = bits[..., : self.turned // 2]
        return torch.cat([pairs, pairs, bits[..., self.turned // 2 :]], dim=-1)


@dataclass(frozen=True, eq=False)
class DecoderSublayers:
    """One decoder layer, taken apart."""

    number: int  # Of the layer, from 0
    path: str  # Of the layer in the model
    q: nn.Linear  # With k, v and o the attention's linears
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    up: tuple[nn.Linear, ...]  # What reads the MLP's input: (gate, up) or (fc1,)
    down: nn.Linear  # What multiplies the intermediate activation
    names: dict[str, str]  # Path of each linear relative to the layer, by the names above; ``up`` by its last part
    heads: int  # Query heads
    kv_heads: int  # Key and value heads
    rotary: RotaryLayout  # How a head's dimensions go together

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.q.in_features

    @property
    def intermediate_size(self) -> int:
        """Number of neurons of the MLP."""
        return self.down.in_features


def find_sublayers(model: nn.Module) -> list[DecoderSublayers]:
    """Take every decoder layer of a dense model apart.

    Raises:
        FamilyError: A family that cannot be converted, or one whose rotary pairs are not described.
    """
    family = family_of(model)
    if family.name not in CONVERTIBLE:
        raise FamilyError(
            f"Family {family.name!r} cannot be converted: its layers have no separate query, key and value linears, no plain "
            f"MLP, or no rotary halves described. Convertible: {', '.join(CONVERTIBLE)}."
        )
    if family.rotary != "half":
        raise FamilyError(
            f"Rotary pairs of family {family.name!r} are {family.rotary!r}; only 'half' (j with j + half) is described. "
            "Describe its pairs in src/freemoe/models/sublayers.py."
        )
    (q, k, v), (o,) = family.attention
    up, (down,) = family.mlp
    parts = {name.rpartition(".")[2]: name for name in up}
    names = {"q": q, "k": k, "v": v, "o": o, "down": down} | parts
    config: Any = model.config
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    rotary = RotaryLayout(head_dim, int(head_dim * share))
    path, layers = find_layers(model, family)
    found = []
    for number, layer in enumerate(layers):
        own = {role: _get_linear(layer, name, f"{path}.{number}") for role, name in names.items()}
        found.append(
            DecoderSublayers(
                number=number,
                path=f"{path}.{number}",
                **{role: own[role] for role in ("q", "k", "v", "o", "down")},
                up=tuple(own[part] for part in parts),
                names=names,
                heads=own["q"].out_features // head_dim,
                kv_heads=own["k"].out_features // head_dim,
                rotary=rotary,
            )
        )
    return found


def _get_linear(layer: nn.Module, name: str, path: str) -> nn.Linear:
    found = find_module(layer, name)
    if not isinstance(found, nn.Linear):
        raise FamilyError(
            f"{path}.{name} is {type(found).__name__}, and a plain linear is needed to convert this model. Load it without "
            "quantisation and without adapters."
        )
    return found
