"""The command: what is run and not run again, a rival that fails, one from outside, the table and the picture."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest

from benchmarks.harness import Settings, run_bench, save_result
from benchmarks.real_llm import running as cells_running
from benchmarks.real_llm import work
from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.protocol import Job
from benchmarks.rivals import plan, running
from benchmarks.rivals.measure import measure_rival
from benchmarks.rivals.rival import RIVALS, Fitted, Rival, add
from benchmarks.rivals.running import draw, listing, run
from freemoe.core.errors import DataError
from tests.tiny import tiny_model, tiny_tokenizer

ONLY = "adaptation/freemoe-demo/demo-text/base/*,*/demo-text/wanda-20*,*/demo-text/fewshot*,*/demo-text/mine*"


@contextmanager
def halved(model, materials, terms, *, by):
    """A rival of another package: the last matrix is made smaller."""
    weight = materials.weights[-1].parameter
    before = weight.detach().clone()
    weight.data.mul_(by)
    try:
        yield Fitted(numbers=1, bytes=4, facts={"by": by})
    finally:
        weight.data.copy_(before)


@contextmanager
def broken(model, materials, terms):
    """A rival with a fault."""
    raise KeyError("a fault | of theirs")
    yield Fitted()


@pytest.fixture
def outside():
    """Two rows that another package would add."""
    here = f"{__name__}:"
    add(Rival("mine", "half a matrix", "-", "weights", ("adaptation",), here + "halved", options={"by": 0.5}))
    add(Rival("mine-broken", "a fault", "-", "weights", ("adaptation",), here + "broken"))
    yield
    for name in ("mine", "mine-broken"):
        RIVALS._entries.pop(name)


@pytest.fixture
def settings(tmp_path, monkeypatch, outside):
    monkeypatch.setattr(cells_running, "in_own_process", lambda job, work: work(job))
    return Settings(True, cells=tmp_path / "cells", only=ONLY)


def test_it_runs_tells_of_failures_and_measures_nothing_twice(settings, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(cells_running, "in_own_process", lambda job, work: ran.append(job.cell.name) or work(job))
    result = run_bench("rivals", settings)
    assert len(ran) == len(set(ran)) == 5
    details = result["details"]
    assert details["cells"]["done"] == 4
    assert list(details["failed"]) == ["adaptation/freemoe-demo/demo-text/mine-broken/s0"]
    entries = {e["rival"]: e for e in details["entries"]}
    assert "a fault" in entries["mine-broken"]["failed"]
    assert entries["mine"]["gain"][0] != 0
    assert entries["wanda"]["share_off"] == pytest.approx(0.2, abs=0.01)
    assert entries["wanda"]["bytes"] > 0
    assert "gain" not in entries["base"]
    assert all(e["seconds"] >= 0 and e["memory_bytes"] >= 0 for e in entries.values() if "seconds" in e)
    # A second run measures the failed one again, and no other.
    again = run(settings)
    assert ran[5:] == ["adaptation/freemoe-demo/demo-text/mine-broken/s0"]
    assert json.loads(json.dumps(again.details)) == json.loads(json.dumps(details))
    # A row that changes makes its cells stale, and no others.
    rows = replace(settings, only="*/demo-text/mine/*,adaptation/freemoe-demo/demo-text/base/*")
    assert [row["done"] for row in listing(rows)] == [True, True]
    RIVALS._entries["mine"] = replace(RIVALS.get("mine"), options={"by": 0.25})
    assert [row["done"] for row in listing(rows)] == [True, False]
    save_result(result, tmp_path / "out")
    page, picture = ((tmp_path / "out" / f"rivals.{s}").read_text() for s in ("md", "svg"))
    assert "| mine-broken | weights | failed: KeyError: 'a fault / of theirs'" in page
    assert "### freemoe-demo, demo-text, 20% off" in page
    assert "| mine | half a matrix | - | dense |" in page
    assert "<svg" in picture
    draw(details, tmp_path / "again")
    assert (tmp_path / "again" / "rivals.svg").read_text() == picture


@pytest.mark.hardening
def test_a_quick_run_measures_every_rival(settings, tmp_path, monkeypatch):
    def tiny(name, **_):
        return tiny_model("mixtral" if name.endswith("moe") else "llama"), tiny_tokenizer()

    monkeypatch.setattr(work, "load_base", tiny)
    monkeypatch.setattr(running, "model_digest", lambda name: name)
    result = run_bench("rivals", replace(settings, only=None))
    details = result["details"]
    assert list(details["failed"]) == ["adaptation/freemoe-demo/demo-text/mine-broken/s0"]
    assert details["cells"]["done"] == details["cells"]["planned"] - 1
    assert {e["rival"] for e in details["entries"] if "failed" not in e} == set(RIVALS) - {"mine-broken"}
    assert all(e["gain"][1] <= e["gain"][0] <= e["gain"][2] for e in details["entries"] if "gain" in e)
    assert any("ours above the best rival" in f["name"] for f in result["figures"])
    save_result(result, tmp_path / "out")
    page = (tmp_path / "out" / "rivals.md").read_text()
    assert all(f"| {name}" in page or f"| **{name}" in page for name in RIVALS)


def test_the_list_minutes_and_patterns_that_name_nothing(settings):
    rows = listing(replace(settings, only=None))
    names = {row["name"] for row in rows}
    assert len(names) == len(rows)
    shown = {n.split("/")[3].split("-lr")[0] for n in names}
    assert shown >= {"base", "fewshot", "laser", "full", "dora-r1", "reap-20%"}
    assert all(row["seconds"] > 0 and not row["done"] for row in rows)
    assert run(replace(settings, minutes=0)).details["cells"]["done"] == 0
    with pytest.raises(DataError, match=r"--only '\*/lorra\*' names no cell.*'adaptation/freemoe-demo.*lora, "):
        run(replace(settings, only="*/lorra*"))
    with pytest.raises(DataError, match="--data-root FOLDER"):
        run(replace(settings, quick=False, only=None, model="somewhere"))


def test_every_rival_is_planned_where_it_fits_and_a_quick_plan_has_each_once(tmp_path):
    (tmp_path / plan.STORIES).mkdir(parents=True)
    whole = plan.cells("model.gguf", tmp_path, quick=False)
    assert {c.method for c in whole} >= set(RIVALS.loaded_names())
    assert {c.base for c in whole} == {"freemoe-demo", "freemoe-demo-moe", plan.STORIES, ""}
    for cell in whole:
        rival = RIVALS.get(cell.method)
        assert ("mixture" if cell.base == "freemoe-demo-moe" else "dense") in rival.bases
        assert cell.family in rival.groups
        assert (cell.budget > 0) == rival.sized
    assert not any(c.family == "compression" and plan.MATERIALS[c.material].kind == "task" for c in whole)
    lora = {c.rate for c in whole if c.method == "lora" and c.base == "" and c.material == "wikitext"}
    assert lora == set(RIVALS.get("lora").rates)
    quick = [c.method for c in plan.cells(None, None, quick=True) if c.method != "base"]
    assert sorted(quick) == sorted(n for n in RIVALS.loaded_names() if n != "base")
    seconds = plan.estimates(whole, {}, quick=False)
    assert all(s > 0 for s in seconds.values())
    one = Cell("adaptation", "wikitext", "lora", rank=1, rate=2e-3)
    known = {one.name: {"wall_seconds": 10 * seconds[one.name]}}
    assert plan.estimates(whole, known, quick=False)[one.name] > 5 * seconds[one.name]


@pytest.mark.parametrize(("model_type", "kind"), [("mixtral", "mixture"), ("llama", "dense"), ("other", "dense")])
def test_the_kind_of_a_model_by_its_configuration(tmp_path, model_type, kind):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert plan.kind_of(str(tmp_path)) == kind
    assert plan.kind_of("a.gguf") == "dense"


def test_the_reported_documents_are_not_among_what_a_rival_sees(outside, monkeypatch):
    seen = {}

    def look(self, model, materials, terms):
        seen["reference"] = {d.id for d in (*materials.gradient, *materials.stop)}
        seen["attributes"] = set(vars(materials))
        return halved(model, materials, terms, by=1.0)

    monkeypatch.setattr(Rival, "on", look)
    cell = Cell("adaptation", "demo-text", "mine", base="freemoe-demo")
    record = measure_rival(Job(cell, plan.protocol_of("freemoe-demo", True), "freemoe-demo", "", ""))
    assert seen["reference"]
    assert not seen["reference"] & set(record["ids"])
    assert seen["attributes"] == {"kind", "tokenizer", "length", "weights", "gradient", "stop", "batches", "alone"}
    assert record["kind"] == "text"
