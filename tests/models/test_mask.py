"""Masks against plain sets of numbers, in both forms, and what they refuse."""

import math
import random

import numpy as np
import pytest
import torch

from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.rank import random_mask as random_mask_module
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.models.mask import AXES, Mask, MaskError, TensorMask
from tests.masks import indices_of, mask_of

BLOCK = 1 << 16
SIZES = (1, 7, 8, 9, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17)
SHARES = (0.0, 0.001, 0.02, 0.0625, 0.1, 0.5, 1.0)


def drawn(size, share, seed=0):
    chances = torch.rand(size, generator=torch.Generator().manual_seed(seed))
    return set((chances < share).nonzero().flatten().tolist())


def made(numbers, size):
    return TensorMask.of_indices(torch.tensor(sorted(numbers), dtype=torch.int64), size)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("size", SIZES)
def test_numbers_come_back_from_every_form(size, share):
    numbers = drawn(size, share) | {size - 1}
    mask = made(numbers, size)
    wanted = torch.zeros(size, dtype=torch.bool)
    wanted[sorted(numbers)] = True
    assert mask.indices().tolist() == sorted(numbers)
    assert mask.indices().dtype == torch.int64
    assert torch.equal(mask.to_bools(), wanted)
    assert (mask.count, len(mask), mask.size) == (len(numbers), len(numbers), size)
    for other in (TensorMask.of_bools(wanted), TensorMask.decode(mask.encode(), size), mask.to("cpu")):
        assert other.is_equal(mask)
        assert (other.bits is None) == (mask.bits is None)
    # Never more than one bit per weight, or 16 bits per place, and what says where blocks end.
    blocks = 8 * (-(-size // BLOCK) + 1)
    assert mask.num_bytes <= min(-(-size // 8), 2 * mask.count + blocks)


@pytest.mark.parametrize("size", [9, BLOCK + 5])
@pytest.mark.parametrize("shares", [(0.0, 0.01), (0.01, 0.3), (0.3, 0.3), (0.01, 0.01), (1.0, 0.2)])
def test_joining_equals_sets(size, shares):
    a, b = (drawn(size, share, seed) for seed, share in enumerate(shares))
    for one, other, expected in ((a, b, a | b), (b, a, a | b)):
        assert set((made(one, size) | made(other, size)).indices().tolist()) == expected
    assert set((made(a, size) - made(b, size)).indices().tolist()) == a - b
    assert made(a, size).is_equal(made(set(a), size))
    assert made(a, size).is_equal(made(b, size)) == (a == b)
    with pytest.raises(MaskError, match=f"{size} numbers cannot be joined with one of {size + 1}"):
        made(a, size) | made(b, size + 1)


def test_values_are_picked_put_and_counted():
    values = torch.arange(24.0)
    mask = made({1, 5, 6, 20}, 24)
    assert mask.gather_values(values.reshape(2, 3, 4)).tolist() == [1, 5, 6, 20]
    mask.scatter_values(values, torch.tensor([-1.0, -5.0, -6.0, -20.0]))
    assert values.tolist() == [-v if v in (1, 5, 6, 20) else v for v in range(24)]
    assert made({0, 3}, 4).expand_into(mask).is_equal(made({1, 20}, 24))
    assert mask.count_per_row(8).tolist() == [3, 0, 1]


@pytest.mark.parametrize("axis", AXES)
def test_lines_are_whole_rows_columns_or_experts(axis):
    off = torch.zeros(3, 4, 5, dtype=torch.bool)
    lines = {"rows": off.view(12, 5), "columns": off.movedim(2, 0), "experts": off}[axis]
    lines[[0, 2]] = True
    assert TensorMask.of_lines(off.shape, axis, torch.tensor([0, 2])).is_equal(TensorMask.of_bools(off))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (torch.tensor([3, 2]), "must ascend, each once: number 0 is 3, the next is 2"),
        (torch.tensor([1, 5, 5]), "number 1 is 5, the next is 5"),
        (torch.tensor([-1, 5]), "from -1 to 5, but there are 1024 weights"),
        (torch.tensor([0, 1024]), "from 0 to 1024, but there are 1024 weights: 0 to 1023"),
        (torch.tensor([1], dtype=torch.int32), "torch.int32"),
        (torch.tensor([[1]]), r"\(1, 1\)"),
    ],
)
def test_indices_that_are_no_mask(weights, where, message):
    with pytest.raises(MaskError, match=f"{weights[0].name}: .*{message}"):
        mask_of({weights[0].name: where}, weights)
    assert issubclass(MaskError, ValueError)


def test_a_model_s_mask_counts_joins_and_travels(weights):
    a, b, c = (w.name for w in weights[:3])
    one = mask_of({a: torch.arange(100), b: torch.arange(0), c: torch.tensor([4])}, weights)
    assert list(one) == [a, c]
    assert one.count == 101
    assert one.off_share(weights) == 101 / sum(w.size for w in weights)
    assert one.num_bytes == sum(m.num_bytes for m in one.values())
    assert (Mask().off_share([]), Mask().count, bool(Mask())) == (0.0, 0, False)
    two = mask_of({a: torch.arange(90, 110), b: torch.tensor([3])}, weights)
    assert {n: len(w) for n, w in one.union(two).items()} == {a: 110, c: 1, b: 1}
    assert indices_of(one.difference(two))[a].tolist() == list(range(90))
    assert one.difference(one).is_equal(Mask())
    assert Mask.decode(one.encode(), weights).is_equal(one)
    assert not one.is_equal(two)
    assert "101 off in 2 weights" in repr(one)


def test_codes_of_other_weights_are_refused(weights):
    code = mask_of({weights[0].name: torch.tensor([1000])}, weights).encode()[weights[0].name]
    with pytest.raises(MaskError, match=r"'gone'.*14 weights"):
        Mask.decode({"gone": code}, weights)
    small = min(weights, key=lambda w: w.size)
    with pytest.raises(MaskError, match=f"{small.name}: .*{small.size} weights"):
        Mask.decode({small.name: code}, weights)
    with pytest.raises(ArtifactError, match="cut short"):
        Mask.decode({weights[0].name: code[:-1]}, weights)


@pytest.mark.parametrize("size", [1, 7, 8, 29])
def test_random_numbers_are_the_same_however_many_draw_them(size, monkeypatch):
    monkeypatch.setattr(random_mask_module, "_PART", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = np.random.default_rng([5, 2]).random(size, dtype=np.float32)
    assert random_mask_module._uniform_numbers([5, 2], size).tolist() == expected.tolist()


def test_a_random_mask_has_as_many_in_the_same_weights(weights):
    own = mask_of({weights[0].name: torch.arange(100), weights[4].name: torch.tensor([7])}, weights)
    a, b, c = (random_mask(own, seed) for seed in (1, 1, 2))
    assert a.is_equal(b)
    assert not a.is_equal(c)
    assert {k: len(v) for k, v in a.items()} == {k: len(v) for k, v in own.items()}
    a.check_weights(weights)
    whole = mask_of({weights[0].name: torch.arange(weights[0].size)}, weights)
    assert random_mask(whole, 0).is_equal(whole)
    mean = float(a[weights[0].name].indices().float().mean()) / weights[0].size
    assert math.isclose(mean, 0.5, abs_tol=0.12)


def heavy(rows, columns):
    """Numbers with a tail, every row and column with a scale of its own, as trained weights are."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 0.3, (rows, 1))) * np.exp(rng.normal(0, 0.2, (1, columns)))
    return torch.from_numpy(rng.standard_t(8, (rows, columns)) * scale).float()


def lowest_of_rows(values):
    return values.abs().argsort(1).argsort(1) < values.shape[1] // 10


def share_of(seed, share):
    return lambda w: torch.rand(w.shape, generator=torch.Generator().manual_seed(seed)) < share(w)


MATCHED = {
    "random": share_of(1, lambda w: 0.01),
    "band of rows": lowest_of_rows,
    "band of another ranking": lambda w: lowest_of_rows(w * (1 + torch.arange(w.shape[1]) % 7)),
    "large ones": share_of(2, lambda w: 0.01 * w.abs() ** 1.5),
    "few": share_of(3, lambda w: 0.0005 * w**2),
    "all": lambda w: torch.ones_like(w, dtype=torch.bool),
}


@pytest.mark.parametrize("kind", MATCHED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_control_has_the_magnitudes_of_what_it_matches(kind, dtype):
    weight = heavy(300, 400).to(dtype)
    off = Mask({"w": TensorMask.of_bools(MATCHED[kind](weight.float()))})
    controls = [random_mask(off, seed, {"w": weight}.__getitem__) for seed in range(8)]
    squares = [float(c["w"].gather_values(weight.double() ** 2).sum()) for c in (off, *controls)]
    assert {c.count for c in controls} == {off.count}
    assert np.mean(squares[1:]) == pytest.approx(squares[0], rel=0.05)
    assert all(s == pytest.approx(squares[0], rel=0.1) for s in squares[1:])
    if kind in ("random", "large ones"):
        # Drawn anew, not the mask itself; and from all over the weight.
        shared = [len(set(c["w"].indices().tolist()) & set(off["w"].indices().tolist())) for c in controls]
        assert max(shared) < 0.2 * off.count
        middle = np.mean([float(c["w"].indices().float().mean()) for c in controls]) / weight.numel()
        assert middle == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("seed", range(20))
def test_anything_drawn_survives_what_accelerators_do(seed, monkeypatch):
    """The ways without numpy, which other devices take, give the same."""
    rng = random.Random(seed)
    size = rng.choice(SIZES)
    numbers = drawn(size, rng.choice(SHARES), seed)
    plain = made(numbers, size)
    monkeypatch.setattr("freemoe.models.mask._on_cpu", lambda tensor: False)
    other = made(numbers, size)
    assert other.is_equal(plain)
    assert other.indices().tolist() == plain.indices().tolist() == sorted(numbers)
    assert TensorMask.of_bools(plain.to_bools()).is_equal(plain)
