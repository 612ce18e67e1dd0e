"""Each system on an accelerator: from a recipe to its artefact, killed on the way and gone on with, and what is done with it there."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from freemoe import artefacts
from freemoe.core.errors import ArtifactError
from freemoe.core.run.journal import RunJournal
from freemoe.domain_experts.pipeline import build
from freemoe.hookmoe.pipeline import trim
from freemoe.models.checkpoints.loading import load_base
from freemoe.recipes import recipe_from
from freemoe.tomoe.pipeline import convert
from tests.domain_experts.conftest import choice_rows, paragraphs, write_jsonl
from tests.hookmoe import conftest as trim_conftest
from tests.tiny import save_base, save_base_and_text, tiny_model
from tests.tomoe import conftest as convert_conftest


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A dense base, a mixture, a text and a task."""
    folder = tmp_path_factory.mktemp("files")
    save_base_and_text(folder)
    save_base(tiny_model("mixtral"), folder / "mixture")
    write_jsonl(folder / "law.jsonl", choice_rows(32))
    (folder / "plain.txt").write_text("\n\n".join(paragraphs()))
    return folder


def convert_recipe(files, output, **changes):
    return convert_conftest.recipe(files, output, train={"steps": 2, "save_every": 1}, **changes)


def trim_recipe(files, output, **changes):
    return trim_conftest.recipe(files, output, model=str(files / "mixture"), **changes)


def build_recipe(files, output, **changes):
    return recipe_from(
        {
            "command": "build",
            "model": str(files / "model"),
            "domains": {"law": [str(files / "law.jsonl")]},
            "output": str(output),
            "subdomains": {"count": 2, "min_size": 4},
            "bands": {"step": 0.5, "ratio": 0.5},
            "saliency": {"step": 0.002, "budget": 0.006, "patience": 2},
            "search": {"metrics": ["saliency", "wanda"], "method": "exhaustive", "select": "argmax"},
            "evidence": {"controls": 1},
            **changes,
        }
    )


class Killed(Exception):
    """Stands for a kill."""


def killed_every(units, run):
    """Run, killed whenever so many units of work were written, until it ends; and how often it was killed."""
    unit, kills = RunJournal.run_unit, 0
    while True:
        left = units

        def dying(journal, name, work):
            nonlocal left
            new = name not in journal
            found = unit(journal, name, work)
            left -= new
            if left == 0:
                raise Killed
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(RunJournal, "run_unit", dying)
            try:
                return run(), kills
            except Killed:
                kills += 1


def same_tensors(one, other):
    files = sorted(p.name for p in one.glob("*.safetensors"))
    assert files == sorted(p.name for p in other.glob("*.safetensors")) != []
    for name in files:
        a, b = load_file(one / name), load_file(other / name)
        assert sorted(a) == sorted(b)
        assert all(torch.equal(a[key], b[key]) for key in a)


SYSTEMS = {
    "build": (build, build_recipe, 9),
    "convert": (convert, convert_recipe, 8),
    "trim": (trim, trim_recipe, 3),
}
"""What makes an artefact, of what, and after how many units of work it is killed."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "convert" else pytest.mark.hardening) for name in SYSTEMS],
)
def made(request, files, tmp_path_factory, accelerator):
    """A system's name, and an artefact of it that was made on the accelerator in one go."""
    run, recipe, _ = SYSTEMS[request.param]
    output = tmp_path_factory.mktemp("made") / request.param
    return request.param, run(recipe(files, output, device=accelerator))


def test_a_killed_run_comes_to_the_same(made, files, tmp_path, accelerator):
    name, whole = made
    run, recipe, units = SYSTEMS[name]
    folder, kills = killed_every(units, partial(run, recipe(files, tmp_path / "out", device=accelerator)))
    assert kills > 1
    same_tensors(folder, whole)


def test_it_is_scored_there_as_on_the_cpu(made, files, accelerator):
    _, folder = made
    recipe = {"command": "eval", "artefact": str(folder), "domains": {"law": [str(files / "law.jsonl")]}}
    there, here = (
        {
            name: row["score"]
            for name, row in artefacts.evaluate(recipe_from({**recipe, "device": d}))["domains"][0]["rows"].items()
        }
        for d in (accelerator, "cpu")
    )
    assert here
    assert there == here


def test_it_answers_there_as_on_the_cpu(made, accelerator):
    _, folder = made
    texts = []
    for device in (accelerator, "cpu"):
        opened = artefacts.load(folder, device=device)
        assert opened.model.device.type == torch.device(device).type
        texts.append(opened.generate_text("court claim 5?", max_new_tokens=12, do_sample=False))
    assert texts[0] == texts[1]


def test_an_expert_is_merged_there(made, tmp_path, accelerator):
    name, folder = made
    if name != "build":
        with pytest.raises(ArtifactError, match="cannot be merged"):
            artefacts.merge(folder, "base", tmp_path / "merged")
        return
    opened = artefacts.load(folder, device=accelerator)
    expert = next(iter(opened.experts))
    artefacts.merge(folder, expert, tmp_path / "merged", device=accelerator)
    ids = torch.arange(3, 20)[None].to(opened.device)
    with torch.no_grad():
        merged = load_base(tmp_path / "merged", device=accelerator)[0](ids).logits
        assert torch.equal(merged, opened(ids, expert=expert).logits)
        assert not torch.equal(merged, opened(ids, expert="base").logits)
