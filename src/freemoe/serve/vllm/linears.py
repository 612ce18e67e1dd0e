"""Linears that keep their weights, and leave out for every token what its expert has off.

vLLM asks a quantization method for its linears. By default a CPU's are packed anew when they are loaded, and nothing is left to mask;
ours stay as they are.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from freemoe.core.errors import ArtifactError, RecipeError
from freemoe.serve.vllm import requests
from freemoe.serve.vllm.settings import FOLDER, METHOD, SCHEDULER, WORKER, expert_names
from freemoe.serve.vllm.step import token_groups


# Opaque to torch.compile: which tokens are whose is known when it runs.
@torch.library.custom_op("freemoe::masked_linear", mutates_args=())
def masked_linear(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """A linear of vLLM in which every token leaves out what its expert has off.

    ``x`` ``(..., in)`` are the tokens of the step, flattened in vLLM's order; the weight is ``(out, in)``, the base's.

    Returns:
        ``(..., out)``.
    """
    out = linear(x, weight, bias)
    rows, flat = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    for tokens, parts in token_groups:
        if (off := parts.get(name)) is not None:
            flat[tokens] = off.apply_mask(rows[tokens], flat[tokens], weight, bias)
    return out


@masked_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


class ExpertLinear(UnquantizedLinearMethod):
    """Plain weights, multiplied by `masked_linear`."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as they were loaded."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """``(..., in)`` -> ``(..., out)``."""
        return torch.ops.freemoe.masked_linear(x, layer.weight, bias, layer.prefix)


class ExpertConfig(QuantizationConfig):
    """Our entry of a model's config: ``{"quant_method": "freemoe", "experts": FOLDER}``."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.names = expert_names(folder)
        requests.offered.update(self.names)

    def get_name(self) -> Any:
        """The name under which vLLM knows the method."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All that a base can have."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability that it needs: any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None beside the model's config."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ExpertConfig:
        """Read the entry that `llm_arguments` makes."""
        if not config.get(FOLDER):
            raise ArtifactError(
                f"quantization='{METHOD}' needs the folder of an artefact. Take freemoe.serve.vllm.settings.llm_arguments."
            )
        return cls(config[FOLDER])

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Ours for linears; vLLM's own for all else."""
        if not isinstance(layer, LinearBase):
            return None
        config = get_current_vllm_config()
        given = {
            "worker_cls": (config.parallel_config.worker_cls, WORKER),
            "scheduler_cls": (config.scheduler_config.scheduler_cls, SCHEDULER),
        }
        for name, (seen, wanted) in given.items():
            if seen != wanted:
                raise RecipeError(
                    f"vLLM has {name}={seen!r}; experts need {wanted!r}, or they would be mixed up. Take all of "
                    "freemoe.serve.vllm.settings.llm_arguments."
                )
        return ExpertLinear()
