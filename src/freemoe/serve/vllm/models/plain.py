"""What vLLM can be told to do that our models and experts cannot do with."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

from freemoe.core.errors import RecipeError


def require_plain(config: Any, what: str, instead: str, eager: bool = False) -> None:
    """Raise unless vLLM is to run one worker that computes each step plainly.

    ``eager``: compiled models are refused as well; without it graphs of an accelerator alone.
    """
    parallel = config.parallel_config
    world = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.data_parallel_size
    refused = {
        f"a model over {world} workers (tensor, pipeline or data parallel)": world > 1,
        "speculative decoding": config.speculative_config is not None,
        "LoRA adapters": config.lora_config is not None,
        "keys and values from elsewhere (kv_transfer_config)": config.kv_transfer_config is not None,
        "compiled models or CUDA graphs (give --enforce-eager)": not config.model_config.enforce_eager
        and (eager or not current_platform.is_cpu()),
    }
    if wrong := [name for name, asked in refused.items() if asked]:
        raise RecipeError(f"{what} do not go with {' and '.join(wrong)}. Leave it out, or {instead}.")
