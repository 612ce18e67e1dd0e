"""The papers' numbers agree with each other, and what our runs give is read as the tables mean it."""

import xml.etree.ElementTree as ET
from pkgutil import resolve_name

import numpy as np
import pytest

from reproduce.mode import pictures
from reproduce.mode import rows as paper
from reproduce.mode.work import (
    _tasks,
    accuracy_rows,
    at_scale,
    cluster_rows,
    domain_rows,
    five_numbers,
    gain_boxes,
    improved_tasks,
    ours_of,
)
from reproduce.table import Row, Scene, find

SAMPLES = {"mmlu": 14042, "gsm8k": 1319, "mathqa": 2985, "humaneval": 164, "mbpp": 500}
"""Documents of the benchmarks' test splits."""


@pytest.mark.parametrize("name", paper.CLUSTERS)
def test_clusters_are_of_the_test_split_and_their_best_bands_give_table_1(name):
    assert sum(n for n, _ in paper.CLUSTERS[name]) == SAMPLES[name.split()[0]]
    ratios = {row.label: row.paper["mmlu"] for row in find(["mode/table03"])[0].rows}
    said = ratios["5 %"] if name == "mmlu" else paper.MAIN["llama-2-7b"]["expert"][name]
    assert paper.under_best_bands(name) == pytest.approx(said, abs=0.006)
    assert max(paper.under_one_band(name, band) for band in paper.BANDS) < said


@pytest.mark.parametrize("name", [n for n in paper.CLUSTERS if "pass@" in n])
def test_pass_at_10_is_of_ten_samples(name):
    tries = 10 if name.endswith("pass@1") else 1
    for n, scores in paper.CLUSTERS[name]:
        for score in scores.values():
            passed = score / 100 * n * tries
            assert abs(passed - round(passed)) < 0.005 * n * tries / 100 + 1e-9


def test_table_1_says_its_gains():
    assert list(paper.gains("llama-2-7b", "expert").values()) == [2.02, 2.08, 2.8, 1.28, 1.22, 1.97, 2.01]
    assert paper.gains("gemma-7b", "routed")["humaneval pass@1"] == -2.38, "the paper prints -0.38"
    assert find(["mode/table04"])[0].rows[-1].paper["gsm8k"] == paper.MAIN["llama-2-7b"]["expert"]["gsm8k"]


def _row(score, base, **also):
    gain = {"mean": score - base, "low": score - base - 1, "high": score - base + 1}
    return {"score": score, "gain": gain, "also": {n: {"score": v, "gain": gain} for n, v in also.items()}}


def _record():
    """Two subdomains, two bands; the first band helps the small one alone."""
    subs = [
        {"name": "code/0", "documents": 30, "rows": {"base": _row(50, 50), "expert": _row(52, 50), "oracle": _row(53, 50)},
         "bands": {"a": [0.0, 0.05, 47.0], "b": [0.05, 0.1, 53.0]}},
        {"name": "code/1", "documents": 10, "rows": {"base": _row(20, 20), "expert": _row(20, 20), "oracle": _row(24, 20)},
         "bands": {"a": [0.0, 0.05, 24.0], "b": [0.05, 0.1, 20.0]}},
    ]  # fmt: skip
    rows = {
        name: _row(s, 42, **{"pass@10": s + 10})
        for name, s in (("base", 42), ("expert", 44), ("routed", 43), ("oracle", 46))
    }
    rows["routed oracle"] = _row(45, 42)
    tasks = {"mbpp": rows, "humaneval": {name: _row(row["score"] + 1, 43) for name, row in rows.items()}}
    return {"code": {"documents": 40, "metric": "pass@1", "rows": rows, "tasks": tasks, "subdomains": subs}}


def test_a_domain_is_reported_by_task():
    found = domain_rows(_record(), Row("x", pick="expert"))
    assert set(found) == {"mbpp pass@1", "mbpp pass@10", "humaneval", "K"}
    assert (found["mbpp pass@1"].value, found["mbpp pass@1"].oracle, found["mbpp pass@1"].gain) == (44, 46, 2)
    assert (found["mbpp pass@10"].value, found["mbpp pass@10"].oracle, found["humaneval"].value) == (54, 56, 45)
    assert found["K"].value == 2
    assert domain_rows(_record(), Row("x", pick="base"))["mbpp pass@1"].gain is None
    routed = domain_rows(_record(), Row("x", pick="routed oracle"))
    assert (routed["mbpp pass@1"].value, "mbpp pass@10" in routed) == (45, False)
    boxes = gain_boxes(_record(), Row("x", pick="expert"))
    assert {m.value for m in boxes.values()} == {2.0}


def test_a_routed_oracle_takes_the_best_band_where_the_router_is_right():
    shared = {"key": "k", "base": 0.0}
    documents = [
        {**shared, "id": "mbpp/1", "subdomain": "code/0", "router_saw": "code/0", "routed": 0.0, "oracle": 1.0},
        {**shared, "id": "humaneval/1", "subdomain": "code/0", "router_saw": "code/1", "routed": 0.0, "oracle": 1.0},
    ]
    rows = {name: _row(0, 0) for name in ("base", "routed", "oracle")}
    domain = {"name": "code", "rows": rows, "documents": documents, "tasks": {"mbpp": rows, "humaneval": rows}}
    by_task = _tasks(domain, ["mbpp", "humaneval"])
    assert [by_task[task]["routed oracle"]["score"] for task in ("mbpp", "humaneval")] == [100, 0]
    assert _tasks(domain, ["sampled:demo:code"])["code"]["routed oracle"]["score"] == 50


def test_clusters_are_shown_under_the_papers_bands_and_together_by_documents():
    assert (ours_of("95-100"), ours_of("90-95"), ours_of("50-55")) == ("0.00", "0.05", "0.45")
    found = cluster_rows(_record(), Row("ours: "))
    assert list(found) == ["ours: code/0", "ours: code/1", "ours: all clusters"]
    shown = {label: (own["95-100"].value, own["95-100"].gain) for label, own in found.items()}
    assert shown == {
        "ours: code/0": (47.0, -3.0),
        "ours: code/1": (24.0, 4.0),
        "ours: all clusters": (pytest.approx(41.25), pytest.approx(-1.25)),
    }
    small = found["ours: code/1"]
    assert (small["Samples"].value, small["Ratio"].value, small["chosen"].oracle, small["no band"].value) == (
        10,
        25,
        24,
        20,
    )
    assert accuracy_rows(_record(), Row("x", pick="0.00")) == {"accuracy": found["ours: all clusters"]["95-100"]}
    assert accuracy_rows(_record(), Row("x", pick="0.20")) == {}


def test_tasks_that_a_band_improves_are_counted():
    found = improved_tasks(_record(), Row("x", pick="0.00"))
    assert {n: m.value for n, m in found.items()} == {"improved": 1, "worse": 1, "tasks": 2}
    assert improved_tasks(_record(), Row("x", pick="0.05"))["worse"].value == 0


def test_five_numbers_are_numpys():
    values = [3.0, -1.0, 2.5, 8.0, 0.0, 4.0, 1.0]
    assert list(five_numbers(values).values()) == pytest.approx(np.quantile(values, [0, 0.25, 0.5, 0.75, 1]))
    assert set(five_numbers([2.0]).values()) == {2.0}


def test_scales_change_base_tasks_and_sizes_and_leave_the_search():
    recipe = {
        "model": "a/b",
        "domains": {"mmlu": ["mmlu"], "gsm8k": ["gsm8k"], "mathqa": ["mathqa"], "mbpp": ["mbpp"]},
        "subdomains": {"count": {"mmlu": 12, "gsm8k": 8, "mathqa": 8, "mbpp": 3}},
        "data": {"samples": 10},
        "bands": {"ratio": 0.05},
    }
    tiny = at_scale(recipe, Scene(), {})
    assert tiny["domains"] == {"general": ["demo:general"], "math": ["demo:math"], "code": ["sampled:demo:code"]}
    assert tiny["subdomains"]["count"] == {"general": 12, "math": 8, "code": 3}
    assert tiny["data"] == {"limit": 48, "samples": 10, "allow_code_execution": False}
    assert at_scale(recipe, Scene("small", model="m"), {})["data"]["limit"] == 32
    assert at_scale(recipe, Scene("small", model="m", limit=7), {})["data"]["limit"] == 7
    assert at_scale(recipe, Scene("paper"), {})["model"] == "a/b"
    assert {at_scale(recipe, s, {})["bands"]["ratio"] for s in (Scene(), Scene("paper"))} == {0.05}


def _filled(name):
    """A table with ours made up: the paper's numbers and one more, or the row's place."""
    (table,) = find([name])
    rows = []
    for i, row in enumerate(table.rows):
        values = {c: row.paper.get(c, float(i % 5)) + 1 for c in table.columns}
        ours = {c: {"value": v, "gain": None, "low": v - 1, "high": v + 1, "oracle": None} for c, v in values.items()}
        rows.append({"label": row.name, "paper": dict(row.paper), "ours": ours})
    return {"table": name, "title": table.title, "columns": dict(table.columns), "rows": rows}


PICTURED = [t.name for t in find(["mode", "free-moe"]) if t.picture]


@pytest.mark.parametrize("name", PICTURED)
def test_a_picture_stands_alone_and_says_its_numbers(name):
    (table,) = find([name])
    filled = _filled(name)
    svg = resolve_name(table.picture)(filled)
    root = ET.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    described = root.findtext(f"{space}desc") or ""
    first = filled["rows"][0]
    assert f"{first['label']}, {next(iter(filled['columns']))}" in described
    assert ("paper" in described) == any(row["paper"] for row in filled["rows"])
    assert "prefers-color-scheme:dark" in svg
    again = {**filled, "rows": [{**row, "ours": {}} for row in filled["rows"]]}
    if any(row["paper"] for row in filled["rows"]):
        assert resolve_name(table.picture)(again) != svg, "what is ours is drawn"


def test_a_picture_of_nothing_is_refused():
    filled = {**_filled("mode/figure01"), "rows": []}
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.sensitivity(filled)
