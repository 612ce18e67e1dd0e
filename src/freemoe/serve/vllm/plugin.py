"""What vLLM's entry point ``vllm.general_plugins`` calls, in every one of its processes and perhaps several times."""

# pyright: reportMissingImports=false
from __future__ import annotations

_MODELS = "freemoe.serve.vllm.models"


def register() -> None:
    """Make known the quantization method ``freemoe``, under which linears heed experts, and our models' classes."""
    from transformers import AutoConfig
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from freemoe.serve.vllm.settings import CONVERTIBLE, METHOD, TRIMMABLE
    from vllm import ModelRegistry

    if METHOD in QUANTIZATION_METHODS:
        return
    from freemoe.serve.vllm.linears import ExpertConfig
    from freemoe.tomoe import configs

    register_quantization_config(METHOD)(ExpertConfig)
    for model_type, family in CONVERTIBLE.items():
        AutoConfig.register(model_type, getattr(configs, f"ToMoE{family}Config"), exist_ok=True)
        # By name: loaded in the processes that make one.
        ModelRegistry.register_model(f"ToMoE{family}ForCausalLM", f"{_MODELS}.converted:Paged{family}ForCausalLM")
    for family in TRIMMABLE.values():
        ModelRegistry.register_model(f"Trimmed{family}ForCausalLM", f"{_MODELS}.trimmed:Trimmed{family}ForCausalLM")
