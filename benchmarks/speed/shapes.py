"""Random bases of a size: what the benchmarks of calibration and switching run on."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch


def random_model(
    model_type: str, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", /, **sizes: Any
) -> Any:
    """Build a causal LM from a configuration, with random weights, in evaluation mode.

    Args:
        model_type: As in ``config.model_type``.
        seed: Of the weights; torch's own state of random numbers is left as it was.
        dtype: Of the weights.
        device: Where they are drawn, matrix by matrix; each kind of device draws its own.
        sizes: Values of the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    there = torch.device(device)
    with torch.random.fork_rng(devices=[] if there.type == "cpu" else [there]), drawn_on(there):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def drawn_on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, tensors are made on a device; 13 GB of weights never pass through the host."""
    return nullcontext() if device.type == "cpu" else device


def write_random_checkpoint(folder: Path, model_type: str, seed: int, **sizes: Any) -> int:
    """Write such a model in bf16, one shard per decoder layer, and no more than one in memory.

    Returns:
        Bytes of its weights.
    """
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    shards: dict[str, list[tuple[str, Any]]] = {}
    for name, parameter in empty.named_parameters():
        shards.setdefault(".".join(name.split(".")[:3]), []).append((name, parameter))
    where, total = {}, 0
    for number, parameters in enumerate(shards.values()):
        values = {
            name: torch.ones(p.shape, dtype=torch.bfloat16)
            if p.ndim == 1
            else torch.empty(p.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, p in parameters
        }
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(values, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(values, file)
        total += sum(v.nbytes for v in values.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total


def llama_shape(
    quick: bool, seed: int, hidden: int, intermediate: int, layers: int, vocabulary: int, device: str = "cpu"
) -> Any:
    """A Llama of these sizes, or a tiny one in a quick run."""
    if quick:
        hidden, intermediate, layers, vocabulary = 64, 160, 2, 100
    heads = max(1, hidden // 64)
    return random_model(
        "llama",
        seed,
        torch.float32,
        device,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )
