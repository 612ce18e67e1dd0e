"""What is off of one weight: whole lines apart from single places."""

import pytest
import torch

from freemoe.models.mask import TensorMask
from freemoe.models.mixed.parts import WeightMask


@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.4, 1.0])
@pytest.mark.parametrize(("rows", "columns"), [([], []), ([2], []), ([], [0, 5]), ([1, 3], [4])])
def test_lines_and_places_together_are_the_mask(weights, share, rows, columns):
    weight = max(weights, key=lambda w: w.size)
    off = torch.rand(weight.num_rows, weight.num_columns, generator=torch.Generator().manual_seed(3)) < share
    off[rows] = True
    off[:, columns] = True
    part = WeightMask.from_mask(TensorMask.of_bools(off), weight)
    whole = off.all(1).nonzero().flatten(), off.all(0).nonzero().flatten()
    for found, wanted in zip((part.rows, part.columns), whole, strict=True):
        assert (found is None) == (not len(wanted))
        assert found is None or torch.equal(found, wanted)
    again = torch.zeros_like(off)
    if part.is_scattered:
        again.view(-1)[part.scattered_off(again.device)] = True
        # What is off as a line is not held a second time.
        assert not again[whole[0]].any()
        assert not again[:, whole[1]].any()
    again[whole[0]] = True
    again[:, whole[1]] = True
    assert torch.equal(again, off)
