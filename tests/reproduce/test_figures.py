"""Pictures of plain data fit a page, and show what they were given."""

import pytest

from freemoe.report.figures.drawing import WIDE, to_svg
from reproduce.figures import as_file, bars, boxes, curves, radars

POINTS = [(0.05, 40.0), (0.15, 42.0), (0.25, 39.0)]
CASES = {
    "curves": (lambda: curves({"a": {"5 %": POINTS, "10 %": POINTS[:2]}, "b": {"5 %": POINTS}}, "x", "y", {"a": 41.0}), 2),
    "boxes": (lambda: boxes({"a": {"one": (-1, 0, 1, 2, 3), "two": (0, 0, 0, 0, 0)}, "b": {"one": (1, 2, 3, 4, 5)}}, "x"), 2),
    "bars": (lambda: bars({"a": {"task": {"ours": (1.0, 0.5, 1.5), "theirs": (2.0, 2.0, 2.0)}}}, "y"), 1),
    "radars": (lambda: radars({"a": {s: {f"task {i}": 10.0 * i for i in range(1, 6)} for s in ("base", "expert")}}), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_fits(name):
    draw, count = CASES[name]
    figure = draw()
    assert figure is not None
    assert figure.get_size_inches()[0] <= WIDE + 1e-9
    assert len(figure.axes) == count
    svg = to_svg(figure, name, "A title", "What it shows")
    assert "What it shows" in svg
    figure.canvas.draw()
    box = figure.get_tightbbox(figure.canvas.get_renderer())  # type: ignore[attr-defined]
    assert box.x0 > -0.12
    assert box.x1 < float(figure.get_size_inches()[0]) + 0.12


@pytest.mark.parametrize("empty", [curves({"a": {}}, "x", "y"), boxes({}, "x"), bars({"a": {}}, "y"), radars({})])
def test_nothing_is_drawn_of_nothing(empty):
    assert empty is None
    with pytest.raises(ValueError, match="nothing to draw"):
        as_file(empty, {"table": "a/b", "title": "t", "columns": {}, "rows": []})
