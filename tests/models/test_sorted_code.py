"""The code in which masks lie on disk: numbers to bytes and back, and damaged codes."""

import math
import random

import pytest
import torch

from freemoe.core.errors import ArtifactError, DataError
from freemoe.models.sorted_code import decode_sorted, encode_sorted
from tests.hardening.fuzz.reference import places_of


@pytest.mark.parametrize("seed", range(40))
def test_numbers_come_back(seed):
    rng = random.Random(seed)
    top = rng.choice([1, 2, 127, 128, 129, 300, 2**14, 2**21 + 5, 2**32, 2**45, 2**62])
    count = min(rng.choice([0, 1, 2, 5, 200]), top)
    values = sorted({rng.randrange(top) for _ in range(count)})
    if rng.random() < 0.5 and values:
        values[0] = 0
    code = encode_sorted(torch.tensor(values, dtype=torch.int64))
    back = decode_sorted(code)
    assert (code.dtype, back.dtype) == (torch.uint8, torch.int64)
    assert back.tolist() == places_of(code) == values


@pytest.mark.parametrize(
    "values",
    [[], [0], [1], [127], [128], [0, 127, 255], [2**63 - 1], [0, 2**63 - 1], [2**62, 2**63 - 1], list(range(999))],
)
def test_numbers_at_the_edges(values):
    assert decode_sorted(encode_sorted(torch.tensor(values, dtype=torch.int64))).tolist() == values


def test_numbers_take_hardly_more_than_their_entropy():
    assert encode_sorted(torch.arange(1000)).numel() == 9 + 125
    assert encode_sorted(torch.arange(1000) * 128).numel() == 9 + 1000
    generator = torch.Generator().manual_seed(0)
    for share in (0.001, 0.01, 0.1):
        positions = (torch.rand(800_000, generator=generator) < share).nonzero().flatten()
        entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
        bits = 8 * (encode_sorted(positions).numel() - 9) / positions.numel()
        assert 0.97 * entropy < bits < 1.03 * entropy


@pytest.mark.parametrize("bad", [[3, 2], [1, 1], [-1, 4]])
def test_numbers_that_have_no_code(bad):
    with pytest.raises(DataError, match="must ascend"):
        encode_sorted(torch.tensor(bad))


def test_a_code_that_is_cut_short_or_too_long():
    code = encode_sorted(torch.tensor([5, 1000, 70000])).tolist()
    cut = [code[:length] for length in range(len(code))]
    for damaged in (*cut, [*code, 0], [*code, 1], [code[0], code[1] + 1, *code[2:]]):
        with pytest.raises(ArtifactError, match="cut short"):
            decode_sorted(torch.tensor(damaged, dtype=torch.uint8))
