"""Hostile input: the net catches what is planted, and what is drawn ends in an answer that is right or in our own words."""

import dataclasses
import logging
import os
import time
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name

import pytest

from freemoe.models.mask import Mask
from tests.hardening import full
from tests.hardening.fuzz import case as case_module
from tests.hardening.fuzz import running
from tests.hardening.fuzz.case import SHARES, Case, judge, read_case, warm, write_case
from tests.hardening.fuzz.running import CASES, Opener, cases, share_of

pytestmark = pytest.mark.filterwarnings("ignore")

KEPT = Path(os.environ.get("FREEMOE_FUZZ_CASES", Path(__file__).parents[2] / "data" / "fuzz"))
SEED, FEW = 16, 300
ABOUT = "hostile recipes, files and artefacts: tracebacks, hangs, wrong answers"


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", SHARES)
def test_what_is_drawn_ends_well(material, tmp_path, kind):
    warm(kind, material)
    drawn = cases(material, kind, share_of(kind, FEW), SEED)
    require_good([(case, judge(case, material)) for case in drawn], tmp_path)


@pytest.fixture(scope="module")
def found():
    """Cases of full runs, of all kinds that were asked for."""
    tried = []
    began = time.perf_counter()
    yield tried
    if tried:
        full.keep("fuzz", ABOUT, running.outcome(tried, CASES * full.SHARE), began)


@pytest.mark.hardening
@pytest.mark.parametrize("kind", SHARES)
def test_everything_that_is_drawn_ends_well(material, found, tmp_path, kind):
    count = share_of(kind, CASES * full.SHARE)
    with closing(Opener(material, kind)) as opener:
        tried = [(case, opener.judge(case)) for case in cases(material, kind, count, full.SEED)]
    found += tried
    assert len(tried) == count
    require_good(tried, Path(full.OUT) / "fuzz-cases" if full.OUT else tmp_path)


def require_good(tried, folder):
    """Keep every case that did not end well as a file that `test_a_kept_case_ends_well` opens again."""
    bad = []
    for case, verdict in tried:
        if not verdict.good:
            said = f"{verdict.ending}: {verdict.said[-400:]}"
            path = write_case(dataclasses.replace(case, about=said), folder)
            bad.append(f"FREEMOE_FUZZ_CASES={path} python -m pytest tests/hardening/fuzz -k kept\n{said}")
    assert not bad, "\n\n".join(bad)


FOUND = [KEPT] if KEPT.is_file() else sorted(KEPT.glob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_a_kept_case_ends_well(material, path):
    case = read_case(path)
    warm(case.kind, material)
    verdict = judge(case, material)
    assert verdict.good, f"{case.about}\n{verdict.ending}: {verdict.said}"


def test_the_same_seed_draws_the_same_cases(material):
    def drawn(seed):
        return [case for kind in SHARES for case in cases(material, kind, share_of(kind, 40), seed)]

    first = drawn(5)
    assert first == drawn(5)
    assert [case.name for case in first] != [case.name for case in drawn(6)]
    assert len({case.name for case in first}) == len(first) == sum(share_of(kind, 40) for kind in SHARES)


ENDINGS = {"accept": "accepted", "refuse": "refused", "wrong": "wrong", "raise": "traceback", "exit": "traceback"}
ENDINGS |= {"sleep": "hang", "swallow": "hang", "swell": "traceback", "write": "accepted"}


@pytest.mark.parametrize(("what", "ending"), ENDINGS.items())
def test_every_way_to_end_is_noticed(material, monkeypatch, what, ending):
    monkeypatch.setattr(case_module, "CROWDED", 1)
    before = Path.cwd()
    verdict = judge(Case("planted", what), material, patience=0.5)
    assert verdict.ending == ending, verdict.said
    assert verdict.good is (ending in ("accepted", "refused"))
    assert Path.cwd() == before
    assert not Path("left.txt").exists()


@pytest.mark.hardening
def test_a_process_that_dies_or_hears_nothing_is_replaced(material, monkeypatch):
    monkeypatch.setattr(running, "CROWDED", 1)
    monkeypatch.setattr(running, "_GRACE", 2.0)
    with closing(Opener(material, "planted", patience=1.0)) as opener:
        endings = [opener.judge(Case("planted", what)).ending for what in ("die", "refuse", "deaf")]
    assert endings == ["crash", "refused", "hang"]


def test_what_went_wrong_is_counted_and_written_as_a_file_that_is_opened_again(material, tmp_path):
    one = Case("planted", "wrong", 7)
    tried = [(case, judge(case, material)) for case in (one, Case("planted", "accept"))]
    figures = {figure.name: figure for figure in running.outcome(tried, 2).figures}
    assert [figure.value for figure in figures.values()] == [2, 0, 0, 1]
    assert list(figures) == ["inputs tried", "tracebacks", "hangs over 10 s", "wrong results accepted"]
    assert figures["wrong results accepted"].verdict(quick=False) == "missed"
    assert running.outcome(tried, 2).details["by_kind"] == {"planted": {"wrong": 1, "accepted": 1}}
    said = rf"FREEMOE_FUZZ_CASES=\S*{one.name}\.json .*\s+wrong: it is not what it says"
    with pytest.raises(AssertionError, match=said):
        require_good(tried, tmp_path)
    [path] = tmp_path.iterdir()
    assert dataclasses.replace(read_case(path), about="") == one
    with pytest.raises(AssertionError, match="it is not what it says"):
        test_a_kept_case_ends_well(material, path)


def _made_up(own, _):
    def load_base(*asked, **how):
        model, tokenizer = own(*asked, **how)
        model.lm_head.weight.data.normal_()
        return model, tokenizer

    return load_base


RECIPE = "command: build\nmodel: m\ndomains: {a: [b.jsonl]}\nseed: 3\n"
CHOICES = (
    '{"question": "q", "choices": ["x", "y"], "answer": 1}\n{"question": "r", "choices": ["x", "y"], "answer": "B"}\n'
)
WHOLE = {"edits": [], "again": True}
OTHER_BASE = {"file": "freemoe_config.json", "set": ["base_fingerprint"], "to": "0" * 64}
UNDATED = {"file": "result.json", "drop": ["created"]}
# What is opened and how that ends; which function of the library then lies, how, and what is said of it.
LIES = {
    "another recipe": (
        *("recipes", {"text": RECIPE}, "accepted", "freemoe.recipes.load_recipe"),
        lambda own, _: lambda path: own(path).model_copy(update={"seed": 4}),
        "seed: 3 became 4",
    ),
    "another right answer": (
        *("tasks", {"suffix": ".jsonl", "bytes": CHOICES}, "accepted"),
        *("freemoe.text.shapes.answer_index", lambda *_: lambda *_: 0, "the answer 1 became 0"),
    ),
    "another base": (
        *("artefacts", {"artefact": "experts", "edits": [OTHER_BASE], "again": True}, "refused"),
        *("freemoe.domain_experts.mixture.require_base", lambda *_: lambda *_: None, "another base"),
    ),
    "an expert that does something else": (
        *("artefacts", {"artefact": "experts", **WHOLE}, "accepted", "freemoe.domain_experts.expert.DomainExpert.mask"),
        lambda own, _: lambda self, weights: Mask(dict(list(own(self, weights).items())[1:])),
        "",
    ),
    "other hooks": (
        *("artefacts", {"artefact": "trimmed", **WHOLE}, "accepted", "freemoe.hookmoe.adapter.load_adapter"),
        lambda own, _: lambda *asked: dataclasses.replace(own(*asked), rescale="renorm"),
        "another rule",
    ),
    "numbers that no file holds": (
        *("bases", {"edits": []}, "accepted", "freemoe.models.checkpoints.loading.load_base", _made_up),
        "other numbers than the file",
    ),
    "a result that is none": (
        *("results", {"artefact": "experts", "edits": [UNDATED], "page": False}, "refused"),
        *("freemoe.results.read_result", lambda own, material: lambda _: own(material.folder / "experts")),
        "a result that is none was shown",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_of_the_library_is_noticed(material, monkeypatch, lie):
    kind, what, ending, place, make, says = LIES[lie]
    case = Case(kind, what)
    assert judge(case, material).ending == ending
    monkeypatch.setattr(place, make(resolve_name(place), material))
    verdict = judge(case, material)
    assert verdict.ending == "wrong"
    assert says in verdict.said


def test_a_whole_result_is_shown(material):
    assert judge(Case("results", {"artefact": "experts", "edits": [], "page": False}), material).ending == "accepted"
