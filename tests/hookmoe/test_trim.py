"""`freemoe trim` from end to end on a tiny mixture: the artefact, a killed run, the refusals before any training."""

import json
from contextlib import nullcontext

import pytest
import torch

from freemoe.artefacts import evaluate
from freemoe.core.errors import ArtifactError, DataError, FamilyError, RecipeError, UnknownNameError
from freemoe.core.run.folder import RunFolder
from freemoe.evals.engine.answering import BASE
from freemoe.evals.evaluation import EvalTarget, make_variant
from freemoe.evals.evaluation import evaluate_target as evaluate_as
from freemoe.hookmoe import material
from freemoe.hookmoe import pipeline as trim_module
from freemoe.hookmoe.adapter import load_adapter, load_trimmed
from freemoe.hookmoe.evaluation import evaluate_text
from freemoe.hookmoe.hooks.training import TrainingSchedule
from freemoe.hookmoe.pipeline import trim
from freemoe.hookmoe.plans import elsewhere
from freemoe.hookmoe.plans.layers import moe_layers
from freemoe.hookmoe.plans.plan_figures import write_pareto
from freemoe.hookmoe.result import TrimResult
from freemoe.models.checkpoints.loading import load_base
from freemoe.recipes import EvalRecipe, load_recipe, recipe_from
from tests.core.run.away import SerialAway
from tests.hookmoe.conftest import QUICK, logits, recipe
from tests.tiny import save_base, tiny_model


def test_a_trim_writes_an_artefact_that_is_the_measured_model(saved, tmp_path):
    folder = trim(recipe(saved, tmp_path / "out", plan={"act": 1.0}))
    names = {p.name for p in folder.iterdir()}
    assert {"hookmoe_config.json", "hookmoe.safetensors", "plan.json", "recipe.yaml", "README.md"} <= names
    result = json.loads((folder / "result.json").read_text())
    assert result["plan"]["top_k"] == [1, 1, 1]
    assert len(result["plan"]["profile"]) == 3
    rows = result["test"]["rows"]
    free = ["rescaled"] if result["rescale"]["rule"] != "none" else []
    assert list(rows) == ["full", "plan", *free, "scale and bias", "hooks", "control"]
    assert rows["full"]["kl"] == pytest.approx(0.0, abs=1e-6)
    assert rows["plan"]["kl"] > 0.01
    assert rows["hooks"]["act"] == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert rows["full"]["act"] == {"0": 2.0, "1": 2.0, "2": 2.0}
    assert result["speed"]["prompt"] == QUICK["block"]
    model, _ = load_base(saved / "model", device="cpu")
    before = logits(model)
    with load_adapter(folder, model).attached(model):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    again = evaluate_text(str(folder))
    for name in ("full", "plan", "hooks"):
        assert again["rows"][name]["ce"] == pytest.approx(rows[name]["ce"], abs=1e-9)
    assert load_recipe(folder / "recipe.yaml") == recipe(saved, tmp_path / "out", plan={"act": 1.0})
    assert write_pareto(TrimResult.model_validate(result), folder) == folder / "plans.svg"


def test_plans_that_workers_measure_elsewhere_are_the_same(saved, tmp_path, monkeypatch):
    asked = {"plan": {"act": 4 / 3}, "hooks": {"layers": "none"}}
    alone = trim(recipe(saved, tmp_path / "alone", **asked))
    monkeypatch.setattr(elsewhere, "executor_of", SerialAway)
    elsewhere._begun_once.cache_clear()
    measured = []
    work = elsewhere.work_ahead

    def work_ahead(**what):
        measured.append(what["name"])
        work(**what)

    monkeypatch.setattr(elsewhere, "work_ahead", work_ahead)
    there = trim(recipe(saved, tmp_path / "there", place="local:2", **asked))
    assert len(measured) >= 3
    for name in ("hookmoe_config.json", "plan.json"):
        assert (there / name).read_bytes() == (alone / name).read_bytes()
    results = [json.loads((f / "result.json").read_text()) for f in (alone, there)]
    assert results[0]["plan"] == results[1]["plan"]
    assert results[0]["cost"]["units_done"] == results[1]["cost"]["units_done"]


def test_parts_never_share_a_passage(saved, tmp_path):
    *_, text = trim_module.prepare_trim(recipe(saved, tmp_path / "out", {"limit": 500, "held_out": 500, "test": 500}))
    assert min(text.passages) > 0
    assert sum(text.passages) == 150


class _Killed(Exception):
    pass


# Three states of the hooks, then three of the control.
@pytest.mark.parametrize("kill", [0, 4])
def test_a_killed_trim_goes_on_to_the_same_artefact(saved, done, tmp_path, monkeypatch, kill):
    asked = recipe(saved, tmp_path / "killed")
    keep, left = RunFolder.run_tensor_unit, [kill]

    def dying(self, name, work):
        if name.startswith(("hooks|", "control|")):
            if left[0] == 0:
                raise _Killed
            left[0] -= 1
        return keep(self, name, work)

    monkeypatch.setattr(RunFolder, "run_tensor_unit", dying)
    with pytest.raises(_Killed):
        trim(asked)
    assert not (tmp_path / "killed").exists()
    monkeypatch.undo()
    folder = trim(asked)
    assert json.loads((folder / "result.json").read_text())["cost"]["units_reused"] > 0
    for name in ("hookmoe.safetensors", "hookmoe_config.json", "plan.json"):
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    rows = [json.loads((f / "result.json").read_text())["test"]["rows"] for f in (done, folder)]
    assert rows[0] == rows[1]


def test_hooks_where_they_are_asked_for(saved, tmp_path):
    found = {}
    for name, hooks in {
        "one": {"layers": "one", "units": 5},
        "list": {"layers": [0, 2], "units": 8},
        "none": {"layers": "none"},
        "beside": {"layers": "all", "position": "parallel", "start": "ridge", "units": 9},
    }.items():
        folder = trim(recipe(saved, tmp_path / name, {"control": False, "steps": 2}, hooks=hooks))
        found[name] = json.loads((folder / "result.json").read_text())
    widths = {name: r["hooks"]["widths"] for name, r in found.items()}
    assert list(widths["one"].values()) == [5]
    assert set(widths["list"]) == {"0", "2"}
    assert sum(widths["list"].values()) == 8
    assert widths["none"] == {}
    assert "hooks" not in found["none"]["test"]["rows"]
    assert sum(widths["beside"].values()) == 9


def test_the_rule_for_router_weights_is_the_best_of_the_plan_on_held_out_text(saved, tmp_path):
    hooks = {"layers": "none"}
    found = {}
    for rule in ("auto", "none", "kept_mass", "renorm"):
        plan = {"given": "uniform:1", "rescale": rule}
        folder = trim(recipe(saved, tmp_path / rule, plan=plan, hooks=hooks))
        found[rule] = json.loads((folder / "result.json").read_text())
    losses = found["auto"]["rescale"]["held_out_kl"]
    assert list(losses) == ["none", "kept_mass", "renorm"]
    # Mixtral's router makes its weights sum to one: its own rule is renorm, and comes first.
    assert losses["none"] == losses["renorm"]
    chosen = found["auto"]["rescale"]["rule"]
    assert chosen == ("kept_mass" if losses["kept_mass"] < losses["none"] else "none")
    assert found["renorm"]["rescale"] == {"rule": "renorm", "held_out_kl": {}}
    # The baseline is the model's own rule whatever was asked for; the artefact's row is there when it differs.
    plans = [f["test"]["rows"]["plan"]["kl"] for f in found.values()]
    assert plans == [plans[0]] * 4
    assert "rescaled" not in found["none"]["test"]["rows"]
    kept = found["kept_mass"]["test"]["rows"]
    assert kept["rescaled"]["kl"] != kept["plan"]["kl"]
    assert list(evaluate_text(str(tmp_path / "kept_mass"))["rows"]) == ["full", "plan", "rescaled"]


def test_the_papers_search_deploys_one_hook_at_its_layer(saved, tmp_path):
    plan = {"search": "two_stage", "tolerance": 0.1}
    folder = trim(recipe(saved, tmp_path / "out", {"control": False, "loss": "lm"}, plan=plan, hooks={"layers": "one"}))
    result = json.loads((folder / "result.json").read_text())
    assert result["plan"]["top_k"] == [1, 1, 1]
    assert result["plan"]["k_star"] == 2
    assert list(result["hooks"]["widths"]) == [str(min(result["plan"]["l_star"], 2))]


PLAIN = {BASE: make_variant(nullcontext)}


def test_tasks_are_scored_under_base_plan_and_hooks(done, tmp_path):
    tasks = tmp_path / "law.jsonl"
    items = [{"question": f"{a} + 1 =", "choices": [str(a + 1), str(a)], "answer": 0} for a in range(12)]
    tasks.write_text("\n".join(json.dumps(i) for i in items) + "\n")
    text = tmp_path / "held.txt"
    text.write_text(
        "\n\n".join(f"the {a}th stone lies beside the river and is older than {a * 7} years" for a in range(90))
    )
    domains = {"law": (str(tasks),), "stones": (f"text:{text}",)}
    asked = EvalRecipe(artefact=str(done), domains=domains, output=str(tmp_path / "e.json"))
    result = evaluate(asked)
    rows = result["domains"][0]["rows"]
    assert list(rows) == ["full", "plan", "rescaled", "hooks"]
    assert rows["full"]["gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert [d["unit"] for d in result["domains"]] == ["points", "perplexity"]
    assert "average" not in result
    assert {way: cost["act"] for way, cost in result["costs"].items()} == dict(
        zip(rows, (2.0, 1.0, 1.0, 1.0), strict=True)
    )
    assert result["costs"]["hooks"]["total"] > result["costs"]["full"]["total"] > result["costs"]["hooks"]["active"]
    stones = result["domains"][1]["rows"]
    assert stones["full"]["ratio"]["mean"] == 1.0
    model, tokenizer, trimmed = load_trimmed(done, None, "auto", "auto")
    with trimmed.attached(model):
        alone = evaluate_as(asked.model_copy(update={"output": None}), lambda r: EvalTarget(model, tokenizer, PLAIN))
    assert alone["domains"][1]["rows"]["base"]["score"] == stones["hooks"]["score"]
    with pytest.raises(UnknownNameError, match=r"'hook'.*'hooks'"):
        evaluate(asked.model_copy(update={"experts": ("hook",), "output": None}))
    assert json.loads((tmp_path / "e.json").read_text())["domains"] == result["domains"]
    with pytest.raises(ArtifactError, match="exists already"):
        evaluate(asked)


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({"plan": {"given": "uniform:3"}}, RecipeError, r"runs more experts than the model does in layers \[0, 1, 2\]"),
        ({"plan": {"given": "uniform:5"}}, RecipeError, "router has 4; allowed: 1 to 4"),
        ({"plan": {"given": "1,1"}}, RecipeError, "2 entries, and the model has 3 decoder layers"),
        ({"plan": {"given": "uniform:0"}}, RecipeError, "0 experts in layer 0"),
        ({"plan": {"given": "2,2,2"}}, RecipeError, "cuts nothing"),
        (
            {"plan": {"given": "top_p:0.6"}},
            RecipeError,
            "no artefact holds such a rule. Measure it beside a plan: --compare",
        ),
        ({"plan": {"given": "uniform:1", "compare": ["top_p:7"]}}, RecipeError, "7 is not between 0 and 1"),
        (
            {"timing": {"prompts": [9000]}},
            RecipeError,
            r"asks for 9000 tokens and 17 new ones, and the model has \d+ positions",
        ),
        ({"hooks": {"layers": [4]}}, RecipeError, r"names \[4\].*mixture layers: \[0, 1, 2\]"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_training(saved, tmp_path, monkeypatch, fields, error, says):
    monkeypatch.setattr(trim_module, "train_compensation", lambda *a, **k: pytest.fail("training began"))
    with pytest.raises(error, match=says):
        trim(recipe(saved, tmp_path / "out", **fields))
    assert not list(tmp_path.iterdir())


def test_a_dense_model_and_a_short_text_are_refused(saved, tmp_path):
    with pytest.raises(FamilyError, match="is dense"):
        trim(recipe(saved, tmp_path / "out", model=str(saved / "dense")))
    with pytest.raises(DataError, match=r"part of the text has .* less than one block of 4096"):
        trim(recipe(saved, tmp_path / "out", {"block": 4096}))
    short = tmp_path / "short.txt"
    short.write_text("Three words only.")
    with pytest.raises(DataError, match="too few to divide"):
        trim(recipe(saved, tmp_path / "out", text=str(short)))
    with pytest.raises(DataError, match="No file at"):
        trim(recipe(saved, tmp_path / "out", text=str(tmp_path / "absent.txt")))


def test_a_search_that_may_lose_nothing_says_so(saved, tmp_path):
    with pytest.raises(RecipeError, match="No plan that runs fewer experts stays within the tolerance"):
        trim(recipe(saved, tmp_path / "out", plan={"tolerance": 1e-9}))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"plan": {"given": "uniform:1", "act": 1.0}}, "both given"),
        ({"plan": {"search": "two_stage", "act": 1.0}}, "by tolerance, not by act"),
        ({"plan": {"act": 0.5}}, "greater than or equal to 1"),
        ({"hooks": {"start": "ridge", "position": "pre"}}, "needs position parallel"),
        ({"hooks": {"layers": "most"}}, "hooks.layers"),
        ({"training": {"loss": "mse"}}, "training.loss"),
        ({"timing": {"rounds": -1}}, "timing.rounds"),
        ({"timing": {"prompts": [0]}}, "timing.prompts"),
        ({"plan": {"swaps": -1}}, "plan.swaps"),
    ],
)
def test_recipes_that_contradict_themselves(fields, says):
    with pytest.raises(RecipeError, match=says):
        recipe_from({"command": "trim", "model": "m", "text": "t.txt", **fields})


def test_without_a_rate_it_falls_with_the_hidden_size(saved, tmp_path):
    asked = recipe(saved, tmp_path / "out")
    assert trim_module.schedule_of(asked, 96).rate == pytest.approx(0.3 / 96)
    assert trim_module.schedule_of(asked, 4096).rate == pytest.approx(0.3 / 4096)
    before = recipe(saved, tmp_path / "out", hooks={"position": "pre"})
    assert trim_module.schedule_of(before, 96).rate == pytest.approx(0.1 / 96)
    given = recipe(saved, tmp_path / "out", {"rate": 0.5})
    assert trim_module.schedule_of(given, 96, "lm") == TrainingSchedule("lm", 4, 2, 0.5, 2, 0)


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_families_with_habits_of_their_own_trim_from_end_to_end(family, saved, tmp_path):
    # Dense first layers and unsorted slots; a block that gives its router's scores too, and biases.
    save_base(tiny_model(family, num_hidden_layers=3), tmp_path / "model")
    asked = recipe(saved, tmp_path / "out", model=str(tmp_path / "model"), plan={"act": 1.0})
    rows = json.loads((trim(asked) / "result.json").read_text())["test"]["rows"]
    assert 0 < rows["hooks"]["kl"] != rows["plan"]["kl"]
    again = evaluate_text(str(tmp_path / "out"))["rows"]
    assert again["hooks"]["kl"] == pytest.approx(rows["hooks"]["kl"], abs=1e-9)


def test_a_loaded_model_and_texts_in_memory_give_the_same_hooks(saved, done, tmp_path):
    model, tokenizer = load_base(saved / "model")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    texts = [json.loads(line) for line in (saved / "text.jsonl").read_text().splitlines()]
    folder = trim(
        model=model, tokenizer=tokenizer, text=texts, output=tmp_path / "out", training=QUICK, plan="uniform:1"
    )
    for name in ("hookmoe.safetensors", "plan.json"):
        assert (folder / name).read_bytes() == (done / name).read_bytes()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, r"quantised \(fp8\)"),
        ({"quant_method": "mxfp4"}, r"quantised \(mxfp4\)"),
        ({"quant_method": "gptq", "bits": 4}, r"quantised \(gptq, 4 bits\)"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quantised \(bitsandbytes, 4 bits\)"),
    ],
)
def test_a_quantised_base_is_refused_by_name_before_it_is_loaded(saved, tmp_path, monkeypatch, how, says):
    config = json.loads((saved / "model" / "config.json").read_text())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    monkeypatch.setattr(material, "load_base", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(FamilyError, match=f"{says}.*give the checkpoint in one of these.*dequantize=True"):
        trim(recipe(saved, tmp_path / "out", model=str(tmp_path / "model")))


def test_experts_in_eight_bits_are_refused():
    model = tiny_model("mixtral")
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(FamilyError, match="holds its weights as float8_e4m3fn"):
        moe_layers(model)


def test_the_better_of_both_starts_is_taken(saved, done, tmp_path, monkeypatch):
    found = json.loads((done / "result.json").read_text())["hooks"]
    assert found["start"]["kept"] == min(found["start"]["held_out_kl"], key=found["start"]["held_out_kl"].get)
    assert found["start"]["held_out_kl"]["ridge"] != found["start"]["held_out_kl"]["zero"]

    def harmful(model, plan, hooks, *rest):
        for _, hook in hooks.items():
            torch.nn.init.normal_(hook.down.weight, std=5.0)

    monkeypatch.setattr(trim_module, "ridge_start", harmful)
    asked = recipe(saved, tmp_path / "worse", {"control": False, "steps": 1})
    worse = json.loads((trim(asked) / "result.json").read_text())["hooks"]
    assert worse["start"]["kept"] == "zero"
    # Training begins at the plan alone.
    assert worse["losses"]["hooks"][0] == pytest.approx(worse["start"]["held_out_kl"]["zero"], rel=1e-5)
