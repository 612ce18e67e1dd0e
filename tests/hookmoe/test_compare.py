"""Plans and rules per token beside each other: spellings, sweeps, and rows that are what each way alone measures."""

import json

import pytest
import torch

from freemoe.core.errors import RecipeError
from freemoe.core.run.folder import RunFolder
from freemoe.hookmoe.hooks.teacher import compute_teacher_logits
from freemoe.hookmoe.measure import measure_quality
from freemoe.hookmoe.plans.apply import apply_plan
from freemoe.hookmoe.plans.compare import compare_plans, read_variants
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from tests.hookmoe.conftest import blocks_of, logits
from tests.tiny import tiny_model


def test_a_sweep_is_every_run_of_groups():
    model = tiny_model("mixtral", num_hidden_layers=5)
    ways = read_variants(["sweep:2", "uniform:1", "expert_n:2,0,1"], model)
    # Three groups, the last of one layer; a plan that is named twice counts once.
    assert [w.name for w in ways] == [
        *("expert_n:2,0,1", "expert_n:2,0,3", "expert_n:2,0,4", "expert_n:2,2,3", "expert_n:2,2,4", "expert_n:2,4,4"),
        "uniform:1",
    ]
    assert ways[3].plan == LayerPlan((2, 2, 1, 1, 2))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sweep:0", "sweep:G with G from 1 to 3"),
        ("sweep:x", "sweep:G with G from 1 to 3"),
        ("top_p:1.2", "1.2 is not between 0 and 1"),
        ("top_p:", "cannot be read"),
        ("rel_threshold:act=3", "3 is not between 1 and 2"),
        ("rel_threshold:0.5,0.2,1", "cannot be read"),
        ("naee:0.5", "write naee"),
        ("uniform:9", "allowed: 1 to 4"),
        ("bogus:1", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(mixtral, text, says):
    with pytest.raises(RecipeError, match=says):
        read_variants([text], mixtral)


def test_rows_are_what_each_way_measures_alone(mixtral, tmp_path):
    before, blocks, other = logits(mixtral), blocks_of(4), blocks_of(6, seed=3)
    plans = ["uniform:1", "2,1,2", "top_p:0.6,0.1", "rel_threshold:act=1.5", "naee"]
    run = RunFolder(tmp_path / "out", {})
    rows = compare_plans(mixtral, blocks, plans, calibration=other, run=run)
    assert json.loads(json.dumps(rows)) == rows
    assert [r["name"] for r in rows] == ["full", *plans]
    by = {r["name"]: r for r in rows}
    assert by["full"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert [r["act"] for r in rows[:3]] == [2.0, 1.0, pytest.approx(5 / 3)]
    assert by["2,1,2"]["act_per_layer"] == {"0": 2.0, "1": 1.0, "2": 2.0}
    with apply_plan(mixtral, uniform_plan(plan_of(mixtral), 1)):
        alone = measure_quality(mixtral, blocks, compute_teacher_logits(mixtral, blocks, 64))
    assert by["uniform:1"]["loss"] == pytest.approx(alone.mean_ce)
    assert by["uniform:1"]["accuracy"] == pytest.approx(100 * alone.accuracy)
    assert 1.0 < by["rel_threshold:act=1.5"]["act"] < 2.0
    assert 1.0 < by["naee"]["act"] < 2.0
    thresholds = by["top_p:0.6,0.1"]["thresholds"]
    assert thresholds["0"] > thresholds["2"]
    # One expert less can only be further away than the full model is from itself.
    assert all(r["kl"] > 1e-4 for r in rows[1:])
    assert torch.equal(logits(mixtral), before)
    done = run.journal.done
    assert compare_plans(mixtral, blocks, plans, calibration=other, run=run) == rows
    assert run.journal.done == done
    with pytest.raises(RecipeError, match="naee: thresholds come from calibration text"):
        compare_plans(mixtral, blocks, ["naee"])


def test_the_accuracy_is_that_of_the_most_likely_token(mixtral):
    blocks = blocks_of(3)
    with torch.no_grad():
        said = mixtral(input_ids=blocks.ids, position_ids=blocks.positions, use_cache=False).logits[:, :-1].argmax(-1)
    counted = blocks.prediction_mask()
    right = (said == blocks.ids[:, 1:])[counted].float().mean()
    (row,) = compare_plans(mixtral, blocks, [])
    assert row["accuracy"] == pytest.approx(100 * float(right))
    assert row["tokens"] == int(counted.sum())
