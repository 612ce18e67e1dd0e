"""Configurations of converted models, apart from the models themselves: what only reads config.json loads no model code.

A copy of this file lies in every exported folder: it may import transformers alone.
"""

from __future__ import annotations

from typing import Any

from transformers import GemmaConfig, LlamaConfig, MistralConfig, PhiConfig, Qwen2Config, Qwen3Config


def _converted_config(base: Any) -> Any:
    """The family's configuration class, with ``tomoe``: what each layer keeps."""
    fields = {"model_type": f"tomoe_{base.model_type}", "tomoe": None, "__annotations__": {"tomoe": "dict | None"}}
    return type(f"ToMoE{base.__name__}", (base,), {"__module__": __name__, **fields})


CONFIGS = {
    base.model_type: _converted_config(base)
    for base in (LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, GemmaConfig, PhiConfig)
}
"""Model type of a dense model -> configuration class of its converted form, ``ToMoELlamaConfig`` for example."""

# Loaders look classes up by name.
globals().update({config.__name__: config for config in CONFIGS.values()})
