"""Where a layer changes its way: a default, what was measured, and files that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from freemoe.kernels import crossover
from freemoe.kernels.crossover import Crossover, cache_file, known_crossover, measure_crossover
from freemoe.kernels.experts import Plan
from tests.kernels.test_experts import NEURONS, layer


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FREEMOE_CACHE", str(tmp_path / "cache"))


def shape(seed: int = 0) -> tuple:
    weights, index = layer(seed=seed)
    return weights, Plan(index, NEURONS)


def test_without_a_measurement_it_is_the_default() -> None:
    assert known_crossover(*shape()) == Crossover()


def test_a_measurement_is_kept_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sorting wins from 128 tokens on.
    monkeypatch.setattr(
        crossover, "_fastest", lambda ways, repeats: [1.0, 2.0] if ways[0]().shape[0] >= 128 else [2.0, 1.0]
    )
    found = measure_crossover(*shape())
    assert found.grouped == 128
    assert known_crossover(*shape()) == found
    other = layer(parts=1)
    assert known_crossover(other[0], Plan(other[1], NEURONS)) == Crossover()


def test_real_timing_gives_one_of_the_sizes() -> None:
    assert measure_crossover(*shape(), repeats=1).grouped in (*crossover.SIZES, 2 * crossover.SIZES[-1])


@pytest.mark.parametrize("text", ["{", "[]", '{"KEY": {"another": 3}}'])
def test_a_file_that_cannot_be_used_is_no_measurement(text: str) -> None:
    weights, plan = shape()
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(text.replace("KEY", crossover._key(weights, plan)))
    assert known_crossover(weights, plan) == Crossover()


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    measure_crossover(*shape(), repeats=1)
    assert known_crossover(*shape()) == Crossover()


def test_measurements_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    measure_crossover(*shape(), repeats=1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    measure_crossover(*shape(), repeats=1)
    assert len(json.loads(cache_file().read_text())) == 2
