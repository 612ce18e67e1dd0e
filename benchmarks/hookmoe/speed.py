"""T10, the half that trains nothing: time to the first token and between tokens, with half of the experts and hooks.

Random weights, fp32, batch 1, greedy, in turns in one process, at one thread (the processor's time) and at two. Two ratios
stand beside each other. *The trim's*: both sides run by the same code, once transformers' own (prompts always are) and once,
for single tokens, our compiled loops. *What a user gets*: transformers' own at full k over the loops trimmed, which holds the
loops' gain too. The ceiling is what FLOPs (first token) or bytes (further tokens) allow; for further tokens also what is left
of it beside the time that a step of the same layers takes when they have hardly any weights.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.devices import dtype_on, is_accelerator
from benchmarks.harness import Figure, Outcome, Settings, one_clock
from benchmarks.speed.shapes import random_model, shape_of
from freemoe.assets import BUNDLED_MOE
from freemoe.compat.transformers import experts_backend
from freemoe.evals import speed
from freemoe.evals.speed import time_request
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.decoding.quick import quick_decoding
from freemoe.hookmoe.hooks.hook import allocate_units, new_hooks
from freemoe.hookmoe.measure import count_parameters
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.methods import default_units
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.models.checkpoints.loading import load_base

TTFT, ITL = 1.42, 1.3
NEW = 65
OURS = "compiled"

SHAPES = ("Mixtral shape", "OLMoE shape", "Qwen3-MoE shape")
# So narrow that a step reads next to nothing.
_NARROW = {
    "hidden_size": 32,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
}

Side = tuple[bool, bool]
"""Whether it is trimmed, and whether it is run by our loops."""
SIDES: list[Side] = [(lean, ours) for ours in (False, True) for lean in (False, True)]


def run(settings: Settings) -> Outcome:
    """Measure every shape at every number of threads."""
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        once = settings.quick or is_accelerator(settings.device) or (os.cpu_count() or 1) < 2
        for count in (1,) if once else (1, 2):
            torch.set_num_threads(count)
            for name in (*SHAPES, "bundled mixture"):
                lengths = (16,) if settings.quick else (256, 1024) if name == "Mixtral shape" else (256,)
                for length in lengths:
                    found, record = _contest(name, length, settings)
                    title = f"{name}, {length} tokens, {count} thread{'s' * (count > 1)}"
                    figures += [replace(figure, name=f"{figure.name}, {title}") for figure in found]
                    details[title] = record
    finally:
        torch.set_num_threads(threads)
    return Outcome(tuple(figures), details)


def shaped(name: str, settings: Settings, **sizes: Any) -> Any:
    """A base by its name here, with some of its sizes exchanged."""
    if name == "bundled mixture":
        return load_base(BUNDLED_MOE, dtype="float32", device=settings.device)[0]
    model_type, shape = shape_of(name, settings.quick)
    made = shape | {key: value for key, value in sizes.items() if key in shape}
    made["num_key_value_heads"] = min(made["num_key_value_heads"], made["num_attention_heads"])
    return random_model(model_type, settings.seed, dtype_on(settings.device), settings.device, **made)


def halved(model: Any) -> Trimmed:
    """Half of every layer's experts, with the default hooks beside the blocks."""
    base = plan_of(model)
    layers = {number: 1.0 for number, k in enumerate(base.ks) if k is not None}
    plan = uniform_plan(base, max(1, max(k or 0 for k in base.ks) // 2))
    hooks = new_hooks(model, allocate_units(default_units(model, plan), layers), "block", "parallel")
    return Trimmed(plan, hooks, "kept_mass")


def ceilings(model: Any, trimmed: Trimmed, length: int) -> tuple[float, float]:
    """Largest possible ratios: FLOPs of a prompt, bytes of the weights that one new token reads."""
    base, config = plan_of(model), model.config
    # The input embedding is looked up, not multiplied; the head reads one position of a prompt.
    embedding = config.vocab_size * config.hidden_size
    head = embedding
    attention = 2 * length * length * config.hidden_size * config.num_hidden_layers

    def flops(active: int) -> float:
        return 2.0 * length * (active - 2 * embedding) + 2.0 * head + attention

    full = count_parameters(model, base).active
    cut = count_parameters(model, trimmed.plan, trimmed.hooks).active
    return flops(full) / flops(cut), (full - embedding) / (cut - embedding)


def request(model: Any, prompt: Tensor, new: int) -> tuple[float, float]:
    """`time_request`; in one thread by the processor's own time, which others do not lengthen."""
    on_cpu = not is_accelerator(str(model.device))
    return time_request(model, prompt, new, one_clock(torch.get_num_threads()) if on_cpu else time.perf_counter)


def _measured(model: Any, trimmed: Trimmed, prompt: Tensor, rounds: int) -> dict[Side, list[tuple[float, float]]]:
    """Seconds to the first token and between tokens, of every side and round."""
    new = min(NEW, model.config.max_position_embeddings - prompt.shape[1])

    def timed(lean: bool, ours: bool) -> tuple[float, float]:
        plain = quick_decoding(model) if ours else nullcontext()
        with trimmed.attached(model, quick=ours) if lean else plain:
            # What is compiled, and what is decided once, is not of a request.
            request(model, prompt[:, :8], 4)
            return request(model, prompt, new)

    found = speed.in_turns({str(side): partial(timed, *side) for side in SIDES}, rounds, warm=False)
    return {side: found[str(side)] for side in SIDES}


def _contest(name: str, length: int, settings: Settings) -> tuple[list[Figure], dict[str, Any]]:
    """Figures of one base and prompt length."""
    model = shaped(name, settings)
    trimmed = halved(model)
    generator = torch.Generator().manual_seed(settings.seed)
    prompt = torch.randint(3, model.config.vocab_size, (1, length), generator=generator).to(model.device)
    seconds = _measured(model, trimmed, prompt, 3 * settings.rounds)
    ttft, itl = ({s: statistics.median(pair[i] for pair in seconds[s]) for s in SIDES} for i in (0, 1))
    idle = None
    if name in SHAPES:
        # A step whose layers have hardly any weights: calls, and whatever else does not shrink with a plan.
        narrow = shaped(name, settings, **_NARROW)
        short = torch.full((1, 64), 5, device=narrow.device)
        steps = _measured(narrow, halved(narrow), short, settings.rounds)
        idle = {side: statistics.median(pair[1] for pair in pairs) for side, pairs in steps.items()}
    own = experts_backend(model.config)
    judged = name in SHAPES
    first, further = ceilings(model, trimmed, length)
    a, b = (False, False), (True, False)
    note = f"{1000 * ttft[a]:.0f} -> {1000 * ttft[b]:.0f} ms; FLOPs allow {first:.2f}x"
    figures = [Figure(f"TTFT, both {own}", ttft[a] / ttft[b], TTFT if judged else None, note=note)]
    for title, a, b in (
        (f"both {OURS}", (False, True), (True, True)),
        (f"both {own}", (False, False), (True, False)),
        (f"{own} over {OURS}", (False, False), (True, True)),
    ):
        note = f"{1000 * itl[a]:.2f} -> {1000 * itl[b]:.2f} ms; bytes allow {further:.2f}x"
        if idle is not None and a[1] == b[1]:
            left = reachable(itl[a], idle[a], idle[b], further)
            note += f", beside {1000 * idle[a]:.2f} and {1000 * idle[b]:.2f} ms without weights {left:.2f}x"
        figures.append(Figure(f"ITL, {title}", itl[a] / itl[b], ITL if judged and a[1] else None, note=note))
    return figures, {
        "experts": [plan_of(model).to_text(), trimmed.plan.to_text()],
        "parameters": vars(count_parameters(model, plan_of(model))),
        "trimmed": vars(count_parameters(model, trimmed.plan, trimmed.hooks)),
        "ceilings": [first, further],
        "seconds": {
            f"{'trimmed' if s[0] else 'full'}, {OURS if s[1] else own}": [[round(v, 6) for v in p] for p in found]
            for s, found in seconds.items()
        },
    }


def reachable(full: float, idle: float, idle_trimmed: float, bytes_ratio: float) -> float:
    """The ratio if a trimmed step took its own idle time and the share of the full one's reading that bytes say."""
    reading = max(0.0, full - idle)
    return full / (idle_trimmed + reading / bytes_ratio)
