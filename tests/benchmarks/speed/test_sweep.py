"""The benchmark of the sweep: both sides find the same, and what differs is an error."""

import pytest
import torch

from benchmarks.harness import Settings
from benchmarks.speed import sweep as bench
from freemoe.core.errors import NumericError


@pytest.fixture(scope="module")
def world():
    return bench._world(90, bench.SHAPE, Settings(quick=True))


def test_figures_of_a_quick_run():
    outcome = bench.run(Settings(quick=True))
    small, _, large = outcome.figures
    assert [(f.target, f.better) for f in outcome.figures] == [(10.0, "higher"), (None, "higher"), (10.0, "higher")]
    assert all("same bands chosen" in f.note for f in (small, large))
    assert all(f.value > 0 for f in outcome.figures)
    for vocabulary in (90, 300):
        details = outcome.details[f"vocabulary {vocabulary}"]
        assert details["cells"] == 20
        assert details["chosen"]["plain"] == details["chosen"]["freemoe"]


def test_both_sides_fill_the_same_table_and_leave_the_model(world):
    before = {w.name: w.parameter.detach().clone() for w in world.weights}
    plain, ours = bench._plain(world), bench._ours(world, "freemoe", 0)
    assert ours.tables == plain.tables
    assert ours.chosen == plain.chosen
    assert len(plain.tables[0]) == len(world.bands) == 10
    assert all(torch.equal(before[w.name], w.parameter) for w in world.weights)


def test_another_choice_or_grade_is_an_error(world):
    plain = bench._plain(world)
    table = {name: list(values) for name, values in plain.tables[0].items()}
    first = next(iter(table.values()))
    first[2] = 1 - first[2]
    for other, said in (
        (bench.Found(["x", "y"], plain.tables), "Other bands are chosen"),
        (bench.Found(plain.chosen, [table, plain.tables[1]]), "Document 2 of subdomain 0 is graded .* not by rounding"),
    ):
        with pytest.raises(NumericError, match=said):
            bench._check_same(world, {"plain": [plain], "freemoe": [other]})
