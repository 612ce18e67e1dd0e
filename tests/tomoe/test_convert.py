"""The whole conversion on a tiny model: what is written, what is scored, what a killed run comes to, bad input."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, DataError, FreeMoEError, NumericError, RecipeError
from freemoe.core.run.execute import NOT_DECIDING
from freemoe.core.run.folder import RunFolder
from freemoe.evals.text_score import score_text
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.sublayers import find_sublayers
from freemoe.recipes import load_recipe
from freemoe.systems import SYSTEMS, system_of
from freemoe.text.blocks import PackedBlocks, pack_blocks
from freemoe.tomoe import pipeline as convert_module
from freemoe.tomoe.artefact import inspect_artefact
from freemoe.tomoe.card import headlines
from freemoe.tomoe.gates.initialise import cluster_tokens, measure_layer_importance
from freemoe.tomoe.material import read_text
from freemoe.tomoe.pipeline import convert
from freemoe.tomoe.report import page
from freemoe.tomoe.result import ConvertResult
from freemoe.tomoe.structures import methods as decide
from tests.artefacts import rewritten
from tests.core.run.away import SerialAway
from tests.tiny import save_base, tiny_model
from tests.tomoe.conftest import recipe


def test_rivals_that_workers_measure_elsewhere_are_the_same(done, base, tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "executor_of", SerialAway)
    convert_module._context_once.cache_clear()
    measured = []
    work = convert_module.work_ahead

    def work_ahead(**what):
        measured.append(what["name"])
        work(**what)

    monkeypatch.setattr(convert_module, "work_ahead", work_ahead)
    there = convert(recipe(base, tmp_path / "out", place="local:2"))
    results = [json.loads((folder / "result.json").read_text()) for folder in (done, there)]
    assert measured == list(results[0]["rivals"])
    for part in ("scores", "rivals"):
        assert results[0][part] == results[1][part]
    assert (there / "structure.safetensors").read_bytes() == (done / "structure.safetensors").read_bytes()


def test_what_is_written(done, base):
    manifest = read_manifest(done)
    assert manifest["kind"] == "converted"
    assert system_of(done) is SYSTEMS.get("converted")
    result = json.loads((done / "result.json").read_text())
    rivals = {"static-magnitude", "static-activation", "activation-split"}
    assert set(result["scores"]) == {"dense", "converted"} | rivals
    assert 0.4 < result["parameters"]["active_share"] <= 0.5
    assert len(result["history"]["rows"]) == 4
    assert [p["step"] for p in result["held_out_curve"]] == [0, 2, 4]
    assert all(abs(sum(layer) - 1) < 1e-6 for layer in result["usage"])
    assert min(result["speed"][side]["ttft"] for side in ("dense", "converted")) > 0
    assert result["speed"]["prompt"] == 32
    assert headlines(ConvertResult.model_validate(result))[0].startswith(("Yes: ", "No: ", "Mixed: "))
    assert "# " in (done / "README.md").read_text()
    assert load_recipe(done / "recipe.yaml").model_dump() == recipe(base, done).model_dump()
    assert not list(done.glob("units"))


def test_the_best_of_all_states_and_their_means_is_what_is_written(base, tmp_path):
    """Told another window, the mean is another structure; whichever scored best on held-out text is what was exported."""
    for window in (0.0, 0.5):
        folder = convert(recipe(base, tmp_path / f"{window}", train={"steps": 8, "mean_window": window}, rivals=False))
        result = json.loads((folder / "result.json").read_text())
        curve = result["held_out_curve"]
        assert all(("mean_perplexity" in point) == (window > 0 and point["step"] > 0) for point in curve)
        scored = {f"{k}{p['step']}": p[k] for p in curve for k in ("perplexity", "mean_perplexity") if k in p}
        best = min(scored, key=scored.__getitem__)
        model, tokenizer = load_base(folder)
        held_out = pack_blocks(tokenizer, read_text(recipe(base, folder), tokenizer).held_out, 32)
        assert score_text(model, held_out).perplexity == pytest.approx(scored[best], rel=1e-4)


def test_the_mean_of_the_gates_wins_where_it_is_better():
    point = {"step": 4.0, "perplexity": 3.0, "accuracy": 0.5, "active": 0.5}
    mean = {"mean_perplexity": 2.0, "mean_accuracy": 0.6, "mean_active": 0.5}
    own = recipe(Path("x"), Path("y"))
    assert decide._best_candidate(own, [{**point, "step": 2.0}, {**point, **mean}]) == "structure|mean_4"
    assert decide._best_candidate(own, [{**point, **mean, "mean_active": 0.6}]) == "structure|4"
    # None is within the budget: the last.
    assert decide._best_candidate(
        own, [{**point, "active": 0.9}, {**point, **mean, "active": 1.0, "mean_active": 1.0}]
    ) == ("structure|mean_4")


def test_the_scores_are_the_written_models(done, base):
    result = json.loads((done / "result.json").read_text())
    model, tokenizer = load_base(done)
    test = pack_blocks(tokenizer, read_text(recipe(base, done), tokenizer).test, 32)
    score = score_text(model, test)
    assert score.perplexity == pytest.approx(result["scores"]["converted"]["perplexity@32"], rel=1e-4)
    dense = score_text(tiny_model("llama"), test)
    assert dense.perplexity == pytest.approx(result["scores"]["dense"]["perplexity@32"], rel=1e-6)


def test_a_missed_budget_is_said_everywhere(done, base, tmp_path):
    """Thresholds begin at all weights, and four steps bring none of them down."""
    kept = {"gates": {"export": "threshold"}}
    folder = convert(recipe(base, tmp_path / "out", profile="paper", rivals=False, **kept))
    result = json.loads((folder / "result.json").read_text())
    assert result["missed_budget"] == {"asked": 0.5, "got": 1.0}
    loud = "BUDGET MISSED: 50.0% active weights were asked for, and a token uses 100.0%"
    assert any(line.startswith(loud) for line in headlines(ConvertResult.model_validate(result)))
    assert loud in (folder / "README.md").read_text(encoding="utf-8")
    assert "The budget was missed" in page(ConvertResult.model_validate(result))
    moved = json.loads(
        (convert(recipe(base, tmp_path / "moved", profile="paper", rivals=False)) / "result.json").read_text()
    )
    assert "missed_budget" not in moved
    assert moved["parameters"]["active_share"] == pytest.approx(0.5, abs=0.01)
    far = "BUDGET NOT REACHED IN TRAINING: masks of the last step keep "
    assert any(line.startswith(far) for line in headlines(ConvertResult.model_validate(moved)))
    met = json.loads((done / "result.json").read_text())
    assert "missed_budget" not in met
    assert not any("BUDGET" in line for line in headlines(ConvertResult.model_validate(met)))
    assert "BUDGET" not in (done / "README.md").read_text(encoding="utf-8")


def test_statistics_do_not_depend_on_how_many_tokens_are_held_at_once(base, tmp_path):
    model, _ = load_base(base / "model")
    ids = torch.randint(3, 200, (7, 16), generator=torch.Generator().manual_seed(0))
    text, sublayers = PackedBlocks(ids, torch.arange(16).expand_as(ids)), find_sublayers(model)
    routers = cluster_tokens(model, sublayers, text, 3, seed=0)
    rows = []
    few = measure_layer_importance(model, sublayers, text, routers, 40, rows.append)
    assert rows == [2, 2, 2, 1]
    for a, b in zip(few, measure_layer_importance(model, sublayers, text, routers, 1), strict=True):
        for name in ("qk", "vo", "vo_ranked", "mlp"):
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-12)


def test_all_of_the_weights_is_the_dense_model(base, tmp_path):
    folder = convert(recipe(base, tmp_path / "out", active=1.0))
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        found = AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        wanted = tiny_model("llama")(ids).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    result = json.loads((folder / "result.json").read_text())
    assert result["scores"]["converted"]["nll"] == result["scores"]["dense"]["nll"]


@pytest.mark.parametrize("method", ["static-magnitude", "activation-split"])
def test_rivals_are_models_too(base, tmp_path, method):
    folder = convert(recipe(base, tmp_path / "out", method=method))
    result = json.loads((folder / "result.json").read_text())
    assert set(result["scores"]) == {"dense", "converted"}
    assert 0.4 < result["parameters"]["active_share"] <= 0.5
    assert inspect_artefact(folder, str(base / "model"))["fits_base"] is True


class Killed(BaseException):
    """Stands for a kill."""


def tensors_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("after", [1, 7, 13])
def test_a_killed_run_comes_to_the_same_model(base, done, tmp_path, monkeypatch, after):
    """Killed right after its n-th unit of work was written, and run again."""
    from freemoe.core.run.journal import RunJournal

    own = recipe(base, tmp_path / "out")
    units = 0
    unit = RunJournal.run_unit

    def counting(self, name, work):
        nonlocal units
        value = unit(self, name, work)
        units += 1
        if units == after:
            raise Killed
        return value

    with monkeypatch.context() as patched:
        patched.setattr(RunJournal, "run_unit", counting)
        with pytest.raises(Killed):
            convert(own)
    assert not (tmp_path / "out").exists()
    again = convert(own)
    wanted, found = tensors_of(done), tensors_of(again)
    assert sorted(wanted) == sorted(found)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    a, b = (json.loads((f / "result.json").read_text()) for f in (done, again))
    for key in ("scores", "history", "held_out_curve", "layers", "usage"):
        assert a[key] == b[key]


def test_a_run_of_another_base_is_not_gone_on_with(base, tmp_path):
    copy = tmp_path / "base"
    shutil.copytree(base, copy)
    own = recipe(copy, tmp_path / "out")
    run = RunFolder(own.output, own.model_dump(mode="json", exclude={*NOT_DECIDING}))
    run.journal.run_unit(
        "inputs", lambda: {"base model": "another", "train text": "", "held_out text": "", "test text": ""}
    )
    with pytest.raises(DataError, match=r"was started with another base model.*--no-resume"):
        convert(own)


@pytest.mark.parametrize(
    ("stem", "edit", "message"),
    [
        ("structure", lambda t: t.pop("0.qk"), "is no structure"),
        ("structure", lambda t: t["1.experts"].fill_(False), "keeps nothing of a layer"),
        ("structure", lambda t: t["1.experts"].fill_(True), "keeps other neurons or dimensions than its result"),
        ("structure", lambda t: t.update({"x.qk": t["0.qk"].clone()}), "is no structure"),
        ("config", lambda c: c["tomoe"].update(layers=[]), "could not be loaded"),
        ("config", lambda c: c["tomoe"].pop("mode"), "could not be loaded"),
        ("model", lambda t: t.pop("model.layers.0.mlp.up"), "could not be loaded"),
        ("model", lambda t: t["model.layers.0.mlp.experts"].fill_(99), "could not be loaded"),
    ],
)
def test_nothing_is_called_whole_that_cannot_be_read(done, tmp_path, stem, edit, message):
    with pytest.raises(FreeMoEError, match=message):
        inspect_artefact(rewritten(done, tmp_path / "copy", **{stem: edit}))


def test_another_base_is_told(done, tmp_path):
    save_base(tiny_model("llama", seed=9), tmp_path / "other")
    with pytest.raises(ArtifactError, match="was made for the base"):
        inspect_artefact(done, str(tmp_path / "other"))


def test_a_loss_that_is_no_number_leaves_nothing_half_done(base, tmp_path, monkeypatch):
    from freemoe.tomoe.gates import train

    own = recipe(base, tmp_path / "out", rivals=False)
    with monkeypatch.context() as patched:
        patched.setattr(train, "distillation_loss", lambda *a, **k: torch.tensor(float("nan"), requires_grad=True))
        with pytest.raises(NumericError, match="loss of step 0"):
            convert(own)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists()
    assert convert(own).is_dir()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"active": 0.0}, r"active: .*greater than 0.*value seen: 0.0"),
        ({"active": 1.2}, r"active: .*less than or equal to 1"),
        ({"experts": 1}, r"experts: .*greater than or equal to 2"),
        ({"text": []}, "no text is given"),
        ({"gates": {"start": "random"}}, "needs gates.start statistics"),
        ({"method": "magic"}, "method"),
    ],
)
def test_recipes_that_cannot_work(base, tmp_path, values, message):
    with pytest.raises(RecipeError, match=message):
        recipe(base, tmp_path / "out", **values)


def test_text_too_short_and_blocks_too_long(base, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(json.dumps(f"text {i}") for i in range(40)))
    with pytest.raises(DataError, match=r"less than one block of 200"):
        convert(recipe(base, tmp_path / "out", text=[str(short)], train={"block": 200}))
    with pytest.raises(DataError, match=r"train.block is 999, and this model's context holds 256"):
        convert(recipe(base, tmp_path / "out", train={"block": 999}))
    assert not (tmp_path / "out.partial").exists()


def test_a_loaded_model_and_texts_in_memory_give_the_same_model(done, base, tmp_path):
    model, tokenizer = load_base(base / "model")
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    texts = [json.loads(line) for line in (base / "text.jsonl").read_text().splitlines()]
    train = {"steps": 4, "batch_tokens": 64, "block": 32, "save_every": 2, "checkpointing": True}
    given = {
        "model": model,
        "tokenizer": tokenizer,
        "text": texts,
        "dtype": torch.float32,
        "train": train,
        "rivals": False,
    }
    folder = convert(output=tmp_path / "out", experts=3, **given)
    assert tensors_of(folder).keys() == tensors_of(done).keys()
    own = recipe(base, tmp_path / "own", train={"checkpointing": True}, rivals=False)
    assert all(torch.equal(v, tensors_of(folder)[k]) for k, v in tensors_of(convert(own)).items())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
