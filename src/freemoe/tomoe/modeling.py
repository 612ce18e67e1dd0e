"""Converted models as transformers models: the family's own classes with other attention and MLP modules.

``import freemoe.tomoe.modeling`` registers them, and ``AutoModelForCausalLM.from_pretrained`` then loads an exported
folder; a copy of this file, of `configs`, of `modules` and of the kernels lies in every folder, for ``trust_remote_code=True`` where
freemoe is not installed. They may therefore import torch, transformers and ``freemoe.kernels`` alone.

What a layer keeps stands in ``config.tomoe`` (written by `tomoe.export`); embeddings, norms, residuals, rotary
embedding, masks, cache and generation stay transformers' own.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    PhiForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.models.gemma.modeling_gemma import GemmaAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.phi.modeling_phi import PhiAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from freemoe.tomoe.configs import CONFIGS
from freemoe.tomoe.modules import Attention, MixtureMLP, init_module_weights

FORMAT = 1
"""Version of ``config.tomoe`` that this code reads."""

MODES = ("shared", "materialised", "pseudo")
"""How an exported model holds its experts: the union of their weights once; a copy each; masks on the dense layer."""


class _Converted:
    """Comes before a family's causal LM: exchanges its attention and MLP modules."""

    attention: type[nn.Module]
    # Rounded scores would choose other experts.
    _keep_in_fp32_modules_strict = ("router", "value_gate")

    def __init__(self, config: Any) -> None:
        _check_config(config, type(self).__name__)
        super().__init__(config)  # pyright: ignore[reportCallIssue]
        for number, layer in enumerate(self.model.layers):  # pyright: ignore[reportAttributeAccessIssue]
            layer.self_attn = self.attention(config, number)
            layer.mlp = MixtureMLP(config, number, layer.mlp)
        self.post_init()  # pyright: ignore[reportAttributeAccessIssue]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # pyright: ignore[reportAttributeAccessIssue]
        init_module_weights(module, self.config.initializer_range)  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As in transformers; a tensor that is missing, or that nothing asks for, is an error and not a warning.

        Raises:
            OSError: The folder's weights and its config.json do not belong together, or an expert names neurons that are not there.
        """
        model, info = super().from_pretrained(source, *args, output_loading_info=True, **kwargs)  # pyright: ignore
        wrong = {name: sorted(info[name]) for name in ("missing_keys", "unexpected_keys") if info[name]}
        if wrong:
            raise OSError(
                f"{str(source)!r} is damaged: weights and config.json differ, {wrong}. Export the model again."
            )
        for number, layer in enumerate(model.model.layers):
            if fault := layer.mlp.fault():
                raise OSError(f"{str(source)!r} is damaged: {fault} in layer {number}. Export the model again.")
        return (model, info) if output_loading_info else model


def _check_config(config: Any, kind: str) -> None:
    """Raise unless ``config.tomoe`` is what this code reads, and of the class that is to be made."""
    if config.architectures and kind not in config.architectures:
        raise ValueError(
            f"config.json has model_type {config.model_type!r} and is of the class {', '.join(config.architectures)}, not {kind}. "
            "Export the model again."
        )
    if not isinstance(config.tomoe, dict) or config.tomoe.get("format") != FORMAT:
        seen = config.tomoe.get("format") if isinstance(config.tomoe, dict) else None
        raise ValueError(
            f"config.json has tomoe.format {seen!r}; this code reads {FORMAT}. Load the folder with the freemoe that wrote "
            "it or with trust_remote_code=True, or export the model again."
        )
    if config.tomoe["mode"] not in MODES or len(config.tomoe["layers"]) != config.num_hidden_layers:
        raise ValueError(
            f"config.json has tomoe.mode {config.tomoe['mode']!r} and {len(config.tomoe['layers'])} layers; allowed are "
            f"{', '.join(MODES)} and {config.num_hidden_layers} layers. Export the model again."
        )


def _converted_model(config: Any, base: type[nn.Module], attention: type[nn.Module]) -> Any:
    """The family's causal LM with `_Converted` before it, and its attention class with ours before it."""
    parts = {
        "config_class": config,
        "attention": type(f"ToMoE{attention.__name__}", (Attention, attention), {"__module__": __name__}),
    }
    return type(f"ToMoE{base.__name__}", (_Converted, base), {"__module__": __name__, **parts})


_FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaAttention),
    "mistral": (MistralForCausalLM, MistralAttention),
    "qwen2": (Qwen2ForCausalLM, Qwen2Attention),
    "qwen3": (Qwen3ForCausalLM, Qwen3Attention),
    "gemma": (GemmaForCausalLM, GemmaAttention),
    "phi": (PhiForCausalLM, PhiAttention),
}

MODELS = {name: _converted_model(CONFIGS[name], *parts) for name, parts in _FAMILIES.items()}
"""Model type of a dense model -> class of its converted form, ``ToMoELlamaForCausalLM`` for example."""

# Loaders look classes up by name, the configuration's here too.
globals().update({kind.__name__: kind for kind in (*CONFIGS.values(), *MODELS.values())})


# A folder's own copy is found by its auto_map, and must not take the installed one's place.
if not __name__.startswith("transformers_modules"):
    for _model in MODELS.values():
        AutoConfig.register(_model.config_class.model_type, _model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(_model.config_class, _model, exist_ok=True)
