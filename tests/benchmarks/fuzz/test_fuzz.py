"""Hostile input: the net catches what is planted, and what is drawn ends in an answer that is right or in our own words."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz import case as case_module
from benchmarks.fuzz import running
from benchmarks.fuzz.case import KINDS, Case, judge, read_case, warm, write_case
from benchmarks.fuzz.material import Material, make_material
from benchmarks.harness import Settings, run_bench, save_result
from freemoe.core.errors import DataError, RecipeError, UnknownNameError, VersionError

pytestmark = pytest.mark.filterwarnings("ignore")

DATA = Path(__file__).parents[2] / "data" / "fuzz"
SEED, CASES = 16, 300


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    found = make_material(tmp_path_factory.mktemp("material"))
    for kind in KINDS.names():
        warm(kind, found)
    return found


@pytest.fixture
def planted() -> Iterator[None]:
    KINDS.add("planted", "tests.benchmarks.fuzz.planted", "for these tests")
    yield
    del KINDS._entries["planted"], KINDS._about["planted"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# ------------------------------------------------------------------------------- what is drawn


@pytest.mark.parametrize("kind", KINDS.names())
def test_what_is_drawn_ends_well(material: Material, kind: str) -> None:
    count = running.counts(CASES, KINDS.names())[kind]
    bad = {}
    for case in running.cases(material, {kind: count}, SEED):
        verdict = judge(case, material)
        if not verdict.good:
            bad[case.name] = f"{verdict.ending}: {verdict.said[-300:]}\n{json.dumps(case.what)[:400]}"
    assert not bad, "\n\n".join(f"{name} {said}" for name, said in bad.items())


FOUND = sorted(DATA.glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_what_was_found_once_stays_mended(material: Material, path: Path) -> None:
    case = read_case(path)
    verdict = judge(case, material)
    assert verdict.good, f"{case.about}\n{verdict.ending}: {verdict.said}"


def test_the_same_seed_draws_the_same_cases(material: Material) -> None:
    wanted = running.counts(40, KINDS.names())
    first = list(running.cases(material, wanted, 5))
    assert first == list(running.cases(material, wanted, 5))
    assert [case.name for case in first] != [case.name for case in running.cases(material, wanted, 6)]
    assert len({case.name for case in first}) == len(first) == sum(wanted.values())


def test_hypothesis_is_asked_for_by_name(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VersionError, match=r"hypothesis: pip install 'freemoe\[dev\]'"):
        next(running.cases(material, {"recipes": 1}, 0))


# ------------------------------------------------------------------------------- the net


@pytest.mark.parametrize(
    ("what", "ending"),
    [
        ("accept", "accepted"),
        ("refuse", "refused"),
        ("wrong", "wrong"),
        ("raise", "traceback"),
        ("exit", "traceback"),
        ("sleep", "hang"),
        ("swallow", "hang"),
        ("swell", "traceback"),
        ("write", "accepted"),
    ],
)
def test_every_way_to_end_is_noticed(
    material: Material, planted: None, monkeypatch: pytest.MonkeyPatch, what: str, ending: str
) -> None:
    monkeypatch.setattr(case_module, "CROWDED", 1)
    before = Path.cwd()
    verdict = judge(Case("planted", what), material, patience=0.5)
    assert verdict.ending == ending, verdict.said
    assert verdict.good is (ending in ("accepted", "refused"))
    assert Path.cwd() == before
    assert not (before / "left.txt").exists()


def test_a_process_that_dies_or_hears_nothing_is_replaced(
    material: Material, planted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "CROWDED", 1)
    monkeypatch.setattr(running, "_GRACE", 2.0)
    worker = running.Worker(material, patience=1.0)
    try:
        endings = [worker.judge(Case("planted", what)).ending for what in ("accept", "die", "refuse", "deaf", "wrong")]
    finally:
        worker.close()
    assert endings == ["accepted", "crash", "refused", "hang", "wrong"]


RECIPE = "command: build\nmodel: m\ndomains: {a: [b.jsonl]}\n"
CHOICES = (
    '{"question": "q", "choices": ["x", "y"], "answer": 1}\n{"question": "r", "choices": ["x", "y"], "answer": "B"}\n'
)


def _edited(artefact: str, file: str, path: list[Any], to: Any) -> dict[str, Any]:
    return {"artefact": artefact, "edits": [{"file": file, "set": path, "to": to}], "again": True}


def test_a_recipe_that_is_read_as_another_is_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe import recipes

    case = Case("recipes", {"text": RECIPE + "seed: 3\n"})
    assert judge(case, material).ending == "accepted"
    own = recipes.load_recipe
    monkeypatch.setattr(recipes, "load_recipe", lambda path: own(path).model_copy(update={"seed": 4}))
    assert "seed: 3 became 4" in judge(case, material).said


def test_another_right_answer_is_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe.text import shapes

    case = Case("tasks", {"suffix": ".jsonl", "bytes": CHOICES})
    assert judge(case, material).ending == "accepted"
    monkeypatch.setattr(shapes, "answer_index", lambda *_: 0)
    assert judge(case, material).ending == "wrong"


def test_another_base_is_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe.domain_experts import mixture

    case = Case("artefacts", _edited("experts", "freemoe_config.json", ["base_fingerprint"], "0" * 64))
    assert judge(case, material).ending == "refused"
    monkeypatch.setattr(mixture, "require_base", lambda *_: None)
    assert "another base" in judge(case, material).said


def test_an_expert_that_does_something_else_is_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe.domain_experts.expert import Expert
    from freemoe.models.mask import Mask

    case = Case("artefacts", {"artefact": "experts", "edits": [], "again": True})
    assert judge(case, material).ending == "accepted"
    own = Expert.mask
    monkeypatch.setattr(Expert, "mask", lambda self, weights: Mask(dict(list(own(self, weights).items())[1:])))
    assert judge(case, material).ending == "wrong"


def test_hooks_that_are_read_as_others_are_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe.hookmoe import adapter

    case = Case("artefacts", {"artefact": "trimmed", "edits": [], "again": True})
    assert judge(case, material).ending == "accepted"
    own = adapter.load_adapter
    monkeypatch.setattr(adapter, "load_adapter", lambda *asked: dataclasses.replace(own(*asked), rescale="renorm"))
    assert "another rule" in judge(case, material).said


def test_numbers_that_no_file_holds_are_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe.models.checkpoints import loading

    case = Case("bases", {"edits": []})
    assert judge(case, material).ending == "accepted"
    own = loading.load_base

    def made_up(*asked: Any, **how: Any) -> Any:
        model, tokenizer = own(*asked, **how)
        model.lm_head.weight.data.normal_()
        return model, tokenizer

    monkeypatch.setattr(loading, "load_base", made_up)
    assert "other numbers than the file" in judge(case, material).said


def test_a_result_that_is_none_is_noticed(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    from freemoe import results

    what = {"artefact": "experts", "edits": [], "page": False}
    assert judge(Case("results", what), material).ending == "accepted"
    gone = {**what, "edits": [{"file": "result.json", "drop": ["created"]}]}
    whole = results.read_result(material.folder / "experts")
    monkeypatch.setattr(results, "read_result", lambda folder: whole)
    assert "a result that is none was shown" in judge(Case("results", gone), material).said


# ------------------------------------------------------------------------------- the benchmark


def test_a_case_is_kept_and_opened_again(material: Material, planted: None, tmp_path: Path) -> None:
    case = Case("planted", "wrong", 7)
    path = write_case(case, tmp_path)
    assert read_case(path) == case
    assert path.stem == case.name
    for text, error in (("{", DataError), ("[]", DataError), ('{"kind": "recipe", "what": 1}', UnknownNameError)):
        path.write_text(text)
        with pytest.raises(error):
            read_case(path)


def test_a_quick_run(material: Material, planted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "QUICK", 30)
    monkeypatch.setattr(running, "make_material", lambda folder: material)
    found = run_bench("fuzz", Settings(quick=True, only="plant*"))
    assert [f["name"] for f in found["figures"]] == [
        "inputs tried",
        "tracebacks",
        "hangs over 10 s",
        "wrong results accepted",
    ]
    assert found["details"]["by_kind"] == {"planted": {"accepted": 1, "refused": 1}}
    with pytest.raises(RecipeError, match=r"allowed: a kind \(recipes"):
        run_bench("fuzz", Settings(quick=True, only="plants"))


def test_what_went_wrong_is_kept_as_a_file_that_runs_again(
    material: Material, planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "make_material", lambda folder: material)
    path = write_case(Case("planted", "wrong"), tmp_path / "asked")
    found = run_bench("fuzz", Settings(only=str(path)))
    assert [f["value"] for f in found["figures"]] == [1, 0, 0, 1]
    assert found["figures"][3]["verdict"] == "missed"
    save_result(found, tmp_path)
    kept = sorted((tmp_path / "fuzz-cases").iterdir())
    assert [read_case(k).what for k in kept] == ["wrong"]
    again = run_bench("fuzz", Settings(only=str(tmp_path / "fuzz-cases")))
    assert again["figures"][3]["value"] == 1
