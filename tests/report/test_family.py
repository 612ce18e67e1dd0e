"""What the pages of all commands have in common, and what each says as its verdict."""

import copy
import itertools
import json
import math
import re
from urllib.parse import unquote

import pytest
import yaml
from typer.testing import CliRunner

from freemoe.artefacts import evaluate
from freemoe.cli import app
from freemoe.core.artifacts import write_manifest
from freemoe.core.errors import ArtifactError
from freemoe.evals.verdict import perplexity_against
from freemoe.hookmoe import card as trimmed_card
from freemoe.recipes import EvalRecipe, recipe_from
from freemoe.report import evaluation
from freemoe.report.figures.drawing import ReportFigure
from freemoe.tomoe import card as converted_card
from tests.report.family import FAMILY, make_evaluation, make_trim
from tests.report.page import Page
from tests.report.synthetic import typed

SECTIONS = ["verdict", "scores", "reading", "pictures", "splits", "provenance", "recipe"]


@pytest.fixture(params=FAMILY)
def name(request):
    return request.param


def test_every_page_has_the_same_sections_in_the_same_order(name, pages):
    page = Page(pages[name])
    assert [i for i in page.ids if i in SECTIONS] == SECTIONS
    assert page.depth == 0
    assert len(page.ids) == len(set(page.ids))


def test_every_page_is_one_file_that_runs_nothing(name, pages):
    page = Page(pages[name])
    assert all(v.startswith("#") or v.startswith("data:text/yaml") for _, v in page.links)
    assert {v[1:] for _, v in page.links if v.startswith("#")} <= set(page.ids)
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert not re.search(r"https?:|//cdn|@import|@font-face|url\((?!#)|\bon\w+=", pages[name])


def test_every_page_can_be_walked_by_its_headings_and_on_a_phone(name, pages):
    html = pages[name]
    levels = [int(tag[1]) for tag in Page(html).tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert '<html lang="en">' in html
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    assert "prefers-color-scheme:dark" in html


def test_every_figure_is_drawn_for_both_widths_and_says_what_it_shows(name, pages):
    html, ids = pages[name], set(Page(pages[name]).ids)
    heads = re.findall(
        r"<svg role=\"img\"([^>]*)>\n?<title id=\"([^\"]+)\">([^<]+)</title><desc id=\"([^\"]+)\">([^<]+)</desc>", html
    )
    assert len(heads) == html.count("<svg") == 2 * html.count("<figure")
    for attributes, title, _, text, told in heads:
        assert f'aria-labelledby="{title}"' in attributes
        assert f'aria-describedby="{text}"' in attributes
        assert {title, text} <= ids
        assert len(told) > 30
    for part in re.findall(r'aria-labelledby="([^"]+)"', html):
        assert part in ids


def test_columns_that_become_lines_keep_their_names(name, pages):
    tables = re.findall(r'<table class="stack.*?</table>', pages[name], re.S)
    assert tables
    for table in tables:
        header = re.findall(r"<th scope=\"col\"[^>]*>(.*?)</th>", table)
        labels = re.findall(r"<td[^>]*data-label=\"([^\"]*)\"", table)
        assert table.count("<td") == len(labels)
        assert set(labels) <= set(header)


def test_the_recipe_can_be_saved(name, pages):
    link = next(v for _, v in Page(pages[name]).links if v.startswith("data:"))
    saved = yaml.safe_load(unquote(link.partition(",")[2]))
    made = FAMILY[name][0]()
    assert saved == made["recipe"]
    recipe_from(saved)


def test_provenance_names_base_version_command_and_date(name, pages):
    text = Page(pages[name]).text
    for fact in ("freemoe 0.1.0", f"freemoe {name};", "torch 2.13.0", "2030-01-02T03:04:05+00:00", "3.11.7"):
        assert fact in text


@pytest.mark.parametrize("name", ["trim", "eval"])
def test_the_same_result_gives_the_same_bytes(name, pages):
    make, page = FAMILY[name]
    assert page(copy.deepcopy(make())) == pages[name]


def priced(name, extra, speeds):
    """A result of ``convert`` or ``trim`` whose blocks cost so much more perplexity each, and which is so many times as fast."""
    result = FAMILY[name][0]()
    ours = [300.0 + 100 * math.log1p(extra[n % len(extra)]) for n in range(1 if len(extra) == 1 else 400)]
    before, tokens = [300.0] * len(ours), [100] * len(ours)
    if name == "convert":
        for row, nll in (("dense", before), ("converted", ours), *((n, [400.0] * len(ours)) for n in result["rivals"])):
            result["scores"][row] |= {"nll": nll, "tokens": tokens}
    else:
        result["test"]["rows"]["hooks"]["ratio"] = perplexity_against(ours, before, tokens)
    del result["speed"]
    if speeds is not None:
        names = ("dense", "converted") if name == "convert" else ("full", "trimmed")
        sides = {side: {"ttft": 0.1, "itl": 0.01} for side in names}
        parts = {part: dict(zip(("mean", "low", "high"), found, strict=True)) for part, found in speeds.items()}
        result["speed"] = {"prompt": 64, "new_tokens": 17, "rounds": 5, **sides, **parts}
    return result


FASTER, SAME, SLOWER, ONCE = (1.4, 1.3, 1.5), (1.0, 0.95, 1.05), (0.8, 0.7, 0.9), (1.4, None, None)


@pytest.mark.parametrize("name", ["convert", "trim"])
@pytest.mark.parametrize(
    ("extra", "decode", "prefill", "state", "price"),
    [
        ((0.12, 0.16), FASTER, SAME, "same", "Mixed: costs 14.0 % [13.7, 14.2] perplexity against your model; reads"),
        ((0.12, 0.16), SLOWER, SLOWER, "worse", "No: costs 14.0 % [13.7, 14.2] perplexity against your model; reads"),
        ((0.12, 0.16), None, None, "worse", "No: costs 14.0 % [13.7, 14.2] perplexity against your model; reads"),
        ((-0.12, -0.16), FASTER, SAME, "better", "Yes: saves 14.0 % [13.7, 14.2] perplexity against your model; reads"),
        ((-0.12, -0.16), SAME, SLOWER, "same", "Mixed: saves 14.0 % [13.7, 14.2] perplexity against your model; reads"),
        ((-0.5, 1.0), SAME, FASTER, "better", "(no reliable difference); reads"),
        ((-0.5, 1.0), SLOWER, SAME, "worse", "(no reliable difference); reads"),
        ((-0.5, 1.0), SAME, SAME, "same", "(no reliable difference); reads"),
        ((0.14,), ONCE, ONCE, "same", "No: perplexity +14 % against your model (no interval); reads"),
        ((0.14,), FASTER, FASTER, "better", "Yes: perplexity +14 % against your model (no interval); reads"),
    ],
)
def test_page_card_and_terminal_begin_with_the_price_against_the_users_model(
    name, extra, decode, prefill, state, price, tmp_path, monkeypatch
):
    result = priced(name, extra, decode and {"decode": decode, "prefill": prefill})
    card = {"convert": converted_card, "trim": trimmed_card}[name]
    judge = {"convert": converted_card.verdict, "trim": trimmed_card.trim_verdict}[name]
    verdict = judge(typed(result))
    assert verdict.state == state
    assert price in verdict.words.partition(". ")[0] + "."
    fast = {
        FASTER: "decodes 1.40x [1.30, 1.50]",
        SLOWER: "decodes 0.80x [0.70, 0.90]",
        ONCE: "decodes 1.40x (no interval)",
    }
    assert ("its speed was not measured." if decode is None else fast.get(decode, "decodes 1.00x")) in verdict.words
    (tmp_path / "result.json").write_text(json.dumps(result))
    write_manifest(tmp_path, {"kind": result["kind"]})
    told = CliRunner().invoke(app, ["report", str(tmp_path), "--dry-run"])
    assert told.exit_code == 0, told.output
    monkeypatch.setattr(ReportFigure, "svgs", lambda *_: None)
    # Brackets are escaped in Markdown.
    for said in (Page(FAMILY[name][1](result)).text, card.model_card(typed(result)).replace("\\", ""), told.output):
        assert verdict.words in said


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            3.9,
            "Among 3 rivals at this share it is the best: 0.463x [0.462, 0.469] the perplexity of activation-statistics split",
        ),
        (3.13, "it is as good as the best: 1.00"),
        (2.0, "it is not the best: 3.0"),
    ],
)
def test_after_the_price_a_conversion_is_held_against_the_best_rival_on_the_same_blocks(loss, words):
    result = priced("convert", (0.12, 0.16), None)
    result["scores"]["activation-split"]["nll"] = [100 * loss] * 400
    assert words in converted_card.verdict(typed(result)).words
    alone = {**result, "scores": {n: result["scores"][n] for n in ("dense", "converted")}}
    assert "No rival at this share was scored." in converted_card.verdict(typed(alone)).words


def test_a_missed_budget_is_no_and_keeps_its_price():
    missed = {**priced("convert", (-0.1, -0.1), None), "missed_budget": {"asked": 0.5, "got": 0.9}}
    found = converted_card.verdict(typed(missed))
    assert (found.state, found.label) == ("worse", "The budget was missed")
    assert found.words.startswith("No: saves 10.00 % [9.86, 10.05] perplexity against your model")
    assert "50.0% active weights were asked for, and a token uses 90.0%." in found.words


@pytest.mark.parametrize(
    ("won", "words"),
    [
        ((0.6, 0.55, 0.66), "it is reliably better: 60 % [55, 66] of the lost loss is won back"),
        ((0.1, -0.2, 0.3), "it is not reliably different: 10 % [-20, 30]"),
        ((-0.3, -0.5, -0.1), "it is reliably worse: -30 % [-50, -10]"),
        ((None, None, None), "loses nothing that could be won back"),
        (None, "It is the plan alone, with nothing that compensates."),
    ],
)
def test_after_the_price_a_trim_is_held_against_its_plan_alone(won, words):
    made = make_trim(won)
    assert words in trimmed_card.trim_verdict(typed(made)).words
    # What an earlier freemoe wrote has no ratio of perplexities, and medians of times alone.
    assert "(no interval)" in trimmed_card.trim_verdict(typed(made)).words
    assert "measured without an interval" in trimmed_card.trim_verdict(typed(made)).words


@pytest.mark.parametrize(
    ("beyond", "words"),
    [
        ({"rescaled": [0.35, 0.28, 0.41], "control": [0.57, 0.5, 0.6]}, ", 35 % [28, 41] more than by the best of"),
        (
            {"rescaled": [0.35, 0.28, 0.41], "scale and bias": [0.05, -0.02, 0.1]},
            "control, scale and bias: 5 % [-2, 10].",
        ),
        ({"scale and bias": [0.05, -0.02, 0.1]}, ", not reliably more than by the best of"),
        ({"rescaled": [-0.1, -0.2, -0.05]}, ", 10 % [5, 20] less than by the best of"),
        ({"control": [0.3, 0.2, 0.4]}, "the control, the control at full k."),
    ],
)
def test_hooks_are_held_against_the_best_simple_correction(beyond, words):
    made = make_trim()
    made["test"]["rows"]["hooks"]["beyond"] = beyond
    assert words in trimmed_card.trim_verdict(typed(made)).words


def test_an_evaluation_compares_every_row_with_the_first():
    result = make_evaluation()
    found = evaluation.evaluation_verdict(typed(result))
    gain = result["domains"][0]["rows"]["auto"]["gain"]
    assert found.state == "better"
    assert f"better in 4 of 4 comparisons with the base: math, auto: {gain['mean']:+.1f} [" in found.words
    for domain in result["domains"]:
        for row in domain["rows"].values():
            for seen in ("gain", "ratio"):
                if seen in row:
                    home = 1.0 if seen == "ratio" else 0.0
                    row[seen] = {"mean": home, "low": home, "high": home}
    assert evaluation.evaluation_verdict(typed(result)).state == "same"
    for domain in result["domains"]:
        domain["rows"] = {"base": domain["rows"]["base"]}
    assert evaluation.evaluation_verdict(typed(result)).words.startswith("One model was scored")
    assert "<figure" not in evaluation.page(typed(result))


def test_an_artefact_without_a_record_is_evaluated_too():
    made = {**make_evaluation(), "seen": {"known": False, "seed": 0}}
    assert "No record of the documents that its making saw" in evaluation.page(typed(made))


def test_report_writes_the_page_of_an_evaluation_beside_its_file(tmp_path):
    file = tmp_path / "scores.json"
    file.write_text(json.dumps(make_evaluation()))
    done = CliRunner().invoke(app, ["report", str(file)])
    assert done.exit_code == 0, done.output
    assert "math/s0" in done.output
    assert (tmp_path / "scores.html").read_text(encoding="utf-8") == evaluation.page(typed(make_evaluation()))
    (tmp_path / "scores.html").unlink()
    assert CliRunner().invoke(app, ["report", str(file), "--dry-run"]).exit_code == 0
    assert not (tmp_path / "scores.html").exists()


def test_a_page_that_is_there_is_not_written_over_unasked(tmp_path):
    (tmp_path / "scores.html").write_text("mine")
    recipe = EvalRecipe(artefact="no-such-model", domains={"math": ("m.jsonl",)}, output=str(tmp_path / "scores.json"))
    with pytest.raises(ArtifactError, match=r"scores\.html' exists already"):
        evaluate(recipe)
    assert (tmp_path / "scores.html").read_text() == "mine"
