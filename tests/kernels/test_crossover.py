"""Where a layer changes its way: a default, what was measured, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freemoe.kernels import crossover
from freemoe.kernels.crossover import Crossover, default_crossover, known_crossover, measure_crossover
from freemoe.kernels.experts import Plan
from freemoe.kernels.measured import cache_file
from tests.kernels.test_experts import NEURONS, layer


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FREEMOE_CACHE", str(tmp_path / "cache"))


def shape(seed: int = 0) -> tuple:
    weights, index = layer(seed=seed)
    return weights, Plan(index, NEURONS)


def test_without_a_measurement_it_is_the_default() -> None:
    weights, plan = shape()
    assert known_crossover(weights, plan) == default_crossover(plan)


def test_wide_experts_have_a_mask_between_few_tokens_and_many() -> None:
    narrow, wide = (Plan(layer(share=share)[1], NEURONS) for share in (0.3, 0.9))
    assert default_crossover(narrow) == Crossover(grouped=256, few=256)
    assert default_crossover(wide) == Crossover(grouped=256, few=64)


def test_a_measurement_is_kept_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    # A mask is better than rows from 32 tokens on, and sorting than both from 128.
    def fastest(ways: tuple, repeats: int) -> list[float]:
        tokens = ways[-1]().shape[0]
        return [1.0 if tokens < 32 else 3.0, 2.0, 0.5 if tokens >= 128 else 4.0][-len(ways) :]

    monkeypatch.setattr(crossover, "fastest", fastest)
    monkeypatch.setattr(crossover, "can_read_rows", lambda x, weights: True)
    found = measure_crossover(*shape())
    assert found == Crossover(grouped=128, few=32)
    assert known_crossover(*shape()) == found
    other = layer(parts=1)
    plan = Plan(other[1], NEURONS)
    assert known_crossover(other[0], plan) == default_crossover(plan)


def test_real_timing_gives_one_of_the_sizes() -> None:
    found = measure_crossover(*shape(), repeats=1)
    assert {found.grouped, found.few} <= {*crossover.SIZES, 2 * crossover.SIZES[-1]}
    assert found.few <= found.grouped


@pytest.mark.parametrize("text", ["{", "[]", '{"KEY": {"another": 3}}', '{"KEY": {"grouped": 3}}', '{"KEY": 3}'])
def test_a_file_that_cannot_be_used_is_no_measurement(text: str) -> None:
    weights, plan = shape()
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text.replace("KEY", crossover._key(weights, plan)))
    assert known_crossover(weights, plan) == default_crossover(plan)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    measure_crossover(*shape(), repeats=1)
    assert known_crossover(*shape()) == default_crossover(shape()[1])


def test_measurements_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    measure_crossover(*shape(), repeats=1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    measure_crossover(*shape(), repeats=1)
    assert len(json.loads(cache_file().read_text())) == 2
