"""Every example runs by itself in an empty folder, and the notebook's cells run in order."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import matplotlib
import pytest

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


def test_every_example_is_listed_and_tested() -> None:
    there = {p.name for p in EXAMPLES.iterdir() if p.suffix in (".py", ".ipynb", ".yaml")}
    # The file is tried by tests/serve/ray/test_example.py.
    assert there == {*SCRIPTS, "experts.ipynb", "ray_serve.yaml"}
    assert {*re.findall(r"`(\w+\.\w+)`", (EXAMPLES / "README.md").read_text(encoding="utf-8"))} == there


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    for words in SCRIPTS[name]:
        assert words in said


def test_the_notebook_is_clean() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None), "commit it without outputs"
            ast.parse("".join(cell["source"]))


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg", force=True)
    names: dict = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    assert "auto " in capsys.readouterr().out
    assert names["figure"].axes
    names["plt"].close(names["figure"])
