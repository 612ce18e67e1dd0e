"""Configurations of converted models, apart from the models themselves: what only reads config.json loads no model code.

A copy of this file lies in every exported folder: it may import transformers alone.
"""

from __future__ import annotations

from transformers import GemmaConfig, LlamaConfig, MistralConfig, PhiConfig, Qwen2Config, Qwen3Config


class ToMoELlamaConfig(LlamaConfig):
    """Configuration of a converted Llama."""

    model_type = "tomoe_llama"
    tomoe: dict | None = None


class ToMoEMistralConfig(MistralConfig):
    """Configuration of a converted Mistral."""

    model_type = "tomoe_mistral"
    tomoe: dict | None = None


class ToMoEQwen2Config(Qwen2Config):
    """Configuration of a converted Qwen2."""

    model_type = "tomoe_qwen2"
    tomoe: dict | None = None


class ToMoEQwen3Config(Qwen3Config):
    """Configuration of a converted Qwen3."""

    model_type = "tomoe_qwen3"
    tomoe: dict | None = None


class ToMoEGemmaConfig(GemmaConfig):
    """Configuration of a converted Gemma."""

    model_type = "tomoe_gemma"
    tomoe: dict | None = None


class ToMoEPhiConfig(PhiConfig):
    """Configuration of a converted Phi."""

    model_type = "tomoe_phi"
    tomoe: dict | None = None
