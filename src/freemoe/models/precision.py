"""The number format that purification works in: bfloat16 where the processor is faster with it, measured once.

While switches are searched for, the model stands in that format; its own weights wait aside and come back bit by bit. Sums over
passes are kept in fp32. Stopping losses, which compare with each other alone, are taken in it too; scores, which guard and
report, never.

Autocast would copy every matrix and its input anew for every product, and keep the sums between layers in fp32: a third slower
and a third more memory on SmolLM2-135M.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from functools import cache
from typing import Literal

import torch
from torch import nn

from freemoe.core.environment import note_measured

Compute = Literal["auto", "own", "bfloat16"]
"""What a recipe may ask for: what is faster, the model's own dtype, or bfloat16."""

# As many tokens as a pass has, about, and how often each side is timed.
_TOKENS, _ROUNDS = 512, 3
# Below this a measurement may be chance.
_CLEAR = 1.25
# Matrices of fewer weights run in microseconds: their own dtype is kept, and small models give the same results everywhere.
_SMALLEST = 1 << 17


def compute_dtype(wish: Compute, model: nn.Module) -> torch.dtype | None:
    """The dtype to purify in, or None for the model's own.

    ``"auto"`` measures, on a matrix of the model's commonest shape, whether bfloat16 is clearly faster there; a model that
    is not fp32 keeps its own dtype in any case.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    chosen = wish == "bfloat16" and all(p.dtype == torch.float32 for p in matrices)
    if is_measured(wish, model):
        chosen = bfloat16_speedup(matrices[0].device, *_commonest_shape(matrices)) >= _CLEAR
    return torch.bfloat16 if chosen else None


def is_measured(wish: Compute, model: nn.Module) -> bool:
    """Whether `compute_dtype` measures, so that another process may find another format."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    if wish != "auto" or any(p.dtype != torch.float32 for p in matrices):
        return False
    rows, columns = _commonest_shape(matrices)
    return rows * columns >= _SMALLEST


def _commonest_shape(matrices: list[nn.Parameter]) -> tuple[int, int]:
    """Rows and columns that most matrices have."""
    shapes = [(p.shape[-2], p.shape[-1]) for p in matrices]
    return max(shapes, key=lambda s: (shapes.count(s), s))


@cache
def bfloat16_speedup(device: torch.device, rows: int, columns: int) -> float:
    """How many times as fast a linear layer is in bfloat16 as in fp32.

    Measured once per process, on one thread of a CPU, and kept in the record of its environment. Threads that wait for each other
    on a busy machine count as work, and both formats would look alike.
    """
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(device)
    x = torch.randn(_TOKENS, columns, generator=generator).to(device)
    seconds = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    # On a CPU the process's own time, so that other work on the machine decides nothing.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    sides = {kind: (x.to(kind), weight.to(kind)) for kind in seconds}
    try:
        with torch.no_grad():
            # In turns, of which the first warms up.
            for turn, (kind, side) in itertools.product(range(_ROUNDS + 1), sides.items()):
                began = clock()
                nn.functional.linear(*side)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                if turn:
                    seconds[kind] = min(seconds[kind], clock() - began)
    finally:
        torch.set_num_threads(threads)
    found = seconds[torch.float32] / seconds[torch.bfloat16]
    note_measured(f"bfloat16 against float32, {rows} x {columns} on {device.type}", found)
    return found


@contextlib.contextmanager
def held_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, the model's parameters are in a dtype; its own come back bit by bit, whatever was done to the copies.

    Buffers stay as they are: tables of positions need their precision. None changes nothing.
    """
    own = [] if dtype is None else [(p, p.data, p.grad) for p in model.parameters()]
    try:
        for p, values, _ in own:
            p.grad = None
            p.data = values.to(dtype)
        yield
    finally:
        for p, values, gradient in own:
            p.grad = None
            p.data = values
            p.grad = gradient
