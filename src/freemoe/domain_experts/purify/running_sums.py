"""Running sums of gradients: of a small matrix as it is, of a large one in its strongest directions only.

A gradient is a sum of outer products, one per token. What documents have in common lies in few directions, what belongs to
each alone in all of them. A sum that forgets the weak directions keeps the former, cannot learn documents by heart, and
takes the memory of some vectors instead of a matrix's.

Shapes: E fused experts (1 for a plain linear), R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

KEPT, COUNTED = 32, 16
"""Directions of a large matrix that are kept, and the strongest of them, which count: the others may still grow."""
SMALL = 128
"""A matrix with a side of no more than this is small: it has too few weights to learn by heart with, and needs all directions."""


class RunningSum(Protocol):
    """A sum of matrices of one shape ``(E, R, C)``."""

    def add(self, matrix: Tensor, factor: float) -> None:
        """Add ``factor`` times a matrix ``(E, R, C)``; the matrix is not kept."""
        ...

    def fade(self, factor: float) -> None:
        """Let what was added so far count ``factor`` times."""
        ...

    def total(self, directions: int = COUNTED) -> Tensor:
        """What the sum comes to, that of a large matrix in its strongest directions: ``(E, R, C)`` fp32, not to be changed."""
        ...

    def copy(self) -> Self:
        """The sum as it is now; adding to the one leaves the other alone."""
        ...

    def state(self) -> dict[str, Tensor]:
        """The sum as tensors by name."""
        ...

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from a `state`."""
        ...


class WholeSum:
    """Every entry of the sum."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self._sum = torch.zeros(shape, device=device)

    def add(self, matrix: Tensor, factor: float) -> None:
        """Add ``factor`` times a matrix ``(E, R, C)``."""
        self._sum.add_(matrix, alpha=factor)

    def fade(self, factor: float) -> None:
        """Multiply the sum by a factor."""
        self._sum.mul_(factor)

    def total(self, directions: int = COUNTED) -> Tensor:
        """The sum itself, ``(E, R, C)`` fp32: not to be changed."""
        return self._sum

    def copy(self) -> WholeSum:
        """The sum as it is now."""
        twin = WholeSum((0, 0, 0), self._sum.device)
        twin._sum = self._sum.clone()
        return twin

    def state(self) -> dict[str, Tensor]:
        """The sum."""
        return {"sum": self._sum}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from it."""
        self._sum.copy_(state["sum"])


class LowRankSum:
    """The sum's strongest directions: ``left @ right^T`` of shapes ``(E, R, KEPT)`` and ``(E, C, KEPT)``, right orthonormal.

    Every matrix that is added turns them by one step of subspace iteration (Halko et al. 2011, arXiv:0909.4061).

    Args:
        shape: (E, R, C).
        seed: Of the directions that the search starts from.
        device: Where it lives.
    """

    def __init__(self, shape: tuple[int, int, int], seed: int, device: torch.device) -> None:
        experts, rows, columns = shape
        start = torch.randn(columns, KEPT, generator=torch.Generator().manual_seed(seed))
        self._right = torch.linalg.qr(start).Q.expand(experts, -1, -1).to(device)
        self._left = torch.zeros(experts, rows, KEPT, device=device)

    def add(self, matrix: Tensor, factor: float) -> None:
        """Add ``factor`` times a matrix ``(E, R, C)``, as far as it lies in directions that stay."""
        matrix = matrix.float()
        rows = torch.linalg.qr(torch.baddbmm(self._left, matrix, self._right, alpha=factor)).Q
        # What the sum and the matrix are in these rows.
        columns = torch.baddbmm(self._right @ (self._left.mT @ rows), matrix.mT, rows, alpha=factor)
        self._right, corner = torch.linalg.qr(columns)
        self._left = rows @ corner.mT

    def fade(self, factor: float) -> None:
        """Multiply the sum by a factor."""
        self._left = self._left * factor

    def total(self, directions: int = COUNTED) -> Tensor:
        """The sum in its strongest directions, ``(E, R, C)`` fp32."""
        if directions >= KEPT:
            return self._left @ self._right.mT
        left, sizes, across = torch.linalg.svd(self._left, full_matrices=False)
        return (left[..., :directions] * sizes[:, None, :directions]) @ (across[:, :directions] @ self._right.mT)

    def copy(self) -> LowRankSum:
        """The sum as it is now."""
        # Tensors are replaced, never changed in place.
        twin = object.__new__(LowRankSum)
        twin._left, twin._right = self._left, self._right
        return twin

    def state(self) -> dict[str, Tensor]:
        """Both sides."""
        return {"left": self._left, "right": self._right}

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from them."""
        self._left, self._right = state["left"], state["right"]


def is_large(shape: Sequence[int]) -> bool:
    """Whether sums of matrices of a shape ``(E, R, C)`` keep their strongest directions only."""
    return min(shape[1:]) > SMALL


def running_sum(shape: tuple[int, int, int], seed: int, device: torch.device) -> RunningSum:
    """An empty sum of matrices of a shape ``(E, R, C)``; ``seed`` as for `LowRankSum`."""
    if is_large(shape):
        return LowRankSum(shape, seed, device)
    return WholeSum(shape, device)


def state_bytes(shape: tuple[int, int, int]) -> int:
    """Memory of a sum of matrices of a shape."""
    experts, rows, columns = shape
    return 4 * experts * ((rows + columns) * KEPT if is_large(shape) else rows * columns)
