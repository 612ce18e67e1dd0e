"""Switch single weights off in place, and on again bit by bit.

Positions are flat indices into a weight's canonical order (experts, rows, columns), rows being outputs. That
is not the order in memory where a parameter is stored transposed (Conv1D, some fused experts), so that one
expert means the same weights whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from freemoe.core.errors import FreeMoEError
from freemoe.models.gates import left_out, without
from freemoe.models.weights import Weight

Positions = dict[str, Tensor]
"""Name of a weight to its switched-off positions: (n,) int64, ascending, each once."""

# Values are moved as integers of the same width: no floating-point rule can touch a sign of zero or the
# payload of a NaN.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PositionsError(FreeMoEError, ValueError):
    """Positions that are not ascending, not int64, or not inside their weight."""


class Undo:
    """The values that were switched off, and the way back.

    Where two switchings of the same weights overlap, undo the later one first, as ``with`` blocks do by
    themselves.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Weight, Tensor, Tensor]] = []
        self._routers = ExitStack()

    def restore(self) -> None:
        """Put every value back, bit by bit. A second call does nothing."""
        self._routers.close()
        while self._saved:
            weight, places, values = self._saved[-1]
            # The model may have moved to another device in between (evaluation harnesses do that).
            device = weight.parameter.device
            with editing(weight):
                bits_of(weight).index_copy_(0, places.to(device), values.to(device))
            self._saved.pop()


def switch_off(weights: Sequence[Weight], positions: Positions) -> Undo:
    """Set the weights at ``positions`` to zero, in place, and keep their values; experts off as a whole are not chosen.

    All positions are checked before the first weight is touched. A ``Switchboard`` is faster where the same
    experts are switched again and again.

    Args:
        weights: From ``find_weights``; those that ``positions`` does not name stay as they are.
        positions: Per weight name, flat indices into (experts, rows, columns).

    Raises:
        PositionsError: Unknown weight, or positions that are out of range, unsorted, repeated or not int64.
    """
    check(weights, positions)
    undo = Undo()
    try:
        for weight in weights:
            where = positions.get(weight.name)
            if where is None or where.numel() == 0:
                continue
            with editing(weight):
                places, bits = weight.places(where.to(weight.parameter.device)), bits_of(weight)
                # Kept before the write, so that an interrupt in between loses nothing.
                undo._saved.append((weight, places, bits[places]))
                bits.index_fill_(0, places, 0)
        undo._routers.enter_context(without(left_out(weights, positions)))
    except BaseException:
        undo.restore()
        raise
    return undo


@contextmanager
def switched_off(weights: Sequence[Weight], positions: Positions) -> Iterator[None]:
    """Switch weights off inside a ``with`` block; it nests, and the model is bit-equal afterwards."""
    undo = switch_off(weights, positions)
    try:
        yield
    finally:
        undo.restore()


def check(weights: Sequence[Weight], positions: Positions) -> None:
    """Check that ``positions`` fit ``weights``.

    Raises:
        PositionsError: With the weight's name and the numbers.
    """
    sizes = {w.name: w for w in weights}
    for name, where in positions.items():
        if name not in sizes:
            raise PositionsError(
                f"Positions for {name!r}, which is not among the {len(sizes)} weights given (the first is "
                f"{next(iter(sizes), None)!r}). Use the sublayers and layers that the positions were made "
                "for."
            )
        if where.dtype != torch.int64 or where.ndim != 1:
            raise PositionsError(
                f"Positions of {name} have type {where.dtype} and shape {tuple(where.shape)}; (n,) torch.int64 needed."
            )
        if where.numel() == 0:
            continue
        ascending = where[1:] > where[:-1]
        if not bool(ascending.all()):
            at = int((~ascending).nonzero()[0])
            raise PositionsError(
                f"Positions of {name} must ascend, each once: number {at} is {int(where[at])}, the next is "
                f"{int(where[at + 1])}."
            )
        low, high, size = int(where[0]), int(where[-1]), sizes[name].size
        if low < 0 or high >= size:
            raise PositionsError(
                f"Positions of {name} reach from {low} to {high}, but it has {size} weights "
                f"{sizes[name].shape}: 0 to {size - 1} allowed."
            )


def count(positions: Positions) -> int:
    """Number of weights that are switched off."""
    return sum(where.numel() for where in positions.values())


def share(weights: Sequence[Weight], positions: Positions) -> float:
    """Switched-off weights as a share of all of ``weights``, 0 to 1; 0 where there are none."""
    size = sum(w.size for w in weights)
    return count(positions) / size if size else 0.0


def editing(weight: Weight) -> AbstractContextManager[object]:
    """The mode in which a weight can be edited in place."""
    # A tensor made under inference_mode may only be edited there; edits of any other tensor stay visible to
    # autograd.
    return torch.inference_mode() if weight.parameter.is_inference() else torch.no_grad()


def bits_of(weight: Weight) -> Tensor:
    """The weight's memory as integers of the same width: a live view."""
    return weight.memory().view(_BITS[weight.parameter.element_size()])
