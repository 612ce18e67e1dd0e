"""The benchmark of models larger than memory: its checkpoint, its steps, its figures."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness import Settings
from benchmarks.speed import streaming as bench
from benchmarks.speed.shapes import shape_of, write_random_checkpoint
from freemoe.models.checkpoints.loading import load_base

QUICK = shape_of("1.1G", quick=True)[1]


def test_a_checkpoint_is_written_a_layer_at_a_time(tmp_path):
    size = write_random_checkpoint(tmp_path, "llama", 0, **QUICK | {"num_hidden_layers": 3})
    # Three layers, embeddings, norm and head.
    assert len(list(tmp_path.glob("*.safetensors"))) == 6
    model, _ = load_base(tmp_path, device="cpu")
    assert model.dtype == torch.bfloat16
    assert sum(p.nbytes for p in model.parameters()) == size
    values = model.model.layers[2].mlp.up_proj.weight.detach().float()
    assert float(values.std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(values, model.model.layers[1].mlp.up_proj.weight.float())


def test_every_step_is_weighed(tmp_path):
    write_random_checkpoint(tmp_path, "llama", 0, **QUICK)
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    row = bench.weigh(str(tmp_path), 0)
    steps = ["load", "calibration", "band", "scoring of the band", "scoring of the base"]
    assert list(row["peaks"]) == list(row["seconds"]) == steps
    assert min(row["peaks"].values()) > 0
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files


def test_figures_of_a_quick_run(monkeypatch):
    grown = []

    def own(module, asked):
        grown.append(sum(p.stat().st_size for p in Path(asked[0]).glob("*.safetensors")))
        return {"before": 2**28, "peaks": {"load": 2**29, "band": 2**29 + grown[-1] // 4}, "seconds": {}}

    monkeypatch.setattr(bench, "in_own_process", own)
    outcome = bench.run(Settings(quick=True))
    held, growth = outcome.figures
    assert held.value == pytest.approx(0.5, rel=0.01)
    assert growth.value == pytest.approx(0.25, rel=0.02)
    assert list(outcome.details["measured"]) == [str(n) for n in bench.QUICK_LAYERS]
