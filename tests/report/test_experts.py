import copy
import json
import re

import pytest
import yaml

from freemoe.artefacts import write_page as write_report
from freemoe.core.errors import ArtifactError
from freemoe.domain_experts import report as experts
from freemoe.domain_experts.figures.all_figures import FIGURES
from freemoe.domain_experts.recipe import BuildRecipe
from freemoe.recipes import recipe_from
from tests.report.family import FAMILY
from tests.report.page import Page
from tests.report.synthetic import make_domain, make_result, typed

SECTIONS = ("verdict", "scores", "reading", "subdomains", "pictures", "abstained", "router", "splits", "provenance")
SECTIONS += ("recipe",)
render = FAMILY["build"][1]


@pytest.fixture(scope="module")
def result():
    return FAMILY["build"][0]()


@pytest.fixture(scope="module")
def html(pages):
    return pages["build"]


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_a_full_result_shows_every_section_and_every_figure(page):
    assert [s for s in SECTIONS if s not in page.ids] == []
    assert [p.name for p in FIGURES if f"figure-{p.name}" not in page.ids] == []
    assert page.depth == 0


def test_numbers_of_the_scores_table_are_the_results_own(result, page):
    for domain in result["domains"]:
        for name, row in domain["rows"].items():
            text = domain["unit"] == "perplexity"
            seen = row["ratio" if text else "gain"]
            wanted = [row["score"]] + ([] if name == "base" else [seen["mean"], seen["low"], seen["high"]])
            shown = [(v, t) for where, v, t in page.data if where == (domain["name"], name, "")]
            assert [float(v) for v, _ in shown] == wanted
            digits = [2] + [3 if text else 1] * 3
            for (value, words), places in zip(shown, digits, strict=False):
                assert float(words) == pytest.approx(float(value), abs=0.5 * 10**-places + 1e-12)


def test_numbers_of_the_subdomain_table_are_the_results_own(result, page):
    for domain in result["domains"]:
        key = "ratio" if domain["unit"] == "perplexity" else "gain"
        for sub in domain["subdomains"]:
            rows = sub["rows"]
            wanted = [sub["off_share"], rows["base"]["score"]]
            for name in ("expert", "routed", "control", "oracle"):
                wanted += [rows[name][key][k] for k in ("mean", "low", "high")]
            shown = [float(v) for where, v, _ in page.data if where == ("", "", sub["name"])]
            assert shown == wanted


def test_forecasts_stand_beside_what_was_measured(result, page, sketched):
    shown = [(where[2], float(v)) for where, v, _ in page.data if where[1] == "forecast"]
    purified = [s["name"] for d in result["domains"] for s in d["subdomains"] if s["chosen"] != "base"]
    assert shown == [(name, value) for name in purified for value in (0.75, 0.5, 0.125)]
    # Artefacts of older versions have none.
    older = copy.deepcopy(result)
    for domain in older["domains"]:
        for sub in domain["subdomains"]:
            del sub["forecast"]
    assert "forecasts" not in Page(render(older)).ids


def test_words_say_what_a_row_is_and_what_it_is_not(html, page):
    assert "Selected on test" in page.text
    assert "is not a result" in page.text
    assert "averaged over several draws" in page.text
    captions = " ".join(re.findall(r"<figcaption>(.*?)</figcaption>", html, re.S))
    assert captions.count("Measured on the reported split, not used to choose.") == 3


def test_abstentions_of_guard_and_router_are_counted(result, page):
    assert "The guard kept the base in 2 subdomains" in page.text
    for domain in result["domains"]:
        count = sum(d["routed_to"] == "base" for d in domain["documents"])
        total = len(domain["documents"])
        assert re.search(rf"{domain['name']}\s*{total}\s*{count}\s*{100 * count / total:.1f}", page.text)


def test_provenance_and_recipe(result, html, page):
    for fact in ("ab12" * 16, "torch 2.13.0", "33.4 s", "845.3 MB", "8.2 KB", "20 done, 3 taken", "260,032"):
        assert fact in page.text
    block = re.search(r'<pre id="recipe-yaml">(.*?)</pre>', html, re.S)
    assert block
    again = yaml.safe_load(Page(block[1]).text)
    assert recipe_from(again) == BuildRecipe.model_validate(result["recipe"])


def _without(result, *, rows=(), **fields):
    for domain in result["domains"]:
        for name in rows:
            domain["rows"].pop(name, None)
        for sub in domain["subdomains"]:
            for name in rows:
                sub["rows"].pop(name, None)
            sub.update(copy.deepcopy(fields))
    return result


@pytest.mark.usefixtures("sketched")
@pytest.mark.parametrize(
    ("change", "gone"),
    [
        (lambda r: _without(r, rows=["oracle"], candidates={}), {"bands", "boxes", "improved"}),
        (lambda r: _without(r, rows=["control"]), set()),
        (lambda r: _without(r, bands={}), {"bands", "improved"}),
        (lambda r: _without(r, purification_curve=[]), {"purification"}),
        (lambda r: _without(r, where_off=[]), {"where"}),
        (lambda r: make_result([make_domain("math", ("saliency",))]), {"confusion"}),
        (lambda r: make_result([make_domain("w", ("saliency", "base", "saliency"), text=True)]), {"radar"}),
        (lambda r: make_result([make_domain("math", ("base", "base", "base"))]), set()),
        (lambda r: make_result([make_domain("math", ("base",), rows=("base", "expert", "routed"), bands={})]),
         {"bands", "boxes", "improved", "confusion"}),
    ],
    ids=["no oracle", "no control", "no bands", "no curve", "no weights off", "one subdomain", "text only",
         "nothing accepted", "bare"],
)  # fmt: skip
def test_what_has_no_data_is_left_out_and_the_rest_stands(change, gone):
    page = Page(render(change(make_result())))
    shown = {i.removeprefix("figure-") for i in page.ids if i.startswith("figure-")}
    assert {p.name for p in FIGURES} - shown == gone
    assert [s for s in SECTIONS if s not in page.ids] == []


@pytest.mark.usefixtures("sketched")
def test_a_subdomain_without_reported_documents_keeps_its_line():
    result = make_result()
    result["domains"][0]["subdomains"][1].update(rows={}, candidates={})
    result["domains"][0]["documents"] = [d for d in result["domains"][0]["documents"] if d["subdomain"] != "math/s1"]
    page = Page(render(result))
    assert "math/s1" in page.text
    assert "figure-gains" in page.ids


def test_scores_that_are_no_numbers_do_not_stop_the_page():
    result = make_result()
    result["domains"] = result["domains"][2:]
    wiki = result["domains"][0]["subdomains"][0]
    wiki["candidates"]["wanda p=2 90-100 %"] = float("inf")
    wiki["candidates"]["wanda p=2 80-90 %"] = float("nan")
    wiki["candidates"]["wanda p=2 70-80 %"] = 4.2e30
    wiki["purification_curve"] = [4.0, float("nan"), 3.0]
    result["domains"][0]["rows"]["control"]["ratio"] = {"mean": 1e9, "low": 2.0, "high": float("inf")}
    assert Page(render(result)).depth == 0


@pytest.mark.usefixtures("sketched")
def test_fifty_subdomains_fit():
    page = Page(render(make_result([make_domain("many", ("saliency", "base") * 25, bands={})])))
    assert {"figure-gains", "figure-confusion"} <= set(page.ids)


@pytest.mark.usefixtures("sketched")
def test_write_report_stands_beside_the_result(tmp_path, result):
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_bytes() == render(result).encode()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "result.json"]


def test_a_domain_cut_short_is_named(tmp_path):
    result = make_result()
    del result["domains"][1]["rows"]["base"], result["domains"][2]["documents"]
    (tmp_path / "result.json").write_text(json.dumps(result), encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"domains\.1\.rows: .*no base.*domains\.2\.documents: Field required"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("chosen", "interval", "state", "words"),
    [
        (("saliency",), (3.0, 9.0), "better", "Yes: better than the base on held-out documents in 1 of 1 domain: math +6.0 [+3.0, +9.0] points."),
        (("saliency",), (-1.0, 3.0), "same", "No: in none of 1 domain is a gain shown on held-out documents: math +1.0 [-1.0, +3.0] points."),
        (("saliency",), (-9.0, -3.0), "worse", "No: worse than the base on held-out documents in 1 of 1 domain: math -6.0 [-9.0, -3.0] points."),
        (("base",), (3.0, 9.0), "same", "No: in none of 1 domain is a gain shown on held-out documents. An expert was accepted in 0 of 1"),
    ],
)  # fmt: skip
def test_the_verdict_has_figure_and_interval(chosen, interval, state, words):
    domain = make_domain("math", chosen)
    low, high = interval
    domain["rows"]["expert"]["gain"] = {"mean": (low + high) / 2, "low": low, "high": high}
    found = experts.build_verdict(typed(make_result([domain])))
    assert (found.state, found.words[: len(words)]) == (state, words)


def test_the_verdict_of_several_domains_counts_them():
    found = experts.build_verdict(typed(make_result()))
    assert found.label == "Reliable gain"
    assert "in 3 of 3 domains: math +" in found.words
    assert "wiki perplexity × " in found.words
    assert "accepted in 5 of 7 subdomains; where none was, the base answers." in found.words
