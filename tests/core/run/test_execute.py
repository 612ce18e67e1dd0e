"""How a run begins and ends, with a system of three lines."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel

from freemoe.core.artifacts import read_manifest
from freemoe.core.errors import ArtifactError, DataError
from freemoe.core.files import write_atomic
from freemoe.core.run.execute import RunOutput, is_finished, open_run, publish_run

SEEN = {"file": "seen.safetensors", "documents": 0}


@dataclass(frozen=True)
class Plain:
    """A recipe."""

    output: str
    model: str = "base"
    revision: str | None = None
    number: int = 1

    def model_dump(self, *, mode):
        return asdict(self)

    def notes(self):
        return ["half of it"] if self.number > 1 else []


class Doubled(BaseModel, extra="allow"):
    """Its result."""

    kind: Literal["doubled"]
    sum: int


class System:
    """Doubles a number, in two units of work; may die before either, and reads an input."""

    def __init__(self, recipe, dies_at=None, text="same"):
        self.recipe, self.dies_at, self.text, self.did = recipe, dies_at, text, 0

    def _work(self, unit):
        if unit == self.dies_at:
            raise KeyboardInterrupt
        self.did += 1
        return self.recipe.number

    def pipeline(self, run):
        if self.dies_at == 0:
            raise DataError("nothing to read")
        run.require_same_inputs({"text": self.text})
        numbers = [run.journal.run_unit(f"unit {n}", lambda n=n: self._work(n)) for n in (1, 2)]
        write_atomic(run.partial / "numbers.txt", str(sum(numbers)).encode())
        return RunOutput("fingerprint", {"sum": sum(numbers)}, {"numbers": numbers}, SEEN, cost={"bytes": 1})

    def run(self, page=None, resume=True, **how):
        if resume and is_finished(self.recipe):
            return Path(self.recipe.output)
        with open_run(self.recipe, resume=resume, **how) as run:
            return publish_run(run, Doubled, self.recipe, self.pipeline(run), readable, lambda r: f"sum {r.sum}", page)


def readable(folder):
    """Odd numbers cannot be read."""
    found = json.loads((folder / "result.json").read_text())
    assert read_manifest(folder)["kind"] == found["kind"] == "doubled"
    if found["recipe"]["number"] % 2 == 0:
        raise ArtifactError(f"sum: {found['sum']} is not allowed.")


def test_what_its_own_reader_refuses_is_not_published_and_no_work_is_lost(tmp_path, monkeypatch):
    recipe = Plain(str(tmp_path / "out"), number=2)
    with pytest.raises(ArtifactError, match=r"is not published, as its own readers refuse it: sum: 4 is not allowed"):
        System(recipe).run()
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]
    monkeypatch.setitem(globals(), "readable", lambda folder: None)
    # Neither is what its type refuses.
    with pytest.raises(ArtifactError, match=r"is not published, .*The result is not whole: sum: .*integer"):
        System(Plain(str(tmp_path / "other"), number=0.25)).run()  # type: ignore[arg-type]
    mended = System(recipe)
    assert (mended.run() / "numbers.txt").read_text() == "4"
    assert mended.did == 0


def test_a_run_that_is_killed_while_its_page_is_drawn_goes_on(tmp_path):
    def killed(folder):
        (folder / ".report.html.lock").touch()
        (folder / "report.html").write_text("ha")
        raise KeyboardInterrupt

    recipe = Plain(str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        System(recipe).run(page=killed)
    again = System(recipe)
    folder = again.run(page=lambda folder: (folder / "report.html").write_text("whole"))
    assert again.did == 0
    assert (folder / "report.html").read_text() == "whole"
    assert not {"report.html", ".report.html.lock"} & {*read_manifest(folder)["files"]}
    assert not (folder / ".report.html.lock").exists()


def test_everything_is_written_and_vouched_for(tmp_path):
    folder = System(Plain(str(tmp_path / "out"))).run()
    assert folder == tmp_path / "out"
    result = json.loads((folder / "result.json").read_text())
    assert list(result)[:5] == ["format", "kind", "freemoe", "created", "recipe"]
    assert (result["kind"], result["sum"], result["seen"]) == ("doubled", 2, SEEN)
    assert (result["cost"]["units_done"], result["cost"]["units_reused"], result["cost"]["bytes"]) == (3, 0, 1)
    manifest = read_manifest(folder)
    assert (manifest["base_fingerprint"], manifest["numbers"]) == ("fingerprint", [1, 1])
    assert {"numbers.txt", "README.md", "recipe.yaml", "result.json"} <= {*manifest["files"]}
    assert (folder / "README.md").read_text() == "sum 2"
    assert not (tmp_path / "out.partial").exists()


def test_a_run_that_died_goes_on_and_with_the_same_input_alone(tmp_path):
    recipe = Plain(str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        System(recipe, dies_at=2).run()
    with pytest.raises(DataError, match=r"was started with another text.*--no-resume"):
        System(recipe, text="other").run()
    again = System(recipe)
    result = json.loads((again.run() / "result.json").read_text())
    assert again.did == 1
    assert (result["sum"], result["cost"]["units_reused"]) == (2, 2)


@pytest.mark.parametrize(("dies_at", "error"), [(0, DataError), (1, KeyboardInterrupt)])
def test_one_that_ends_before_any_work_leaves_nothing(dies_at, error, tmp_path):
    with pytest.raises(error):
        System(Plain(str(tmp_path / "out")), dies_at=dies_at).run()
    assert list(tmp_path.iterdir()) == []
