"""The bundled mixture, and `python -m benchmarks hookmoe` at small sizes."""

import json
from unittest.mock import Mock

import pytest
import torch

from benchmarks.harness import Settings, run_bench
from benchmarks.hookmoe import quality as trim_quality
from benchmarks.hookmoe import speed as trim_speed
from benchmarks.hookmoe.quality import LowRank, share
from benchmarks.hookmoe.records import Records, Row, records_of
from freemoe.assets import BUNDLED_MOE, demo_documents, demo_model_path, demo_moe_path
from freemoe.core.errors import RecipeError
from freemoe.evals.text_score import TextScore
from freemoe.hookmoe import material
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.material import TextParts
from freemoe.hookmoe.plans.plan import LayerPlan
from freemoe.models.checkpoints.loading import load_base
from freemoe.text.blocks import PackedBlocks
from scripts import make_demo_moe
from tests.hookmoe.conftest import logits


def test_the_bundled_mixture_is_small_and_says_where_it_comes_from():
    folder = demo_moe_path()
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 2_000_000
    record = json.loads((folder / "PROVENANCE.json").read_text())
    wanted = json.loads(json.dumps(make_demo_moe.recipe(make_demo_moe.SEED, make_demo_moe.STEPS)))
    assert {key: record[key] for key in wanted} == wanted
    # One tokenizer for both bundled models.
    assert (folder / "tokenizer.json").read_bytes() == (demo_model_path() / "tokenizer.json").read_bytes()


def test_the_bundled_mixture_loads_under_its_name_and_knows_its_world():
    model, tokenizer = load_base(BUNDLED_MOE, dtype="float32", device="cpu")
    assert model.config.model_type == "mixtral"
    ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode("next: 123,125,127,", add_special_tokens=False)]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]).startswith("1")


@pytest.mark.slow
def test_the_benchmark_runs_and_judges_nothing_when_quick(tmp_path, monkeypatch):
    # One shape, and the bundled mixture on a part of its text.
    monkeypatch.setattr(trim_speed, "SHAPES", trim_speed.SHAPES[:1])
    documents = demo_documents()[:800]
    monkeypatch.setattr(material, "demo_documents", lambda: documents)
    settings = Settings(quick=True, cache=tmp_path)
    found = run_bench("hookmoe", settings)
    figures = {f["name"]: f for f in found["figures"]}
    assert {f["verdict"] for f in found["figures"]} == {"not judged"}
    assert [f["value"] for n, f in figures.items() if n.startswith("logits that differ")] == [0.0, 0.0]
    assert next(f["value"] for n, f in figures.items() if n.startswith("Act of dynamic rules")) <= 0.01
    timed = {n: f for n, f in figures.items() if n.startswith(("TTFT", "ITL"))}
    assert len(timed) == 4 * (len(trim_speed.SHAPES) + 1)
    assert all(f["value"] > 0 for f in timed.values())
    # The trim's gain is judged with both sides run in the same way.
    assert all("both" in n for n, f in timed.items() if f["target"] is not None)
    rows = "one hook; several hooks; the paper's hook, lm; LoRA; control: full k, lm; scale and bias; kept mass"
    assert {f"lost loss won back: {row}" for row in rows.split("; ")} <= set(figures)
    assert "KL won back, lower end: several hooks" in figures
    # No text, no mixture: said, and not judged.
    assert {f["value"] for n, f in figures.items() if n.endswith(("olmoe", "qwen3_moe"))} == {None}
    json.dumps(found, allow_nan=False)

    # What is trained is kept: a second run trains nothing and says the same.
    monkeypatch.setattr(trim_quality, "train_compensation", None)
    again, _ = trim_quality.run(trim_quality.prepare(settings), settings)
    assert {f.name: f.value for f in again} == {
        n: f["value"] for n, f in figures.items() if "won back" in n and not n.endswith(("olmoe", "qwen3_moe"))
    }


def test_parts_are_asked_for_by_name(tmp_path):
    with pytest.raises(RecipeError, match=r"'nothing' names no part of hookmoe: speed, bundled, olmoe"):
        run_bench("hookmoe", Settings(quick=True, cache=tmp_path, only="nothing"))


def test_a_row_is_measured_once_while_what_decided_it_stands(tmp_path):
    quality = TextScore(*(torch.rand(3, dtype=torch.float64) for _ in range(4)))
    row = Row(quality, torch.rand(2, dtype=torch.float64), 7)
    measured = Mock(return_value=row)
    records = Records(tmp_path, "one")
    records.row("LoRA", 0, measured)
    kept = records.row("LoRA", 0, measured)
    assert measured.call_count == 1
    assert kept.parameters == 7
    assert all(torch.equal(kept.losses(what), row.losses(what)) for what in ("ce", "kl", "accuracy"))
    for other, name, seed in ((records, "LoRA", 1), (records, "one hook", 0), (Records(tmp_path, "two"), "LoRA", 0)):
        other.row(name, seed, measured)
    assert measured.call_count == 4


def test_another_text_makes_other_records(tmp_path):
    def parts(first):
        blocks = PackedBlocks(torch.tensor([[first, 2]]), torch.tensor([[0, 1]]))
        return TextParts(blocks, blocks, blocks, (1, 1, 1))

    model = str(demo_moe_path())
    cases = ((1, "a"), (3, "a"), (1, "b"), (1, "a"))
    assert len({records_of(tmp_path, model, parts(first), decided).decided for first, decided in cases}) == 3


def test_ceilings_are_what_flops_and_bytes_allow():
    model = trim_speed.shaped("Mixtral shape", Settings(quick=True))
    first, further = trim_speed.ceilings(model, Trimmed(LayerPlan((1, 1))), 64)
    # Half of the experts' work is gone, attention and head are not.
    assert 1 < first < 2
    assert 1 < further < 2
    assert trim_speed.ceilings(model, Trimmed(LayerPlan((2, 2))), 64) == (1.0, 1.0)
    assert trim_speed.ceilings(model, Trimmed(LayerPlan((1, 1))), 512)[0] < first


def test_what_is_reachable_beside_time_without_weights():
    # A millisecond of calls and two of reading; half of the reading is left, and half a millisecond of calls is new.
    assert trim_speed.reachable(3.0, 1.0, 1.0, 2.0) == pytest.approx(1.5)
    assert trim_speed.reachable(3.0, 1.0, 1.5, 2.0) == pytest.approx(1.2)
    assert trim_speed.reachable(3.0, 0.0, 0.0, 1.6) == pytest.approx(1.6)


@pytest.mark.parametrize("name", [*trim_speed.SHAPES])
def test_the_shapes_are_large_enough_and_halved(name):
    with torch.device("meta"):
        model = trim_speed.shaped(name, Settings())
        trimmed = trim_speed.halved(model)
    assert sum(p.numel() for p in model.parameters()) >= 25_000_000
    assert trimmed.plan.act == model.config.num_experts_per_tok / 2
    first, further = trim_speed.ceilings(model, trimmed, 256)
    assert min(first, further) > 1.3


def test_lora_begins_as_nothing_and_has_at_least_the_size():
    model = trim_speed.shaped("Mixtral shape", Settings(quick=True))
    lora = LowRank(model, 5000, seed=0)
    size = sum(p.numel() for p in lora.parameters())
    assert 5000 <= size < 5000 + size / lora.rank
    before = logits(model)
    with lora.attached(model):
        assert torch.equal(logits(model), before)
        with torch.no_grad():
            for b in lora.b:
                b.fill_(0.1)
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


def _row(wrong):
    blocks = torch.ones(4)
    return Row(TextScore(blocks * len(wrong), blocks * 0, blocks, blocks), torch.tensor(wrong, dtype=torch.float64))


def test_shares_are_of_what_was_lost():
    full, plan = _row([0.1, 0.0, 0.1, 0.0]), _row([0.2, 0.1, 0.2, 0.1])
    seeds = [_row([0.15, 0.05, 0.15, 0.05]), plan]
    assert full.accuracy == pytest.approx(0.8)
    won, each = share(full, plan, seeds, "accuracy")
    assert (won.mean, each) == (pytest.approx(25.0), [pytest.approx(50.0), pytest.approx(0.0)])
    # A control that is no better than the full model has won nothing.
    won, _ = share(full, plan, [full], "accuracy", control=True)
    assert won.mean == pytest.approx(0.0)
