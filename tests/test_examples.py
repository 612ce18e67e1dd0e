"""Every example runs by itself in an empty folder, and the notebook's cells run in order."""

import ast
import json
import re
import runpy
from pathlib import Path

import matplotlib
import pytest

import freemoe
from freemoe import assets
from freemoe.recipes import recipe_from, set_path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = {
    "build_expert.py": [
        "expert ",
        "control ",
        "auto -> ",
        "bit-equal afterwards: True",
        "plain checkpoint: code-model",
    ],
    "convert_and_generate.py": ["dense ", "converted ", "perplexity"],
    "trim_and_evaluate.py": ["full ", "plan ", "hooks ", "of 100 questions"],
}
"""Script -> what it prints."""
NOTEBOOK = json.loads((EXAMPLES / "experts.ipynb").read_text(encoding="utf-8"))


def test_every_example_is_listed_and_tested():
    there = {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb", ".yaml")}
    # The file is tried by tests/serve/ray/test_example.py.
    assert there == {*SCRIPTS, "experts.ipynb", "ray_serve.yaml"}
    assert {*re.findall(r"`(\w+\.\w+)`", (EXAMPLES / "README.md").read_text(encoding="utf-8"))} == there


LESS = {
    "build": {"data.limit": 60, "search.select": "argmax", "saliency.patience": 1},
    "convert": {
        **{"train.steps": 2, "train.statistics_tokens": 1024, "train.evaluation_tokens": 1024},
        **{"rivals": False, "timing.rounds": 1, "timing.new_tokens": 2},
    },
    "trim": {"training.steps": 2, "training.limit": 8, "training.held_out": 4, "training.test": 8},
}
"""Of what takes long, as much as shows that an example runs."""


@pytest.fixture(params=["in short", pytest.param("as it is", marks=pytest.mark.hardening)])
def folder(request, tmp_path, monkeypatch):
    """An empty folder to run in."""
    monkeypatch.chdir(tmp_path)

    def shortened(run):
        def running(recipe):
            data = recipe.model_dump(mode="json")
            for path, value in LESS[recipe.command].items():
                set_path(data, path, value)
            return run(recipe_from(data))

        return running

    if request.param == "in short":
        documents = assets.demo_documents()[:800]
        monkeypatch.setattr(assets, "demo_documents", lambda: documents)
        for name in LESS:
            monkeypatch.setattr(freemoe, name, shortened(getattr(freemoe, name)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(name, capsys):
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    for words in SCRIPTS[name]:
        assert words in said


def test_the_notebook_is_clean():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "commit it without outputs"
            ast.parse("".join(cell["source"]))


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_notebook_runs(capsys):
    matplotlib.use("agg", force=True)
    names = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert "auto " in capsys.readouterr().out
    assert names["figure"].axes
    names["plt"].close(names["figure"])
