"""T15, T15b and T16 from made-up records."""

import math
from dataclasses import replace

import pytest

from benchmarks.real_llm.cells import Cell
from benchmarks.real_llm.figures.rows import pick, rows_of, verdict
from benchmarks.real_llm.figures.structured import structured_figures
from benchmarks.real_llm.figures.tables import tables_of
from benchmarks.real_llm.methods.structured import FREE, RIVALS
from tests.benchmarks.real_llm.records import NLL, finished, text_record


def cut(material, budget, by, method="structured", **more):
    """A record of neurons off whose documents cost so many nats more; 1.2x in prefill and 1.05x in decode."""
    nll = [v + b for v, b in zip(NLL, by if isinstance(by, list) else [by] * len(NLL), strict=True)]
    speed = {"prefill": 120.0, "decode": 21.0, "dense": {"prefill": 100.0, "decode": 20.0}}
    speed |= {"prompt": 512, "parameters": [100, 90]}
    facts = {"units": {"share": budget + 0.003}, "speed": speed}
    return text_record(Cell("text", material, method, budget), nll, [4.0, 4.5], **(facts | more))


def base(material):
    return text_record(Cell("text", material), NLL)


def figures(*records):
    found = {}
    for figure in structured_figures(finished(*records)):
        found.setdefault(figure.name.split()[0], []).append(figure)
    return found


def test_without_cells_nothing_is_measured():
    found = figures()
    assert {k: len(v) for k, v in found.items()} == {"T15": 6, "T15b": 2, "T16": 3}
    judged = [f for v in found.values() for f in v if f.target is not None]
    assert len(judged) == 10
    assert all(math.isnan(f.value) and f.verdict(False) == "missed" for f in judged)


def test_t15_is_the_share_of_the_second_text_and_the_speed_there():
    # On one text 30 % costs nothing that is shown (the interval holds 0), on the other only 10 %.
    one = [base("wikitext"), cut("wikitext", 0.2, 0.0), cut("wikitext", 0.3, [-1.0, 1.0, -1.0, 1.0] * 100)]
    two = [base("gsm8k"), cut("gsm8k", 0.1, -0.5), cut("gsm8k", 0.2, 2.0)]
    share, alone, prefill, decode, *exact = figures(*one, *two)["T15"]
    assert [f.value for f in (share, alone, prefill, decode)] == pytest.approx([10.3, 10.3, 1.2, 1.05])
    assert [f.verdict(False) for f in (share, prefill, decode)] == ["missed", "met", "missed"]
    assert "30.3% +0.000" in share.note
    assert all(math.isnan(f.value) and f.name.endswith("fp32") for f in exact)
    share, _, prefill, *_ = figures(*one)["T15"]
    assert math.isnan(share.value)
    assert "done on 1 texts" in share.note
    assert prefill.value == pytest.approx(1.2)
    assert "speed at the target's" in prefill.note
    for record in one[1:]:
        record["speed"]["float32"] = {"prefill": 130.0, "decode": 26.0, "dense": {"prefill": 100.0, "decode": 20.0}}
    assert [f.value for f in figures(*one)["T15"][2:]] == pytest.approx([1.2, 1.05, 1.3, 1.3])
    # Lost everywhere: the share is 0, and the speed is that of 20 %.
    lost = [base("wikitext"), cut("wikitext", 0.2, 1.0), base("gsm8k"), cut("gsm8k", 0.2, 1.0)]
    share, _, prefill, *_ = figures(*lost)["T15"]
    assert (share.value, prefill.value) == pytest.approx((0, 1.2))
    # Single switches beside the neurons win the loss back: that counts, and is told apart.
    won = [cut(t, 0.2, -0.5, "structured-switches") for t in ("wikitext", "gsm8k")]
    share, alone, *_ = figures(*lost, *won)["T15"]
    assert (share.value, alone.value) == pytest.approx((20.3, 0))
    assert "20.3% and switches +0.050" in share.note


def test_t15b_is_the_ratio_of_perplexities_on_the_tiny_base():
    home = Cell("home", "wikitext", base="models/stories260k")
    found = replace(home, method=FREE, budget=0.2)
    facts = {"units": {"share": 0.2}, "stopping_loss_of_base": 4.0, "stopping_loss_of_units": 3.0}
    records = [text_record(home, NLL), text_record(found, [v - 13.0 for v in NLL], [4.0, 3.0, 2.5], **facts)]
    wikitext, gsm8k = figures(*records)["T15b"]
    assert wikitext.value == pytest.approx(math.exp(-1.3))
    assert wikitext.verdict(False) == "met"
    assert "4.000 -> 3.000 with neurons -> 2.500 with switches" in wikitext.note
    assert math.isnan(gsm8k.value)
    # The benchmark's own base is another question.
    own = [text_record(replace(r, family="text", base=""), NLL, **facts) for r in (home, found)]
    assert math.isnan(figures(*own)["T15b"][0].value)


def test_t16_takes_the_best_rival_and_the_worst_text():
    def rivals(material, *by):
        return [cut(material, 0.2, b, f"units-{r}", speed={}) for r, b in zip(RIVALS, by, strict=True)]

    wikitext = [base("wikitext"), cut("wikitext", 0.2, 1.0), *rivals("wikitext", 3.0, 2.0, 4.0)]
    gsm8k = [base("gsm8k"), cut("gsm8k", 0.2, 1.0), *rivals("gsm8k", 9.0, 1.5, 9.0)]
    ten, twenty, thirty = figures(*wikitext, *gsm8k)["T16"]
    assert twenty.value == pytest.approx(0.05, rel=0.02)
    assert "wikitext against taylor +0.100" in twenty.note
    assert all(math.isnan(f.value) for f in (ten, thirty, figures(*wikitext[:-1])["T16"][1]))
    # The same neurons are no better.
    assert figures(*wikitext[:2], *rivals("wikitext", 1.0, 2.0, 2.0))["T16"][1].verdict(False) == "missed"


def test_a_cut_that_stopped_at_its_start_is_not_the_base():
    records = finished(base("wikitext"), cut("wikitext", 0.2, 5.0))
    rows = rows_of(records, "text")
    assert verdict(*(pick(rows, "wikitext", t) for t in ("structured-20%", "base"))).gain == pytest.approx(-0.5)
    assert tables_of(records)["text"][1]["prefill_against_dense"] == 1.2
    still = tables_of(finished(base("wikitext"), cut("wikitext", 0.2, 5.0, "units-wanda", speed={})))["text"][1]
    assert "prefill_tokens_per_second" not in still
