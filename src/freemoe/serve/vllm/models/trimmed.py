"""Trimmed mixtures in vLLM: a family's own class, whose layers run each their own number of experts, and the hooks beside them.

What the artefact says is read by freemoe itself, with the base as transformers loads it, which is let go of afterwards: so the artefact
is held to be of this very base.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.models.mixtral import MixtralForCausalLM
from vllm.model_executor.models.olmoe import OlmoeForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from freemoe.compat.vllm import mixtures_made_with
from freemoe.hookmoe.adapter import Trimmed, load_trimmed
from freemoe.hookmoe.hooks.hook import Hook
from freemoe.hookmoe.plans.apply import truncate_slots
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.models.spec import family_of
from freemoe.serve.vllm.models.plain import require_plain
from freemoe.serve.vllm.settings import TRIMMED_FOLDER

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class LayerRouting:
    """How one layer's tokens choose their experts."""

    active: int  # Experts that run
    full: int  # Experts that the base's gate chooses
    normalise: bool  # Whether the base scales the weights of those that its gate chooses to a sum of one
    rescale: str  # The artefact's rule for the weights (`hookmoe.plans.apply.applied`)

    def __call__(self, hidden_states: Tensor, gating_output: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        """As vLLM asks: logits (tokens, experts) -> weights float32 and experts int32, each (tokens, active)."""
        chosen = self.active if self.rescale == "none" else max(self.full, self.active)
        weights, index = gating_output.float().softmax(-1).topk(chosen, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        if chosen > self.active:
            weights, index = truncate_slots(weights, index, self.active, self.rescale == "renorm")
        return weights, index.int()


class _HookedBlock(nn.Module):
    """A mixture block with its hook.

    ``before``: whether it bends what the block sees, or adds to what it gives.
    """

    def __init__(self, block: nn.Module, hook: Hook, before: bool) -> None:
        super().__init__()
        self.block, self.hook, self.before = block, hook, before

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(tokens, hidden) -> the same."""
        # The block may write over what it is given.
        shift = self.hook.shift(hidden_states)
        return self.block(hidden_states + shift) if self.before else self.block(hidden_states) + shift


class _TrimmedModel(nn.Module):
    """Comes before a family's class of vLLM: trims its mixtures."""

    block = "mlp"  # Where a layer has its mixture

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        require_plain(vllm_config, "Trimmed mixtures", "serve the whole mixture", eager=True)
        folder = getattr(vllm_config.model_config.hf_config, TRIMMED_FOLDER)
        trimmed, routes = _load_artefact(folder, vllm_config.model_config.model)
        module = sys.modules[next(c for c in type(self).__mro__ if c.__module__.startswith("vllm.")).__module__]

        def mixture_arguments(name: str) -> dict[str, Any]:
            found = _LAYER.search(f"{name}.")
            assert found is not None
            route = routes[int(found[1])]
            return {"top_k": route.active, "custom_routing_function": route}

        with mixtures_made_with(module, mixture_arguments):
            super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore[reportCallIssue]
        # In no module's tree, or its weights would be waited for in the base's files.
        self._trimmed = trimmed

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Read the base's tensors, then put the hooks beside the blocks; return the names of all that is there now."""
        loaded: set[str] = super().load_weights(weights)  # pyright: ignore[reportAttributeAccessIssue]
        hooks, device = self._trimmed.hooks, next(self.parameters()).device
        if hooks is None:
            return loaded
        for number, hook in hooks.items():
            layer: Any = self.model.layers[number]  # pyright: ignore
            setattr(
                layer, self.block, _HookedBlock(getattr(layer, self.block), hook.to(device), hooks.position == "pre")
            )
            path = f"model.layers.{number}.{self.block}."
            loaded = {f"{path}block.{n.removeprefix(path)}" if n.startswith(path) else n for n in loaded}
            loaded |= {f"{path}hook.{name}" for name, _ in hook.named_parameters()}
        return loaded


def _load_artefact(folder: str, base: str) -> tuple[Trimmed, dict[int, LayerRouting]]:
    """An artefact, and how each mixture layer of its base routes."""
    # vLLM has its own device and type open where models are made.
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            model, _, trimmed = load_trimmed(folder, base, "auto", "cpu")
    finally:
        torch.set_default_dtype(dtype)
    gate = family_of(model).gate
    assert gate is not None
    rule = gate.renormalised
    normalise = rule == "always" or (rule != "never" and bool(getattr(model.config, rule, False)))
    kept = trimmed.plan.ks
    return trimmed, {
        layer.number: LayerRouting(kept[layer.number] or layer.k, layer.k, normalise, trimmed.rescale)
        for layer in moe_layers(model)
    }


class TrimmedMixtralForCausalLM(_TrimmedModel, MixtralForCausalLM):
    """A trimmed Mixtral, as vLLM runs it."""

    block = "block_sparse_moe"


class TrimmedOlmoeForCausalLM(_TrimmedModel, OlmoeForCausalLM):
    """A trimmed OLMoE, as vLLM runs it."""


class TrimmedQwen3MoeForCausalLM(_TrimmedModel, Qwen3MoeForCausalLM):
    """A trimmed Qwen3-MoE, as vLLM runs it."""
