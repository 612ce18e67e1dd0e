"""Converted (ToMoE) models in vLLM: a family's own class, with the exported attention and MLP in place of its own.

The modules are those of `tomoe.modeling`; embeddings, norms, residuals, batching and the paged cache are vLLM's. In the cache every
head is as wide as the dense model's, since vLLM's kernels know few widths: what a layer dropped is zeros there.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from vllm.model_executor.models.gemma import GemmaForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from freemoe.compat.transformers import make_uninitialised
from freemoe.core.errors import ArtifactError, RecipeError
from freemoe.serve.vllm.models.plain import require_plain
from freemoe.tomoe import modeling

_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence of a batch."""


class _PagedAttention(nn.Module):
    """Comes before an exported attention: it attends in vLLM's cache."""

    def attend_in(self, paged: nn.Module, rotary: nn.Module) -> None:
        """Take vLLM's attention of the dense layer, and transformers' rotary embedding."""
        self.paged, self.rotary = paged, rotary

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """The tokens of a step (T, hidden), of whichever requests, at positions (T,) -> the same."""
        x = hidden_states[None]
        return super().forward(x, self.rotary(x, positions[None]))[0][0]

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        heads, width = queries.shape[1], values.shape[3]
        paged: Any = self.paged
        # (1, heads, T, width) -> (T, heads of the dense model, its width); its query heads come in groups as ours do.
        counts = (paged.num_heads, paged.num_kv_heads, paged.num_kv_heads)
        filled = [
            pad(part[0].transpose(0, 1), (0, paged.head_size - part.shape[3], 0, count - part.shape[1])).flatten(1)
            for part, count in zip((queries, keys, values), counts, strict=True)
        ]
        output = paged(*filled).unflatten(-1, (paged.num_heads, paged.head_size))
        return output[None, :, :heads, :width], None


class _ConvertedModel(nn.Module):
    """Comes before a family's class of vLLM: exchanges attention and MLP of its layers."""

    exported: Any

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        require_plain(vllm_config, "Converted models", "serve the dense model", eager=True)
        config = vllm_config.model_config.hf_config
        kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if kind in _ROTARY:
            raise RecipeError(
                f"This model turns its heads by rope_type {kind!r}, which depends on what else is in a batch. Serve it with "
                "freemoe's own engine."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # pyright: ignore[reportCallIssue]
        device = next(self.parameters()).device
        made = _exported_modules(type(self).exported, config, vllm_config.model_config.dtype)
        rotary = type(made.rotary_emb)(config=config).to(device)
        self._exported: dict[str, Tensor] = {}
        for number, (layer, own) in enumerate(zip(self.model.layers, made.layers, strict=True)):  # pyright: ignore
            attention, mlp = own.self_attn.to_empty(device=device), own.mlp.to_empty(device=device)
            for name, module in (("self_attn", attention), ("mlp", mlp)):
                state = module.state_dict(keep_vars=True)
                self._exported |= {f"model.layers.{number}.{name}.{key}": value for key, value in state.items()}
            attention.attend_in(layer.self_attn.attn, rotary)
            layer.self_attn, layer.mlp = attention, mlp

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Read an exported folder's tensors, and return their names.

        Raises:
            ArtifactError: One is missing, is of another shape, or names what is not there.
        """
        loaded: set[str] = set()

        def other_weights() -> Iterator[tuple[str, Tensor]]:
            for name, value in weights:
                if name not in self._exported:
                    yield name, value
                    continue
                target = self._exported[name]
                if target.shape != value.shape:
                    raise ArtifactError(
                        f"{name} has shape {tuple(value.shape)}, and config.json says {tuple(target.shape)}. Export the model again."
                    )
                target.data.copy_(value)
                loaded.add(name)

        rest = super().load_weights(other_weights())  # pyright: ignore[reportAttributeAccessIssue]
        if missing := sorted(self._exported.keys() - loaded):
            raise ArtifactError(f"{missing[0]} is missing ({len(missing)} such tensors). Export the model again.")
        for number, layer in enumerate(self.model.layers):  # pyright: ignore
            if fault := layer.mlp.fault():
                raise ArtifactError(f"The folder is damaged: {fault} in layer {number}. Export the model again.")
        return rest | loaded


def _exported_modules(exported: Any, config: Any, dtype: torch.dtype) -> Any:
    """The exported model's inside without numbers, its attention one that vLLM can drive."""
    attention = type(f"Paged{exported.attention.__name__}", (_PagedAttention, exported.attention), {})
    own = type(exported.__name__, (exported,), {"attention": attention})
    with torch.device("meta"):
        return make_uninitialised(own, config, dtype, "eager").model


class PagedLlamaForCausalLM(_ConvertedModel, LlamaForCausalLM):
    """A converted Llama, as vLLM runs it."""

    exported = modeling.MODELS["llama"]


class PagedMistralForCausalLM(_ConvertedModel, MistralForCausalLM):
    """A converted Mistral, as vLLM runs it."""

    exported = modeling.MODELS["mistral"]


class PagedQwen2ForCausalLM(_ConvertedModel, Qwen2ForCausalLM):
    """A converted Qwen2, as vLLM runs it."""

    exported = modeling.MODELS["qwen2"]


class PagedQwen3ForCausalLM(_ConvertedModel, Qwen3ForCausalLM):
    """A converted Qwen3, as vLLM runs it."""

    exported = modeling.MODELS["qwen3"]


class PagedGemmaForCausalLM(_ConvertedModel, GemmaForCausalLM):
    """A converted Gemma, as vLLM runs it."""

    exported = modeling.MODELS["gemma"]
