"""Cells that convert, split and trim, and what the figures say of them."""

import math
from dataclasses import replace

import pytest

from benchmarks.real_llm import papers, running
from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.figures.mixtures import mixture_figures, mixture_tables
from freemoe.assets import BUNDLED
from freemoe.evals.statistics import mean_interval

CONVERTED = Cell("convert", "wikitext", "tomoe", 0.5)
SPLIT, TRIM = Cell("mixture", "wikitext", "split"), Cell("trim", "wikitext", "hooks")


@pytest.mark.slow
@pytest.mark.realdata
def test_a_small_model_is_converted_split_and_trimmed(real, monkeypatch):
    paper = replace(TRIM, method="paper")
    plan = [TRIM, CONVERTED, SPLIT, TRIM, paper]
    monkeypatch.setattr(running, "cells", lambda quick: plan)
    # The real small model's 172 neurons do not divide into experts that kernels take.
    bench = running.bench_of(replace(real, model=BUNDLED))
    bench.run_missing("trim/*", None, real.progress)
    assert not bench.finished  # nothing was split that could be trimmed
    bench.run_missing(None, None, real.progress)
    assert not bench.failed
    converted, split, trim = (bench.finished[c.name] for c in (CONVERTED, SPLIT, TRIM))
    assert set(converted["scores"]) > {"dense", "converted"}
    assert converted["parameters"]["active_share"] == pytest.approx(0.5, abs=0.01)
    assert len(split["divergence"]) == 2
    # What was split is what was trimmed, and fewer experts lose something.
    assert trim["plan"]["act"] <= 1 < split["k"] == 2
    assert trim["rows"]["plan"]["kl"] > trim["rows"]["full"]["kl"]
    # The paper's own way: two stages, and one hook before a block.
    theirs = bench.finished[paper.name]
    assert theirs["plan"]["by"] == "two_stage"
    assert len(theirs["hooks"]) == 1
    assert (papers._of_trims(bench.finished, paper)["figure"]).count(" / ") == 2
    figures = mixture_figures(bench.finished)
    assert [math.isnan(f.value) for f in figures[:4]] == [True, True, False, False]
    # On a text that the model was not made for, fewer experts may lose nothing that could be won back.
    assert "Act 2 -> 1 of 2 experts; perplexity: full" in figures[4].note


def test_figures_of_a_conversion():
    def score(nll, right):
        return {"nll": [nll, nll + 2], "right": [right, right], "tokens": [10, 10]}

    scores = {"dense": (30, 8), "converted": (40, 6), "static": (80, 1), "activation-split": (50, 4)}
    record = {"scores": {name: score(*each) for name, each in scores.items()}, "experts": 8, "identity": "x"}
    record |= {"training": {"steps": 3, "batch_tokens": 64}, "cell": vars(CONVERTED), "name": CONVERTED.name}
    margin, kept = mixture_figures({CONVERTED.name: record})[2:4]
    (entry,) = mixture_tables({CONVERTED.name: record}).values()
    assert entry["accuracy"] == {"dense": 0.8, "converted": 0.6, "static": 0.1, "activation-split": 0.4}
    assert entry["perplexity"]["dense"] == 22.198
    assert "scores" not in entry
    # Ten nats of ten tokens in both blocks, against the better of the two rivals.
    assert margin.value == pytest.approx(mean_interval([1.0, 1.0], ["0", "1"], [10, 10]).low)
    assert margin.note.startswith("mean 1.000; ")
    assert kept.value == pytest.approx(75.0)
    assert "3 steps of 64 tokens; perplexity: dense 22.20" in margin.note


def test_figures_of_a_trim():
    scores = {n: {"nll": [v * 10], "tokens": [10]} for n, v in (("dense", 1), ("untrained", 3), ("mixture", 2))}
    split = {"scores": scores, "k": 6, "experts": 8, "what": "split evenly"}
    rows = {
        "full": {"ce": 2.0},
        "plan": {"ce": 3.0},
        "hooks": {"ce": 2.5, "recovered_ce": [0.5, 0.4, 0.6]},
        "control": {"ce": 1.9, "recovered_ce": [0.1, None, 0.2]},
    }
    records = {TRIM.name: {"rows": rows, "plan": {"act": 4.0}}, SPLIT.name: split}
    (*_, figure) = mixture_figures(records)
    assert figure.value == pytest.approx(50.0)
    assert figure.note.startswith("95 % 50 [40, 60]; the others: control 10 [?, 20]; Act 6 -> 4 of 8 experts; ")
    assert "split evenly: dense 2.72, mixture 7.39 (20.09 before)" in figure.note
    rows["hooks"]["recovered_ce"] = [None, None, None]
    (*_, figure) = mixture_figures(records)
    assert math.isnan(figure.value)
    assert figure.note.startswith("95 % nothing was lost; ")
