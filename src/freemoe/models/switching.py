"""Switch single weights off in place, and on again bit by bit.

What is off is a `Mask`, in a weight's canonical order (experts, rows, columns), rows being outputs. That is not the order
in memory where a parameter is stored transposed (Conv1D, some fused experts), so that one expert means the same weights
whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

from freemoe.models.gates import exclude_experts, left_out
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.weights import WeightMatrix

# Values are moved as integers of the same width: no floating-point rule can touch a sign of zero or the
# payload of a NaN.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def switched_off(weights: Sequence[WeightMatrix], mask: Mask) -> ExitStack:
    """Set what a mask has off to zero, in place; experts off as a whole are not chosen.

    Behind a ``with`` block, or after ``close``, every value is back, bit by bit. It nests; of two without blocks the later one is
    closed first where they overlap. Of weights that are not in memory nothing is kept: they are read with zeros meanwhile.

    The mask is checked before the first weight is touched. An ``ExpertCache`` is faster where the same experts are switched
    again and again. Weights that the mask does not name stay as they are.

    Raises:
        MaskError: A mask of an unknown weight, or of another size.
    """
    mask.check_weights(weights)
    with ExitStack() as undo:
        for weight in weights:
            own = mask.get(weight.name)
            if own is None:
                continue
            if weight.stored is not None:
                undo.enter_context(read_with_zeros(weight, own))
                continue
            with edit_mode(weight):
                places, bits = weight.memory_indices(own.indices(weight.device)), bits_of(weight)
                # Kept before the write, so that an interrupt in between loses nothing.
                undo.callback(_restore_values, weight, own, bits[places])
                bits.index_fill_(0, places, 0)
        undo.enter_context(exclude_experts(left_out(weights, mask)))
        return undo.pop_all()


def _restore_values(weight: WeightMatrix, mask: TensorMask, values: Tensor) -> None:
    # The model may have moved to another device in between (evaluation harnesses do that).
    device = weight.device
    with edit_mode(weight):
        bits_of(weight).index_copy_(0, weight.memory_indices(mask.indices(device)), values.to(device))


@contextmanager
def read_with_zeros(weight: WeightMatrix, mask: TensorMask) -> Iterator[None]:
    """Inside, a weight that is not in memory is read with zeros where a mask has it off; it nests."""
    assert weight.stored is not None

    def edit(values: Tensor) -> Tensor:
        copy = values.clone()
        weight.to_canonical(copy).masked_fill_(mask.to_bools(copy.device).view(weight.shape), 0)
        return copy

    weight.stored.edits.append(edit)
    try:
        yield
    finally:
        weight.stored.edits[:] = [other for other in weight.stored.edits if other is not edit]


def edit_mode(weight: WeightMatrix) -> AbstractContextManager[object]:
    """The mode in which a weight can be edited in place."""
    # A tensor made under inference_mode may only be edited there; edits of any other tensor stay visible to
    # autograd.
    return torch.inference_mode() if weight.parameter.is_inference() else torch.no_grad()


def bits_of(weight: WeightMatrix) -> Tensor:
    """The weight's memory as integers of the same width: a live view."""
    return weight.flat_memory().view(_BITS[weight.parameter.element_size()])
