"""T8: a converted model against its dense one, whole, in the same process, at every number of tokens; and its folder alone.

Half of the decoder's weights are active, as ToMoE counts them. Of these only queries, keys and the MLP are work that a
long prompt can be spared: value dimensions are chosen per token, and merely masked (ToMoE Eq. 4) except where there are
few tokens, each of which then reads the rows it keeps. So a ceiling stands beside every figure: what the products that
are left out, and the weights that are not read, would allow. All sizes are measured with as many threads as torch has, some
again with one, by the processor's own time. `alone` measures the exported folder where freemoe cannot be imported.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.devices import dtype_on, is_accelerator
from benchmarks.harness import Figure, Outcome, Settings, in_turns, one_clock, ratio
from benchmarks.speed.shapes import shape_of, shaped_model
from benchmarks.tomoe.alone import PAST, STEPS, seconds_alone
from freemoe.core.errors import NumericError
from freemoe.models.sublayers import DecoderSublayers, find_sublayers
from freemoe.tomoe.export import build_converted_model, export_converted_model
from freemoe.tomoe.modules import sparse_tokens
from freemoe.tomoe.structures.masked import apply_structure
from freemoe.tomoe.structures.structure import (
    LayerStructure,
    Structure,
    ValueGateTensors,
    active_parameters,
    dense_parameters,
    from_tensors,
)

SHAPE, EXPERTS = "half of Llama-2-7B", 8
SHARE = 0.5
INNER = 128
# Number of tokens in one call -> target; one token is decoded with a cache, the others are a fresh prompt.
_NEVER_SLOWER = 0.95
TARGETS: Mapping[int, float] = (
    {1: 1.35} | dict.fromkeys((2, 8, 32, 64, 128, 256, 512, 1024), _NEVER_SLOWER) | {2048: 1.5, 4096: 1.5}
)
# What is measured again with one thread, and what of the folder alone.
ONE_THREAD = (1, 64, 128, 2048, 4096)
ALONE = (1, 64)
QUICK_TOKENS = (1, 8, 64, 128)
SIZE_TARGET = 1.05


def random_masks(settings: Settings, sublayers: list[DecoderSublayers]) -> Structure:
    """Half of everything, drawn at random; every expert of the same width."""
    generator = torch.Generator().manual_seed(settings.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def half(rows: int, columns: int) -> Tensor:
        order = torch.rand(rows, columns, generator=generator).argsort(dim=1)
        return order < round(SHARE * columns)

    return [
        LayerStructure(
            qk=half(1, layer.rotary.num_bits)[0],
            vo=ValueGateTensors(
                project=normal(INNER, layer.hidden_size),
                embedding=normal(INNER),
                norm_weight=torch.ones(INNER),
                norm_bias=torch.zeros(INNER),
                decode=normal(layer.rotary.head_dim, INNER),
                offset=torch.zeros(layer.rotary.head_dim),
                keep=torch.tensor(round(SHARE * layer.rotary.head_dim)),
            ),
            router_weight=normal(EXPERTS, layer.hidden_size),
            router_bias=torch.zeros(EXPERTS),
            experts=half(EXPERTS, layer.intermediate_size),
        )
        for layer in sublayers
    ]


def tiled(structure: Structure, sublayers: list[DecoderSublayers]) -> Structure:
    """The masks of a small model, repeated until they fill a larger one: their shares, patterns and overlaps stay."""

    def over(tensor: Tensor, size: int) -> Tensor:
        """Repeat the last axis up to a size."""
        return tensor[..., torch.arange(size) % tensor.shape[-1]]

    found = []
    for number, layer in enumerate(sublayers):
        own, head_dim = structure[number % len(structure)], layer.rotary.head_dim
        if isinstance(own.vo, ValueGateTensors):
            keep = torch.tensor(max(1, round(int(own.vo.keep) / len(own.vo.offset) * head_dim)))
            project, decode = over(own.vo.project, layer.hidden_size), over(own.vo.decode.T, head_dim).T
            vo = replace(own.vo, project=project, decode=decode, offset=over(own.vo.offset, head_dim), keep=keep)
        else:
            vo = over(own.vo, head_dim)
        qk, router = over(own.qk, layer.rotary.num_bits), over(own.router_weight, layer.hidden_size)
        experts = over(own.experts, layer.intermediate_size)
        found.append(LayerStructure(qk, vo, router, own.router_bias, experts))
    return found


def trained_masks(settings: Settings, sublayers: list[DecoderSublayers]) -> Structure:
    """The masks of the bundled model's own conversion, tiled up."""
    from safetensors.torch import load_file

    from benchmarks.tomoe.quality import QUICK, TRAIN, bundled_recipe
    from freemoe.tomoe.pipeline import STRUCTURE, convert

    with tempfile.TemporaryDirectory() as scratch:
        recipe = bundled_recipe(Path(scratch), SHARE, EXPERTS, QUICK if settings.quick else TRAIN, settings.seed)
        return tiled(from_tensors(load_file(convert(recipe, progress=settings.progress) / STRUCTURE)), sublayers)


SOURCES: dict[str, Callable[[Settings, list[DecoderSublayers]], Structure]] = {
    "random masks": random_masks,
    "trained masks": trained_masks,
}


@torch.no_grad()
def run(settings: Settings) -> Outcome:
    """Measure every source of masks at every number of tokens."""
    tokens = QUICK_TOKENS if settings.quick else tuple(TARGETS)
    model = shaped_model(SHAPE, settings, vocab_size=1024, max_position_embeddings=8192)
    dense = _as_run(model, settings)
    sublayers = find_sublayers(model)
    figures: list[Figure] = []
    details: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "shape": shape_of(SHAPE, settings.quick)[1],
        "decoder_weights": dense_parameters(sublayers),
    }
    threads = torch.get_num_threads()
    again = () if threads == 1 or settings.quick or is_accelerator(settings.device) else ONE_THREAD
    total = len(SOURCES) * (len(tokens) + len(again) + 1)
    with settings.progress.stage("tomoe-speed", total) as advance:
        for name, source in SOURCES.items():
            if not settings.wants(name):
                continue
            structure = source(settings, sublayers)
            new = build_converted_model(model, structure)
            _check(model, new, structure, settings)
            new = _as_run(new, settings)
            more: dict[str, Any] = {}
            for own, sizes in ((threads, tokens), (1, again)):
                torch.set_num_threads(own)
                title = f"{name}, 1 thread" if own != threads else name
                try:
                    for count in sizes:
                        figure, seconds = _contest(dense, new, structure, count, settings)
                        figures.append(replace(figure, name=f"{figure.name}, {title}"))
                        more[f"seconds of {count}, {own} threads"] = seconds
                        advance(1)
                finally:
                    torch.set_num_threads(threads)
            del new
            found, more["folder alone"] = _folder(model, structure, name, settings)
            figures += found
            figures.append(_share(structure, sublayers, name))
            details[name] = more
            advance(1)
    return Outcome(tuple(figures), details)


def _as_run(model: Any, settings: Settings) -> Any:
    """What is compared is float32; what is timed on an accelerator is a copy in what one would run there."""
    return copy.deepcopy(model).to(dtype_on(settings.device)) if is_accelerator(settings.device) else model


def _check(model: Any, new: Any, structure: Structure, settings: Settings) -> None:
    """Raise unless both compute the same."""
    ids = _ids(64, settings.seed).to(model.device)
    with apply_structure(model, structure):
        want = model(ids).logits
    error = float((new(ids).logits - want).abs().max() / want.abs().max())
    if error > 1e-4:
        raise NumericError(f"The converted model differs from the masked one by {error:.1e} of its largest logit.")


def _ids(count: int, seed: int) -> Tensor:
    return torch.randint(3, 1000, (1, count), generator=torch.Generator().manual_seed(seed))


def _contest(
    model: Any, new: Any, structure: Structure, count: int, settings: Settings
) -> tuple[Figure, dict[str, list[float]]]:
    """Speed-up at one number of tokens, and the seconds of every round."""
    sides = {"dense": model, "ours": new}
    if count == 1:
        name = "decoding one token with a cache"
        calls = {side: _decoding(own, settings) for side, own in sides.items()}
        # Steps are short: more rounds instead of longer ones.
        rounds = settings.rounds * 4
    else:
        name = f"{count} tokens in one call"
        ids = _ids(count, settings.seed).to(model.device)
        calls = {side: lambda own=own: own(ids, use_cache=True, logits_to_keep=1) for side, own in sides.items()}
        rounds = min(settings.rounds, 3) if count >= 2048 else settings.rounds * (4 if count <= 64 else 1)
    seconds = in_turns(calls, rounds, clock=one_clock(torch.get_num_threads()))
    arithmetic, memory = ceilings(model, structure, count)
    note = f"ceilings: arithmetic {arithmetic:.2f}x, memory {memory:.2f}x"
    figure = Figure(name, ratio(seconds, "dense", "ours"), TARGETS.get(count), note=note)
    return figure, {side: [round(s, 5) for s in own] for side, own in seconds.items()}


def _decoding(model: Any, settings: Settings) -> Callable[[], None]:
    """``STEPS`` tokens, one after the other, after ``PAST`` others."""
    ids = _ids(PAST + STEPS, settings.seed).to(model.device)
    past = model(ids[:, :PAST], use_cache=True).past_key_values

    def decode() -> None:
        cache = copy.deepcopy(past)
        for step in range(STEPS):
            model(ids[:, PAST + step : PAST + step + 1], past_key_values=cache, use_cache=True)

    return decode


def ceilings(model: Any, structure: Structure, count: int) -> tuple[float, float]:
    """What fewer products, and what fewer weights to read, allow at the most in a call of so many tokens (1: a decoded one).

    Returns:
        Products of the dense model over ours; weights read by the dense model over those read by ours.
    """
    sublayers = find_sublayers(model)
    head = model.lm_head.weight.numel()
    dense_work = ours_work = head / count
    dense_read = ours_read = float(head)
    for layer, own in zip(sublayers, structure, strict=True):
        query_width = int(layer.rotary.expand_bits(own.qk.float()).sum())
        whole, parts = layer.rotary.head_dim, len(layer.up) + 1
        per_dimension = layer.hidden_size * (layer.heads + layer.kv_heads)
        gate = own.vo.project.numel() + own.vo.decode.numel() if isinstance(own.vo, ValueGateTensors) else 0
        few = not isinstance(own.vo, ValueGateTensors) or count <= sparse_tokens(own.value_width, whole)
        values = own.value_width if few else whole
        extra = gate + own.router_weight.numel()
        mlp = parts * layer.hidden_size
        # Scores, and sums of values, among a prompt's tokens or with those in the cache.
        others = layer.heads * ((count + 1) / 2 if count > 1 else PAST)
        dense_work += 2 * per_dimension * whole + mlp * layer.intermediate_size + 2 * others * whole
        ours_work += per_dimension * (query_width + values) + mlp * max(own.neuron_counts) + extra
        ours_work += others * (query_width + whole)
        asked = min(len(own.experts), round(len(own.experts) * (1 - (1 - 1 / len(own.experts)) ** count)))
        touched = int(own.experts[: max(1, asked)].any(dim=0).sum())
        dense_read += 2 * per_dimension * whole + mlp * layer.intermediate_size
        # Each of several tokens keeps other dimensions, and together they read them all.
        read = own.value_width if count == 1 or not isinstance(own.vo, ValueGateTensors) else whole
        ours_read += per_dimension * (query_width + read) + mlp * touched + extra
    return dense_work / ours_work, dense_read / ours_read


def _folder(
    model: Any, structure: Structure, name: str, settings: Settings
) -> tuple[list[Figure], dict[int, tuple[list[float], list[float]]]]:
    """The exported folder: its bytes over those of the dense one, and its speed-up without freemoe."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model.save_pretrained(root / "dense")
        export_converted_model(model, structure, root / "ours")
        sizes = [sum(p.stat().st_size for p in (root / side).rglob("*")) for side in ("ours", "dense")]
        # That process has no device of its own.
        here, threads = not is_accelerator(settings.device), torch.get_num_threads()
        seconds = seconds_alone(root / "dense", root / "ours", ALONE, threads, settings) if here else {}
    figures = [Figure(f"size on disk over dense, {name}", sizes[0] / sizes[1], SIZE_TARGET, "lower", digits=3)]
    for count, (dense, ours) in seconds.items():
        what = "decoding one token with a cache" if count == 1 else f"{count} tokens in one call"
        value = statistics.median(dense) / statistics.median(ours)
        figures.append(Figure(f"{what}, {name}, folder without freemoe", value, TARGETS[count]))
    return figures, seconds


def _share(structure: Structure, sublayers: list[DecoderSublayers], name: str) -> Figure:
    """Active share as ToMoE counts it, and the share of weights that a prompt's token really multiplies."""
    dense = dense_parameters(sublayers)
    nominal = active_parameters(structure, sublayers) / dense
    # Values that are masked are computed, and the gate and the router are work of their own.
    idle = extra = 0
    for layer, own in zip(sublayers, structure, strict=True):
        if isinstance(own.vo, ValueGateTensors):
            idle += layer.hidden_size * (layer.heads + layer.kv_heads) * (layer.rotary.head_dim - own.value_width)
            extra += own.vo.project.numel() + own.vo.decode.numel()
        extra += own.router_weight.numel()
    real = nominal + (idle + extra) / dense
    note = f"really multiplied by a prompt's tokens: {real:.1%}"
    return Figure(f"active weights, {name}", 100 * nominal, unit=" %", digits=1, note=note)
