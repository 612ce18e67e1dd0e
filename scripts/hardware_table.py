"""Print the table of docs/hardware.md: what commands hold at their defaults, by the arithmetic of their own `--dry-run`.

    python -m scripts.hardware_table

Models are stand-ins of published shapes: nothing is downloaded, and no weight takes memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks.speed.artefact import stand_in
from freemoe.domain_experts.cost.memory import fitting_devices, stage_peaks
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.models.offload import resident_bytes
from freemoe.models.sublayers import find_sublayers
from freemoe.models.weights import find_weights
from freemoe.serve.engine.cache import token_bytes
from freemoe.serve.settings import EngineLimits
from freemoe.tomoe.cost.memory import estimate_memory
from freemoe.tomoe.gates.hypernetwork import Hypernetwork
from freemoe.tomoe.material import block_length
from freemoe.tomoe.recipe import ConvertRecipe

LLAMA = {"vocab_size": 128256, "max_position_embeddings": 131072, "num_key_value_heads": 8}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.2-1B": (
        "llama",
        LLAMA | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    ),
    "Llama-3.2-3B": (
        "llama",
        LLAMA | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "Llama-3.1-8B": (
        "llama",
        LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
    ),
    "OLMoE-1B-7B": (
        "olmoe",
        {"hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 50304, "max_position_embeddings": 4096},
    ),
}  # fmt: skip
"""As their config.json has them."""

SERVED = EngineLimits(context=4096)
"""The server's own, with the most tokens of a sequence that it takes by default."""


def needed(name: str) -> Iterator[tuple[str, float, float]]:
    """Command, bytes of the base in bf16, bytes above it."""
    model: Any = stand_in(*SHAPES[name])
    base = resident_bytes(model)
    build = BuildRecipe(model=name, domains={"domain": ("text:FILE",)})
    weights = find_weights(model)
    peaks = {
        stage: peak.expected
        for stage, peak in stage_peaks(
            model, weights, build.batch_tokens, build.bands.ratio, build.saliency.budget, build.saliency.text_step
        ).items()
    }
    yield "`build`, bands", base, max(peaks[s] for s in ("scoring", "calibration", "band search", "report"))
    yield "`build`, switches", base, max(peaks[s] for s in ("scoring", "learned", "report"))
    if SHAPES[name][0] == "llama":
        yield from _convert(name, model, base)
    else:
        yield "`trim`, 1M tokens that train", base, 10**6 * model.config.hidden_size * model.dtype.itemsize
    yield "`eval`", base, peaks["scoring"]
    cache = token_bytes(model.config, 2)
    yield f"`serve`, {SERVED.batch} sequences", base, SERVED.batch * SERVED.context * cache


def _convert(name: str, model: Any, base: int) -> Iterator[tuple[str, float, float]]:
    for checkpointing in (False, True):
        recipe = ConvertRecipe(model=name, text=("FILE",), train={"checkpointing": checkpointing})
        sublayers = find_sublayers(model)
        with torch.device("meta"):
            gates = Hypernetwork(sublayers, recipe)
        trained = sum(p.numel() for p in gates.parameters() if p.requires_grad)
        size = estimate_memory(recipe, sublayers, base, model.config.vocab_size, block_length(recipe, model), trained)
        yield f"`convert`{', `--checkpointing`' if checkpointing else ''}", base, size.peak_bytes - base


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| model | command | base, GiB | above it, GiB | fits |"
    yield "|---|---|---|---|---|"
    for name in SHAPES:
        for command, base, above in needed(name):
            yield f"| {name} | {command} | {base / 2**30:.1f} | {above / 2**30:.1f} | {fitting_devices(base + above)} |"


if __name__ == "__main__":
    print("\n".join(table()))
