"""What vLLM's entry point ``vllm.general_plugins`` calls, in every one of its processes and perhaps several times."""

# pyright: reportMissingImports=false
from __future__ import annotations


def register() -> None:
    """Make the quantization method ``freemoe`` known, under which linears keep their weights and heed experts."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from freemoe.serve.vllm.settings import METHOD

    if METHOD not in QUANTIZATION_METHODS:
        from freemoe.serve.vllm.linears import ExpertConfig

        register_quantization_config(METHOD)(ExpertConfig)
