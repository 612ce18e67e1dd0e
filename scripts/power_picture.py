"""Draw the picture of `docs/evidence.md`: which gain the guard finds, by documents and tests."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

from freemoe.evals.statistics import detectable_gain
from freemoe.report.figures.drawing import PALETTE, new_figure, ratio_ticks, report_style

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "power.svg"
DOCUMENTS = (15, 20, 25, 30, 40, 50, 70, 100, 150, 200, 300, 500, 700, 1000)
TESTS = (24, 12, 2)
ALPHA = 0.05


def main(path: Path) -> None:
    """Write the picture; the same figures give the same bytes."""
    with report_style(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure = new_figure(7.0, 3.6)
        axes = figure.subplots()
        for tests, colour in zip(TESTS, PALETTE, strict=False):
            gains = [100 * detectable_gain(count, ALPHA / tests) for count in DOCUMENTS]
            axes.plot(DOCUMENTS, gains, color=colour, marker="o", markersize=3, label=f"{tests} tests")
        axes.set(xscale="log", yscale="log", xlabel="documents that test it", ylabel="gain, points")
        ratio_ticks(axes.xaxis, DOCUMENTS[0], DOCUMENTS[-1], most=8)
        ratio_ticks(axes.yaxis, 3, 80, most=8)
        axes.grid(True)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
