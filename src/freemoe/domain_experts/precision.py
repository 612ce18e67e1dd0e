"""The number format of gradient passes: bfloat16 where the processor is faster with it, measured once.

Weights keep their own dtype and are never converted for good: PyTorch's autocast copies each matrix on its way into a
product, and the gradient comes back in the weight's own dtype. Stopping losses, which compare with each other alone, are taken
in it too; scores, which guard and report, never.
"""

from __future__ import annotations

import contextlib
import time
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from freemoe import runs

Compute = Literal["auto", "own", "bfloat16"]
"""What a recipe may ask for: what is faster, the model's own dtype, or bfloat16."""

# As many tokens as a pass has, about, and how often each side is timed.
_TOKENS, _ROUNDS = 512, 3
# Below this a measurement may be chance.
_CLEAR = 1.25
# Matrices of fewer weights run in microseconds: their own dtype is kept, and small models give the same results everywhere.
_SMALLEST = 1 << 17


def compute_dtype(wish: Compute, model: nn.Module) -> torch.dtype | None:
    """The dtype that gradient passes multiply in, or None for the model's own.

    Args:
        wish: ``"auto"`` measures, on a matrix of the model's commonest shape, whether bfloat16 is clearly faster there.
        model: A causal LM; one that is not fp32 keeps its own dtype in any case.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    if wish == "own" or any(p.dtype != torch.float32 for p in matrices):
        return None
    if wish == "auto":
        shapes = [tuple(p.shape[-2:]) for p in matrices]
        rows, columns = max(shapes, key=lambda s: (shapes.count(s), s))
        if rows * columns < _SMALLEST or speedup(matrices[0].device, rows, columns, torch.get_num_threads()) < _CLEAR:
            return None
    return torch.bfloat16


@cache
def speedup(device: torch.device, rows: int, columns: int, threads: int) -> float:
    """How many times as fast a linear layer of fp32 weights is under autocast to bfloat16, the copies included.

    Measured once per process, and kept in the record of its environment.

    Args:
        device: Where to measure.
        rows: Outputs of the layer.
        columns: Inputs of the layer.
        threads: CPU threads in use; another number is another measurement.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(device)
    x = torch.randn(_TOKENS, columns, generator=generator).to(device)
    seconds = {None: float("inf"), torch.bfloat16: float("inf")}
    # On a CPU the process's own time, so that other work on the machine decides nothing.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    with torch.no_grad():
        for turn in range(_ROUNDS + 1):
            for kind in seconds:
                began = clock()
                with computing(device, kind):
                    nn.functional.linear(x, weight)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                # The first turn warms up.
                if turn:
                    seconds[kind] = min(seconds[kind], clock() - began)
    found = seconds[None] / seconds[torch.bfloat16]
    runs.note_measured(f"bfloat16 against float32, {rows} x {columns}, {threads} threads on {device.type}", found)
    return found


def computing(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Inside, products run in a dtype; None changes nothing."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
