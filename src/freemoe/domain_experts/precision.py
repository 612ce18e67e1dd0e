"""The number format of gradient passes: bfloat16 where the processor is faster with it, measured once.

Weights keep their own dtype and are never converted for good: PyTorch's autocast copies each matrix on its way into a
product, and the gradient comes back in the weight's own dtype. Stopping losses, which compare with each other alone, are taken
in it too; scores, which guard and report, never.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
        if rows * columns < _SMALLEST or speedup(matrices[0].device, rows, columns) < _CLEAR:
            return None
    return torch.bfloat16


@cache
def speedup(device: torch.device, rows: int, columns: int) -> float:
    """How many times as fast a linear layer of fp32 weights is under autocast to bfloat16, the copies included.

    Measured once per process, on one thread of a CPU, and kept in the record of its environment. Threads that wait for each other
    on a busy machine count as work, and both formats would look alike.

    Args:
        device: Where to measure.
        rows: Outputs of the layer.
        columns: Inputs of the layer.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(device)
    x = torch.randn(_TOKENS, columns, generator=generator).to(device)
    seconds: dict[torch.dtype | None, float] = {None: float("inf"), torch.bfloat16: float("inf")}
    # On a CPU the process's own time, so that other work on the machine decides nothing.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        _race(seconds, device, clock, x, weight)
    finally:
        torch.set_num_threads(threads)
    found = seconds[None] / seconds[torch.bfloat16]
    runs.note_measured(f"bfloat16 against float32, {rows} x {columns} on {device.type}", found)
    return found


def _race(
    seconds: dict[torch.dtype | None, float],
    device: torch.device,
    clock: Callable[[], float],
    x: Tensor,
    weight: Tensor,
) -> None:
    """Note the shortest time of each format, in turns."""
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


def computing(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Inside, products run in a dtype; None changes nothing."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
