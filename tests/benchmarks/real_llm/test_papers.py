"""The papers' own methods: their cells on a real small model, and the page that shows them."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.real_llm import papers
from benchmarks.real_llm.cells import BASE, Cell
from benchmarks.real_llm.methods.papers import BANDS, band_section, gated
from benchmarks.real_llm.plan import needs
from freemoe.core.run import unit_state
from freemoe.tomoe.gates.train import GateTrainer

P2 = Cell("bands", "arc-easy", BANDS[0])


def test_bands_are_those_of_the_papers_profile_with_another_width():
    sections = [band_section(method) for method in BANDS]
    assert [(s.p, s.patch) for s in sections] == [("2", 1), ("inf", 1), ("1", 1), ("4", 1), ("2", 16), ("2", 4)]
    assert sections[0].scope == "row"
    edges = sections[0].band_edges()
    assert (edges[0], edges[-1], len(edges)) == ((0.0, 0.1), (0.5, 0.6), 6)


def test_gates_of_the_paper_go_on_from_fewer_steps_and_ours_begin_anew():
    plan = papers.cells()
    assert len(set(plan)) == len(plan)
    for method in ("paper", "ours"):
        first, second, third = (Cell("gates", "wikitext", method, 0.5, documents=n) for n in papers.STEPS)
        assert needs(first, {}, plan) == []
        below = [second] if method == "paper" else []
        assert needs(third, {second.name: {}}, plan) == below
        assert (needs(third, {}, plan) is None) == (method == "paper")


@pytest.mark.realdata
def test_cells_of_the_papers_on_a_real_small_model(real, tmp_path, monkeypatch):
    gates = [Cell("gates", "wikitext", "paper", 0.5, documents=n) for n in (1, 2)]
    ours = Cell("gates", "wikitext", "ours", 0.5, documents=2)
    plan = [Cell("bands", "arc-easy"), P2, Cell("gates", "wikitext", "dense"), *gates, ours]
    monkeypatch.setattr(papers, "cells", lambda: plan)
    outcome = papers.run(real)
    assert not outcome.details["failed"]
    found = [json.loads((real.cells / f"{cell.file}.json").read_text()) for cell in plan]
    base, bands, dense, one, two, other = found
    assert base["ids"] == bands["ids"]
    # Algorithm 1: the best by the reference, and the papers' protocol: the best by what is reported.
    means = bands["bands"]
    assert len(means) == 6
    for side, name in enumerate(("chosen", "oracle")):
        assert means[bands[name]["band"]][side] == max(mean[side] for mean in means.values())
        assert means[bands[name]["band"]][1] == pytest.approx(sum(bands[name]["right"]) / len(base["ids"]))
    assert dense["share"] == 1
    assert one["share"] == pytest.approx(0.5, abs=0.02)
    assert other["share"] == pytest.approx(0.5, abs=0.01)
    assert one["tokens"] == two["tokens"] == dense["tokens"]
    # Two steps at once are one step and another from its state.
    job = papers._bench(real).job(gates[1])
    gated(replace(job, needs=(), tensors=str(tmp_path / "whole")))
    whole, continued = load_file(tmp_path / "whole"), load_file(job.tensors)
    assert all(torch.equal(tensor, continued[name]) for name, tensor in whole.items())
    page = papers.markdown(json.loads(json.dumps(outcome.details)))
    assert "| the paper's | 50% | 2 |" in page
    # The best of all rankings: one is none.
    assert page.count("not measured") == 1
    assert f"{len(papers.MATERIALS_SHOWN)} more rows are planned and not measured yet." in page


@pytest.mark.realdata
@pytest.mark.parametrize("method", ["paper", "ours"])
def test_gates_that_were_killed_go_on_where_they_were(method, real, tmp_path, monkeypatch):
    cell = Cell("gates", "wikitext", method, 0.5, documents=2)
    monkeypatch.setattr(papers, "cells", lambda: [cell])
    job = papers._bench(real).job(cell)
    expected = gated(replace(job, needs=(), tensors=str(tmp_path / "whole")))
    steps, one = [], GateTrainer._train_step

    def step(trainer, number):
        steps.append(number)
        if steps == [0, 1]:
            raise KeyboardInterrupt
        one(trainer, number)

    monkeypatch.setattr(GateTrainer, "_train_step", step)
    monkeypatch.setattr(unit_state, "SECONDS", 0.0)
    monkeypatch.setattr(unit_state, "SHARE", 0.0)
    job = replace(job, needs=(), tensors=str(tmp_path / "killed"))
    with pytest.raises(KeyboardInterrupt):
        gated(job)
    assert gated(job) == expected
    assert steps == [0, 1, 1]
    assert not list(tmp_path.glob("*.partial"))


def test_the_page_says_whose_method_a_row_is_and_what_is_missing():
    keys = ["a", "b", "c", "d"]

    def record(cell, **entries):
        return {"cell": asdict(cell), "name": cell.name, "keys": keys, **entries}

    def side(band, *right):
        return {"band": band, "right": list(right)}

    base, other = Cell("bands", "arc-easy", BASE), Cell("bands", "arc-easy", BANDS[1])
    low, mid, high = side("low", 0, 0, 0, 0), side("mid", 1, 0, 0, 0), side("high", 1, 1, 0, 0)
    finished = {
        base.name: record(base, right=[1.0, 0.0, 0.0, 0.0]),
        P2.name: record(P2, bands={"low": [0.9, 0.0], "high": [0.5, 0.5]}, chosen=low, oracle=high),
        other.name: record(other, bands={"mid": [0.8, 0.25]}, chosen=mid, oracle=mid),
    }
    shown = [papers._of_bands(finished, cell) for cell in papers._rows("bands")]
    rows = {row["name"][1]: row for row in shown if row["name"][0] == "arc-easy"}
    # Worse than the base on what is reported, and taken: the papers' rule has no base among its candidates.
    assert (rows["MoDE, p = 2"]["note"], rows["MoDE, p = 2"]["gain"][0]) == ("low", -25.0)
    both = rows["MoDE, the best of 2 rankings"]
    assert (both["note"], both["gain"][0], both["oracle_note"], both["oracle"][0]) == ("low", -25.0, "high", 25.0)
    assert "figure" not in rows["ours: learned switches"]
