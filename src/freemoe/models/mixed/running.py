"""A base whose linears act under different experts, row by row, while a block is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from freemoe.core.errors import RecipeError
from freemoe.models.hooks import replace_method
from freemoe.models.mask import Mask
from freemoe.models.mixed.board import MixedBoard, Parts, Tiles
from freemoe.models.mixed.cost import row_limits
from freemoe.models.mixed.linear import BatchMask, mixed_linear
from freemoe.models.mixed.rows import ExpertAssignment

Strategy = Literal["auto", "fused", "scratch"]
STRATEGIES: tuple[Strategy, ...] = ("auto", "fused", "scratch")

_MOST_KNOWN = 32


class MixedBatch:
    """Which expert each sequence of the batch acts under, from `assign` on until the next one; at first the base."""

    def __init__(
        self,
        board: MixedBoard,  # What the base's experts have off
        # Makes the mask of an expert by name, from the untouched base; raises for one that is not there
        mask_of: Callable[[str], Mask],
        # ``fused`` leaves out what is off while it multiplies, ``scratch`` multiplies by masked copies of the
        # weights, ``auto`` takes the quicker one for each size of input
        strategy: Strategy,
        # Whether the block's weights stand in the model now; while not, every linear does what it always does
        rules: Callable[[], bool],
        # The bands of an expert by name, where it is nothing else, for kernels that make masks of them
        tiles_of: Callable[[str], Tiles | None] = lambda name: None,
    ) -> None:
        self.strategy: Strategy = strategy
        self._board, self._rules = board, rules
        self._mask_of, self._tiles_of = mask_of, tiles_of
        self._plans: dict[str, BatchMask] = {}
        self._names: tuple[str, ...] = ()
        # A server's batches come back to the same names.
        self._known: dict[tuple[str, ...], tuple[dict[str, Parts], dict[str, BatchMask]]] = {}

    @property
    def assigned_experts(self) -> tuple[str, ...]:
        """The expert of every sequence; empty before the first `assign`."""
        return self._names

    def assign(self, names: Sequence[str]) -> None:
        """From now on sequence i of every batch acts under the expert ``names[i]``: ``base``, ``a``, ``a+b`` or ``a&b``.

        An input of a linear with n rows is taken as ``len(names)`` equal contiguous parts: sequences of a batch, also flattened;
        beams or several answers per sequence; single tokens, where names has one entry for each. No names at all are the base's.

        Raises:
            UnknownNameError: One of them is no expert.
            DataError: One has fused experts of a mixture off; the names before stay assigned.
        """
        parts = self._board.get_experts(list(dict.fromkeys(names)), self._mask_of, self._tiles_of)
        known, plans = self._known.get(tuple(names), ({}, {}))
        if known.keys() != parts.keys() or any(known[name] is not own for name, own in parts.items()):
            assignment, plans = ExpertAssignment(names), {}
            for name, weight in self._board.weights.items():
                own = {expert: held[name] for expert, held in parts.items() if name in held}
                if own:
                    plans[name] = BatchMask.from_weight_masks(weight, assignment, own)
            # What the board forgot meanwhile is not held here either.
            self._known = {k: v for k, v in self._known.items() if self._board.holds_experts(v[0])}
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[tuple(names)] = parts, plans
        self._names, self._plans = tuple(names), plans

    def forward(self, name: str, base: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """What the linear of a weight gives; ``base`` is what it would give by itself."""
        plan = self._plans.get(name)
        if plan is None or not self._rules():
            return base(x)
        loops = self.strategy == "fused"
        if self.strategy == "auto":
            loops = x.numel() // x.shape[-1] <= row_limits(x.device).walked
        return mixed_linear(plan, x, base, loops, self._board.scratch)


@contextmanager
def open_mixed_batch(board: MixedBoard, **given: Any) -> Iterator[MixedBatch]:
    """Open a base for mixed batches; behind the block every module's forward is its own again. Gradients are off inside.

    Raises:
        RecipeError: An unknown strategy.
        DataError: This base cannot be mixed.
    """
    if given["strategy"] not in STRATEGIES:
        raise RecipeError(f"Unknown strategy {given['strategy']!r} of a mixed batch. Allowed: {', '.join(STRATEGIES)}.")
    board.require_mixable()
    run = MixedBatch(board, **given)
    with ExitStack() as stack:
        for name, weight in board.weights.items():
            if not weight.is_fused:
                stack.enter_context(replace_method(weight.module, partial(run.forward, name, weight.module.forward)))
        stack.enter_context(torch.no_grad())
        yield run
