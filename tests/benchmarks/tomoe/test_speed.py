"""The speed benchmark of converted models: that it runs, its ceilings, and masks of a small model on a large one."""

import pytest
import torch

from benchmarks.harness import Settings
from benchmarks.speed.shapes import shaped_model
from benchmarks.tomoe import speed as tomoe_speed
from benchmarks.tomoe.alone import seconds_alone
from benchmarks.tomoe.speed import QUICK_TOKENS, SHAPE, ceilings, random_masks, run, tiled
from freemoe.core.errors import FreeMoEError, NumericError
from freemoe.models.sublayers import find_sublayers
from freemoe.tomoe import export as exporting
from freemoe.tomoe.structures.structure import (
    active_parameters,
    dense_parameters,
    dense_structure,
    require_structure_fits,
)
from tests.tiny import tiny_model
from tests.tomoe.random_structures import random_structure


def model():
    return shaped_model(SHAPE, Settings(quick=True), vocab_size=100)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("FREEMOE_CACHE", str(tmp_path))


@pytest.mark.hardening
def test_a_quick_run_has_every_figure():
    outcome = run(Settings(quick=True))
    values = {f.name: f.value for f in outcome.figures}
    assert len(values) == len(outcome.figures) == len(tomoe_speed.SOURCES) * (len(QUICK_TOKENS) + 4)
    assert min(values.values()) > 0
    assert values["active weights, random masks"] == pytest.approx(50.0)
    # The quick shape has fewer layers than the small model, and they are not equally wide.
    assert 30 < values["active weights, trained masks"] < 75
    assert outcome.details["threads"] == torch.get_num_threads()


def test_a_folder_that_needs_freemoe_is_an_error(tmp_path, monkeypatch):
    base = model()
    base.save_pretrained(tmp_path / "dense")
    own = exporting.remote_code()
    code = {name: text.replace("from .rows import", "from freemoe.kernels.rows import") for name, text in own.items()}
    monkeypatch.setattr(exporting, "remote_code", lambda: code)
    exporting.export_converted_model(base, random_masks(Settings(), find_sublayers(base)), tmp_path / "ours")
    with pytest.raises(FreeMoEError, match="does not run without freemoe"):
        seconds_alone(tmp_path / "dense", tmp_path / "ours", (1,), 1, Settings(quick=True))


def test_random_masks_keep_exactly_half():
    sublayers = find_sublayers(model())
    structure = random_masks(Settings(), sublayers)
    require_structure_fits(structure, sublayers)
    assert 2 * active_parameters(structure, sublayers) == dense_parameters(sublayers)
    again, other = random_masks(Settings(), sublayers), random_masks(Settings(seed=1), sublayers)
    assert torch.equal(structure[0].experts, again[0].experts)
    assert not torch.equal(structure[0].experts, other[0].experts)


@pytest.mark.parametrize("static", [False, True], ids=["gate", "static"])
def test_masks_of_a_small_model_fill_a_larger_one(static):
    small = tiny_model("llama", num_hidden_layers=1)
    structure = random_structure(small, static=static)
    sublayers = find_sublayers(model())
    found = tiled(structure, sublayers)
    require_structure_fits(found, sublayers)
    # 64 = 2 x 32 and 16 = 2 x 8 are whole multiples; 160 = 3 x 48 + 16 is not.
    assert found[1].experts[:, :144].float().mean() == structure[0].experts.float().mean()
    assert torch.equal(found[0].experts[:, 48:96], structure[0].experts)
    assert found[0].value_width == 2 * structure[0].value_width
    assert found[0].qk.sum() == 2 * structure[0].qk.sum()


def test_ceilings_follow_what_is_read():
    base = model()
    structure = dense_structure(find_sublayers(base))
    for count in QUICK_TOKENS:
        # The router is all that is new.
        assert ceilings(base, structure, count) == (pytest.approx(1.0, abs=0.02), pytest.approx(1.0, abs=0.02))
    structure = random_masks(Settings(), find_sublayers(base))
    (_, one), (_, many) = (ceilings(base, structure, count) for count in (1, 4096))
    # Nearly every neuron is some expert's.
    assert one > many < 1.1


def test_a_model_that_computes_something_else_is_not_timed(monkeypatch):
    other = random_masks(Settings(seed=5), find_sublayers(model()))
    real = tomoe_speed.build_converted_model
    monkeypatch.setattr(tomoe_speed, "build_converted_model", lambda base, structure: real(base, other))
    with pytest.raises(NumericError, match="differs from the masked one"):
        run(Settings(quick=True))
