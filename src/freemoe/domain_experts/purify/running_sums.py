"""Running sums of gradients: of a small matrix as it is, of a large one in its strongest directions only.

A gradient is a sum of outer products, one per token. What documents have in common lies in few directions, what belongs to
each alone in all of them. A sum that forgets the weak directions keeps the former, cannot learn documents by heart, and
takes the memory of some vectors instead of a matrix's.

Shapes: E fused experts (1 for a plain linear), R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

KEPT, COUNTED = 32, 16
"""Directions of a large matrix that are kept, and the strongest of them, which count: the others may still grow."""
SMALL = 128
"""A matrix with a side of no more than this is small: it has too few weights to learn by heart with, and needs all directions."""
# Of a basis's norm: how much of the directions before is in the next ones, and (squared) what is added to its Gram matrix so that
# it has a Cholesky factor. What counts is many times as strong; double precision has the squares of both.
_SPARE, _SHIFT = 1e-6, 1e-13
# Takes the place of a norm that is zero: no other fp32 matrix has a smaller one.
_NOTHING = 1e-46


class RunningSum:
    """A sum of matrices of one shape ``(E, R, C)``: every entry of it."""

    def __init__(self, shape: tuple[int, int, int], device: torch.device) -> None:
        self._sum = torch.zeros(shape, device=device)

    def add_matrix(self, matrix: Tensor, factor: float) -> None:
        """Add ``factor`` times a matrix ``(E, R, C)``; the matrix is not kept."""
        self._sum.add_(matrix, alpha=factor)

    def scale_by(self, factor: float) -> None:
        """Let what was added so far count ``factor`` times."""
        self._sum.mul_(factor)

    def add_sum(self, other: Self, factor: float) -> None:
        """Add ``factor`` times another sum of matrices of the same shape."""
        self.add_matrix(other._sum, factor)

    def to_dense(self) -> Tensor:
        """What the sum comes to, that of a large matrix in its strongest directions: ``(E, R, C)`` fp32, not to be changed."""
        return self._sum

    def copy(self) -> Self:
        """The sum as it is now; adding to the one leaves the other alone."""
        twin = copy.copy(self)
        twin._sum = self._sum.clone()
        return twin

    def to_state(self) -> dict[str, Tensor]:
        """The sum as tensors by name."""
        return {"sum": self._sum}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go on from a state."""
        self._sum.copy_(state["sum"])


class LowRankSum(RunningSum):
    """The sum's strongest directions: ``left @ right^T`` of shapes ``(E, R, KEPT)`` and ``(E, C, KEPT)``, right orthonormal.

    Every matrix that is added turns them by one step of subspace iteration (Halko et al. 2011, arXiv:0909.4061). Bases are
    made orthonormal by their small Gram matrix, which costs less than a QR, and for whose Cholesky factor no host waits.
    The seed is of the directions that the search starts from.
    """

    def __init__(self, shape: tuple[int, int, int], seed: int, device: torch.device) -> None:
        experts, rows, columns = shape
        start = torch.randn(columns, KEPT, generator=torch.Generator().manual_seed(seed))
        self._right = torch.linalg.qr(start).Q.expand(experts, -1, -1).to(device)
        self._left = torch.zeros(experts, rows, KEPT, device=device)
        self._counted: tuple[Tensor, Tensor] | None = None

    def add_matrix(self, matrix: Tensor, factor: float) -> None:
        """Add ``factor`` times a matrix ``(E, R, C)``, as far as it lies in directions that stay."""
        matrix = matrix.float()
        self._subspace_step(lambda x: matrix @ x, lambda x: matrix.mT @ x, factor)

    def add_sum(self, other: Self, factor: float) -> None:
        """Add ``factor`` times another sum of matrices of the same shape."""
        left, right = other._left, other._right
        self._subspace_step(lambda x: left @ (right.mT @ x), lambda x: right @ (left.mT @ x), factor)

    def _subspace_step(
        self, times: Callable[[Tensor], Tensor], across: Callable[[Tensor], Tensor], factor: float
    ) -> None:
        """Add a matrix that is told by its products with ``(E, C, KEPT)`` and, the other way, with ``(E, R, KEPT)``."""
        left, right = self._left, self._right
        rows = _orthonormal_basis(torch.add(left, times(right), alpha=factor))
        # What the sum and the matrix are in these rows. Where that is nothing the search goes on from the directions before.
        columns = torch.add(right @ (left.mT @ rows), across(rows), alpha=factor)
        self._right = _orthonormal_basis(columns, right)
        self._left = rows @ (columns.mT @ self._right)
        self._counted = None

    def scale_by(self, factor: float) -> None:
        """Multiply the sum by a factor."""
        self._left, self._counted = self._left * factor, None

    def to_dense(self) -> Tensor:
        """The sum in its strongest directions, ``(E, R, C)`` fp32."""
        find_strongest([self])
        assert self._counted is not None
        return self._counted[0] @ self._counted[1].mT

    def copy(self) -> Self:
        """The sum as it is now: tensors are replaced, never changed in place."""
        return copy.copy(self)

    def to_state(self) -> dict[str, Tensor]:
        """The two factors, as ``left`` and ``right``."""
        return {"left": self._left, "right": self._right}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from the factors of `to_state`."""
        self._left, self._right, self._counted = state["left"], state["right"], None


def _orthonormal_basis(basis: Tensor, spare: Tensor | None = None) -> Tensor:
    """An orthonormal basis of what ``(E, n, KEPT)`` spans, by shifted Cholesky QR (Fukaya et al. 2020, arXiv:1809.11085).

    Where a column is nothing, nothing takes its place; ``spare`` has orthonormal columns in place of those that others of
    ``basis`` make up for.
    """
    # In double precision, as a Gram matrix has the squares of what its basis has.
    wide = basis.double()
    if spare is not None:
        norm = torch.linalg.matrix_norm(wide, keepdim=True).clamp_(min=_NOTHING)
        wide = torch.addcmul(wide, norm, spare.double(), value=_SPARE)
    gram = wide.mT @ wide
    squares = gram.diagonal(dim1=-2, dim2=-1)
    squares.add_(squares.sum(-1, keepdim=True).mul_(_SHIFT).clamp_(min=torch.finfo(gram.dtype).tiny))
    factor = torch.linalg.cholesky_ex(gram).L
    return torch.linalg.solve_triangular(factor.mT, wide, upper=True, left=False).float()


def find_strongest(sums: Iterable[RunningSum]) -> None:
    """Find the directions of some sums that `RunningSum.to_dense` counts, together: a host waits for their device once."""
    waiting = [own for own in sums if isinstance(own, LowRankSum) and own._counted is None]
    if not waiting:
        return
    grams = [(wide := own._left.double()).mT @ wide for own in waiting]
    vectors = torch.linalg.eigh(torch.cat([gram.to(grams[0].device) for gram in grams])).eigenvectors
    # Eigenvalues ascend: the strongest directions are the last.
    for own, turned in zip(waiting, vectors[..., -COUNTED:].float().split([len(g) for g in grams]), strict=True):
        turned = turned.to(own._left.device)
        own._counted = own._left @ turned, own._right @ turned


def is_large(shape: Sequence[int]) -> bool:
    """Whether sums of matrices of a shape ``(E, R, C)`` keep their strongest directions only."""
    return min(shape[1:]) > SMALL


def running_sum(shape: tuple[int, int, int], seed: int, device: torch.device) -> RunningSum:
    """An empty sum of matrices of a shape ``(E, R, C)``; ``seed`` as for `LowRankSum`."""
    if is_large(shape):
        return LowRankSum(shape, seed, device)
    return RunningSum(shape, device)


def state_bytes(shape: tuple[int, int, int]) -> int:
    """Memory of a sum of matrices of a shape."""
    experts, rows, columns = shape
    return 4 * experts * ((rows + columns) * KEPT if is_large(shape) else rows * columns)
