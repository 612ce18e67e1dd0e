"""Random bases of the shapes in ``shapes.yaml``: what benchmarks of speed and memory run on."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.harness import Settings

_SHAPES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def shape_of(name: str, quick: bool = False) -> tuple[str, dict[str, Any]]:
    """A row of the table: model type, and values of the configuration; in a quick run those of a small model of that type."""
    values = dict(_SHAPES[name])
    small = values.pop("quick", None)
    if quick:
        values = dict(_SHAPES["quick"]) if small is None else values | small
    return values.pop("model_type"), values


def shaped_model(name: str, settings: Settings, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random base of a row of the table, some of its values exchanged."""
    model_type, values = shape_of(name, settings.quick)
    return random_model(model_type, settings.seed, dtype, settings.device, **values | changes)


def random_model(
    model_type: str, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu", /, **sizes: Any
) -> Any:
    """A causal LM with random weights drawn on its device, matrix by matrix; torch's own random state is left as it was."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
    there = torch.device(device)
    # Made on the device: 13 GB of weights never pass through the host.
    inside = nullcontext() if there.type == "cpu" else there
    with torch.random.fork_rng(devices=[] if there.type == "cpu" else [there]), inside:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


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
