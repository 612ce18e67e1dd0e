"""Data in memory become files beside the run; a loaded model is lent, and comes back as it was."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict

from freemoe.core.errors import ArtifactError, DataError, RecipeError
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.evals.keywords import resolve_recipe
from freemoe.hookmoe.recipe import TrimRecipe
from freemoe.models.checkpoints.lending import provide_model
from freemoe.models.checkpoints.loading import load_base, load_tokenizer
from freemoe.tomoe.material import checkpoint_activations
from freemoe.tomoe.recipe import ConvertRecipe
from tests.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{i}+1=", "target": str(i + 1)} for i in range(4)]


def recipe(kind=BuildRecipe, tokenizer=None, overwrite=False, **fields):
    with resolve_recipe(kind, None, {"model": "m", **fields}, tokenizer, overwrite) as made:
        return made


def lines(spec):
    return [json.loads(line) for line in Path(spec.removeprefix("text:")).read_text().split("\n") if line]


@pytest.mark.parametrize(
    "data",
    [ROWS, tuple(ROWS), Dataset.from_list(ROWS), Dataset.from_list(ROWS).to_iterable_dataset(), pd.DataFrame(ROWS)],
    ids=["list", "tuple", "Dataset", "IterableDataset", "DataFrame"],
)
def test_rows_are_written_beside_the_run(tmp_path, data):
    output = tmp_path / "out"
    made = recipe(domains={"sums": data, "law": "a.jsonl", "both": ["b.jsonl", Path("c.jsonl")]}, output=output)
    file = tmp_path / "out.data" / "sums.jsonl"
    assert made.domains == {"sums": (str(file),), "law": ("a.jsonl",), "both": ("b.jsonl", "c.jsonl")}
    assert made.output == str(output)
    assert lines(str(file)) == ROWS


def test_texts_are_a_domain_of_text(tmp_path):
    texts = ["One document, \u2028 with a line separator.\nAnd a second line.", "Zwei Wörter"]
    made = recipe(domains={"wiki": texts}, output=str(tmp_path / "out"))
    (spec,) = made.domains["wiki"]
    assert spec == f"text:{tmp_path}/out.data/wiki.jsonl"
    assert lines(spec) == [{"text": t} for t in texts]
    for specs in (["text:my notes.txt", "gsm8k"], ["demo:math"], [str(tmp_path)]):
        assert recipe(domains={"d": specs}, output=str(tmp_path / "out")).domains["d"] == tuple(specs)
    named = tmp_path / "a file of mine.jsonl"
    named.write_text("{}")
    assert recipe(domains={"d": [str(named)]}).domains["d"] == (str(named),)
    with pytest.raises(RecipeError, match=r"'Zwei Wörter' is a text, and 'gsm8k' names a file or a task"):
        recipe(domains={"wiki": ["Zwei Wörter", "gsm8k"]}, output=str(tmp_path / "out"))


def test_two_splits(tmp_path):
    both = DatasetDict({"train": Dataset.from_list(ROWS[:3]), "test": Dataset.from_list(ROWS[3:])})
    for data in (both, {"reference": ROWS[:3], "test": ROWS[3:]}):
        (spec,) = recipe(domains={"d": data}, output=str(tmp_path / "out")).domains["d"]
        first, second = spec.split("::")
        assert (lines(first), lines(second)) == (ROWS[:3], ROWS[3:])
    (spec,) = recipe(domains={"d": {"train": ["a b"], "test": ["c d"]}}, output=str(tmp_path / "x")).domains["d"]
    assert spec == f"text:{tmp_path}/x.data/d.train.jsonl::{tmp_path}/x.data/d.test.jsonl"
    with pytest.raises(RecipeError, match=r"splits are called 'left', 'right'; allowed: {'reference', 'test'} or"):
        recipe(domains={"d": {"left": ROWS, "right": ROWS}}, output=str(tmp_path / "y"))


def test_texts_of_conversions_and_trims(tmp_path):
    output = str(tmp_path / "out")
    for text, wanted in (("a.txt", ("a.txt",)), (["a.txt", "b.txt"], ("a.txt", "b.txt"))):
        assert recipe(ConvertRecipe, text=text, output=output).text == wanted
    (file,) = recipe(ConvertRecipe, text=["One text.", "Two texts."], output=output, active=0.7).text
    assert lines(file) == [{"text": "One text."}, {"text": "Two texts."}]
    assert recipe(TrimRecipe, text="demo:", output=output).text == "demo:"
    assert recipe(TrimRecipe, text=[{"text": "One text."}], output=output, overwrite=True).text == file


def test_an_identical_file_is_left_alone_and_another_one_refused(tmp_path):
    output = str(tmp_path / "out")
    (file,) = recipe(domains={"d": ROWS}, output=output).domains["d"]
    before = Path(file).stat().st_mtime_ns
    recipe(domains={"d": Dataset.from_list(ROWS)}, output=output)
    assert Path(file).stat().st_mtime_ns == before
    with pytest.raises(ArtifactError, match=r"out.data/d.jsonl' holds other rows"):
        recipe(domains={"d": ROWS[:2]}, output=output)
    assert lines(file) == ROWS
    recipe(domains={"d": ROWS[:2]}, output=output, overwrite=True)
    assert lines(file) == ROWS[:2]


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (3, RecipeError, "law is of type int"),
        ([], DataError, "law: there are no rows"),
        ([ROWS[0], "x y"], DataError, "row 1 is of type str"),
        ([{"prompt": float("nan"), "target": "x"}], DataError, "row 0 cannot be written as JSON"),
        ([{"prompt": np.zeros(2), "target": "x"}], DataError, "row 0 cannot be written as JSON"),
    ],
    ids=str,
)
def test_data_that_cannot_be_used(tmp_path, data, error, says):
    with pytest.raises(error, match=says):
        recipe(domains={"law": data}, output=str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_a_recipe_or_keywords(tmp_path):
    own = BuildRecipe(model="m", domains={"d": "a.jsonl"})
    with resolve_recipe(BuildRecipe, own, {}, None, False) as made:
        assert made is own
    for given, fields, tokenizer, says in (
        (own, {"seed": 1}, None, "not both; got a recipe and seed"),
        (own, {}, tiny_tokenizer(), "got a recipe and tokenizer"),
        (None, {}, None, r"build needs a BuildRecipe or keywords"),
        ("recipe.yaml", {}, None, "got str: 'recipe.yaml'"),
        (None, {"model": "m", "domains": {"d": "a"}}, tiny_tokenizer(), "tokenizer goes with a loaded model"),
        (None, {"model": 3, "domains": {"d": "a"}}, None, "model is of type int"),
        (None, {"domains": {"d": "a"}}, None, "model: Field required"),
        (None, {"model": "m", "domains": {"d": "a"}, "dtype": torch.int8}, None, "dtype is 'int8'"),
        (None, {"model": "m", "domains": {"d": ROWS}, "metrc": 1, "output": str(tmp_path / "o")}, None, "metric"),
    ):
        with pytest.raises(RecipeError, match=says), resolve_recipe(BuildRecipe, given, fields, tokenizer, False):
            pass
    assert not list(tmp_path.iterdir())
    assert recipe(domains={"d": "a"}, dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"workers": 2}, "workers is 2, and other processes cannot share a loaded model"),
        ({"dtype": "bfloat16"}, "dtype is 'bfloat16', and the loaded model is float32"),
        ({"device": "cuda"}, "device is 'cuda', and the loaded model is cpu"),
        ({"revision": "main"}, "leave it out"),
    ],
    ids=str,
)
def test_what_a_loaded_model_settles(values, says):
    with pytest.raises(RecipeError, match=says):
        recipe(model=tiny_model("llama"), tokenizer=tiny_tokenizer(), domains={"d": "a"}, **values)


def test_a_lent_model_stands_for_its_name():
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    fields = {"model": model, "domains": {"d": "a"}, "dtype": "float32", "device": "cpu"}
    with resolve_recipe(BuildRecipe, None, fields, tokenizer, False) as made:
        assert made.model == "LlamaForCausalLM in memory"
        assert load_base(made.model, None, made.dtype, made.device) == (model, tokenizer)
        assert load_tokenizer(made.model) is tokenizer
    with pytest.raises(Exception, match="LlamaForCausalLM in memory"):
        load_base(made.model)


def test_a_lent_model_comes_back_as_it_was():
    model = tiny_model("llama").train()
    model.model.layers[0].eval()
    parameters = list(model.parameters())
    parameters[0].requires_grad_(False)
    parameters[1].grad = torch.ones_like(parameters[1])
    handle = model.lm_head.register_forward_hook(lambda *_: None)
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    hooks = dict(model.lm_head._forward_hooks)

    def lend(error):
        with provide_model("x", model, None):
            assert not any(m.training for m in model.modules())
            checkpoint_activations(model)
            model.requires_grad_(False)
            parameters[1].grad = None
            model.model.layers[1].new = 1
            model.lm_head.register_forward_hook(lambda *_: None)
            handle.remove()
            raise error

    with pytest.raises(KeyboardInterrupt):
        lend(KeyboardInterrupt())
    assert {n: dict(vars(m)) for n, m in model.named_modules()} == before
    assert model.lm_head._forward_hooks == hooks
    assert [p.requires_grad for p in parameters] == [False, *[True] * (len(parameters) - 1)]
    assert torch.equal(parameters[1].grad, torch.ones_like(parameters[1]))
