"""Random bases of a size: what the benchmarks of calibration and switching run on."""

from __future__ import annotations

from typing import Any

import torch


def random_model(model_type: str, seed: int, dtype: torch.dtype = torch.float32, /, **sizes: Any) -> Any:
    """Build a causal LM from a configuration, with random weights, in evaluation mode.

    Args:
        model_type: As in ``config.model_type``.
        seed: Of the weights; torch's own state of random numbers is left as it was.
        dtype: Of the weights.
        sizes: Values of the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def llama_shape(quick: bool, seed: int, hidden: int, intermediate: int, layers: int, vocabulary: int) -> Any:
    """A Llama of these sizes, or a tiny one in a quick run."""
    if quick:
        hidden, intermediate, layers, vocabulary = 64, 160, 2, 100
    heads = max(1, hidden // 64)
    return random_model(
        "llama",
        seed,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )
