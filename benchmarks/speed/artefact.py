"""T4: how large an expert is against its base, and whether it comes back from disk bit by bit.

One base is really built, written, loaded and compared. Of the published shapes no weights are at hand: a band expert
is made with drawn numbers, as its size depends on shapes alone, and a switch expert with weights drawn at random, the
hardest to code.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.harness import Figure, Outcome, Settings
from benchmarks.speed.shapes import shape_of, shaped_model
from freemoe.core.errors import FreeMoEError
from freemoe.core.files import write_atomic
from freemoe.domain_experts.expert import DomainExpert, band_expert, switch_expert
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.models.mask import Mask
from freemoe.models.sorted_code import encode_sorted
from freemoe.models.weights import WeightMatrix, find_weights

PUBLISHED = {name: shape_of(name) for name in ("Llama-2-7B", "Llama-2-70B", "Llama-3-8B", "Mixtral-8x7B")}

BAND = Band("wanda", 0.4, 0.5)
"""10 % in the middle of the ranking: both of its ends are stored."""

OFF = 0.01
_BAND_TARGET, _SWITCH_TARGET = 0.1, 1.0
_DTYPES = {"U8": torch.uint8, "U16": torch.uint16, "I32": torch.int32, "F32": torch.float32}


def run(settings: Settings) -> Outcome:
    """Sizes against bf16 bases in per cent, and weights that differ after save, load and regeneration."""
    with settings.progress.stage("artefact", 2 + len(PUBLISHED)) as advance, TemporaryDirectory() as folder:
        built, details = _built(Path(folder), settings)
        advance(2)
        figures, shapes = [], {}
        for name in list(PUBLISHED)[: 1 if settings.quick else None]:
            found, shapes[name] = _published(name, settings.seed)
            figures += found
            advance(1)
    return Outcome((*built, *figures), {"built": details, "published": shapes})


def file_bytes(shapes: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> int:
    """Bytes of a safetensors file, its header included, from the types and shapes of its tensors alone."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    # The order of the file: wide types first, then by name; offsets are written out, so that it counts.
    header: dict[str, Any] = {}
    end = 0
    for key in sorted(shapes, key=lambda k: (-shapes[k][0].itemsize, k)):
        dtype, shape = shapes[key]
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[key] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = len(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode())
    return 8 + -(-text // 8) * 8 + end


def shapes_of(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, Sequence[int]]]:
    """Types and shapes, as `file_bytes` takes them."""
    return {k: (v.dtype, tuple(v.shape)) for k, v in tensors.items()}


def stand_in(model_type: str, values: dict[str, Any]) -> Any:
    """A causal LM of these settings that takes no memory: every parameter is one bf16 zero, seen many times."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    zero = torch.zeros((), dtype=torch.bfloat16)
    for module in model.modules():
        for own, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, own, nn.Parameter(zero.expand(parameter.shape), requires_grad=False))
    model.tie_weights()
    return model


def _norms(weights: Sequence[WeightMatrix], rng: np.random.Generator) -> dict[str, Tensor]:
    """Input norms with the heavy tail that real ones have: tap -> ``(E, C)`` fp32."""
    shapes = {w.tap: (w.num_experts, w.num_columns) for w in weights}
    return {tap: torch.from_numpy(rng.lognormal(size=shape)).float() for tap, shape in shapes.items()}


def _scattered(size: int, rng: np.random.Generator) -> Tensor:
    """Positions that are off at random, each with the chance `OFF`."""
    drawn = np.cumsum(rng.geometric(OFF, int(1.1 * OFF * size) + 10)) - 1
    return torch.from_numpy(drawn[drawn < size])


def _sizes(case: str, band: int, switch: int, base: int, small: bool = False) -> list[Figure]:
    """Both experts' shares of a base."""
    of = f"{band / 1e6:.2f} MB of {base / 1e9:.2f} GB"
    if small:
        of += (
            "; norms and ends grow with rows and columns, the base with their product: small shapes have a larger share"
        )
    return [
        Figure(f"band expert, {case}", 100 * band / base, None if small else _BAND_TARGET, "lower", " %", 3, of),
        Figure(f"switch expert, 1 % off, {case}", 100 * switch / base, _SWITCH_TARGET, "lower", " %", 3, f"{switch / 1e6:.2f} MB"),
    ]  # fmt: skip


def _published(name: str, seed: int) -> tuple[list[Figure], dict[str, Any]]:
    rng = np.random.default_rng(seed)
    model = stand_in(*PUBLISHED[name])
    weights = find_weights(model)
    base = 2 * sum(p.numel() for p in model.parameters())
    ends: dict[str, tuple[Tensor | None, Tensor | None]] = {
        w.name: tuple(torch.from_numpy(rng.integers(0, w.num_columns, (w.num_experts, w.num_rows))) for _ in range(2))
        for w in weights
    }  # pyright: ignore[reportAssignmentType]
    band = shapes_of(band_expert("domain/0", BAND, ends, _norms(weights, rng), weights).to_tensors())

    @cache
    def coded(size: int) -> int:
        # Codes of equal sizes are equally long, up to a few bytes in a hundred thousand.
        return len(encode_sorted(_scattered(size, rng)))

    switch = {f"domain/0|switch|{w.name}": (torch.uint8, (coded(w.size),)) for w in weights}
    sizes = file_bytes(band), file_bytes(switch)
    details = {
        "parameters": base // 2,
        "weights": sum(w.size for w in weights),
        "band_bytes": sizes[0],
        "switch_bytes": sizes[1],
    }
    return _sizes(f"{name} shape", *sizes, base), details


def _built(folder: Path, settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """Build, write, load and regenerate both kinds of expert on a random base, in fp32 and in bf16."""
    differ, details, figures = 0, {}, []
    for dtype in (torch.float32, torch.bfloat16):
        rng = np.random.default_rng(settings.seed)
        model = shaped_model("70M", settings).to(dtype)
        weights = find_weights(model)
        norms = _norms(weights, rng)
        rankings = BandRankings(weights, norms.__getitem__)
        band = band_expert("domain/0", BAND, rankings.band_ends(BAND), norms, weights)
        scattered = Mask.of_indices({w.name: _scattered(w.size, rng) for w in weights}, weights)
        switch = switch_expert("domain/0", scattered)
        expected = {"band": rankings.mask_of_band(BAND), "switch": scattered}

        name = str(dtype).removeprefix("torch.")
        model.save_pretrained(folder / name)
        seconds: dict[str, float] = {}
        # A bf16 base that is loaded in fp32 has the same values and must give the same expert.
        for loaded in dict.fromkeys((dtype, torch.float32)):
            fresh = find_weights(AutoModelForCausalLM.from_pretrained(folder / name, dtype=loaded))
            for kind, expert in (("band", band), ("switch", switch)):
                found, seconds[f"{kind}, loaded in {loaded}"] = _through_disk(
                    expert, folder / f"{kind}.safetensors", fresh
                )
                differ += expected[kind].difference(found).count + found.difference(expected[kind]).count
        sizes = [(folder / f"{kind}.safetensors").stat().st_size for kind in ("band", "switch")]
        computed = [file_bytes(shapes_of(e.to_tensors())) for e in (band, switch)]
        if sizes != computed:
            raise FreeMoEError(
                f"Files of {sizes} bytes were computed to have {computed}: the computed sizes are wrong."
            )
        details[name] = {"regenerate_seconds": seconds, "band_bytes": sizes[0], "switch_bytes": sizes[1]}
        off = sum(len(p) for p in switch.switches.values())
        details[name]["bits_per_position"] = 8 * sizes[1] / off
        if dtype is torch.bfloat16:
            parameters = sum(p.numel() for p in model.parameters())
            details["parameters"] = parameters
            case = f"built with {parameters / 1e6:.1f}M parameters"
            figures = _sizes(case, sizes[0], sizes[1], 2 * parameters, small=True)
    details["entropy_bits_per_position"] = -(OFF * math.log2(OFF) + (1 - OFF) * math.log2(1 - OFF)) / OFF
    name, note = "weights that differ after save, load, regenerate", "fp32, bf16, and bf16 loaded as fp32"
    exact = Figure(name, differ, 0, "lower", "", 0, note)
    return [exact, *figures], details


def _through_disk(expert: DomainExpert, path: Path, weights: list[WeightMatrix]) -> tuple[Mask, float]:
    """Write an expert and regenerate it from the file on another load of its base; also the seconds to regenerate."""
    write_atomic(path, save(expert.to_tensors()))
    described = json.loads(json.dumps(expert.manifest_entry()))
    began = time.perf_counter()
    found = DomainExpert.from_parts(described, load_file(path)).mask(weights)
    return found, time.perf_counter() - began
