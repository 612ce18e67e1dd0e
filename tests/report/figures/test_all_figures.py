import re
import subprocess
import sys

import matplotlib
import pytest
from matplotlib.colors import to_hex

from freemoe.domain_experts.figures.all_figures import (
    FIGURES,
    band_sweep,
    gain_intervals,
    improved_per_band,
    purification_curves,
    score_radar,
)
from freemoe.report.figures.drawing import NARROW, WIDE, drawable_name, report_style, to_svg
from freemoe.report.palette import COLOURS
from tests.report.synthetic import make_domain, make_result, typed


def settings():
    """Those of matplotlib; reading the backend would choose one."""
    return {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("picture", FIGURES, ids=[p.name for p in FIGURES])
def test_each_figure_is_an_svg_of_moderate_size_with_the_same_bytes_each_time(picture, width):
    before = settings()
    figure = picture(typed(make_result()), width)
    assert figure.get_figwidth() <= width
    first = to_svg(figure, picture.name)
    if width == WIDE:
        assert first == to_svg(picture(typed(make_result()), width), picture.name)
    assert first.startswith("<svg ")
    assert first.endswith("</svg>")
    assert len(first) < 300_000
    assert "<image" not in first
    # Writing is writing, and every colour is one of the palette's, so that a theme can change it.
    assert first.count("<text") > 3
    assert "DejaVu" not in first
    assert re.findall(r"(?<!href=\")(?<!url\()#[0-9a-fA-F]{6}\b", first) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", first)) <= {*COLOURS, "font"}
    assert settings() == before


def test_the_users_own_matplotlib_style_has_no_say():
    plain_look = to_svg(gain_intervals(typed(make_result())), "g")
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": 20}):
        assert to_svg(gain_intervals(typed(make_result())), "g") == plain_look


def test_pyplot_and_torch_stay_out():
    code = (
        "import sys; from tests.report.synthetic import make_result, typed; from freemoe.domain_experts.figures.all_figures import FIGURES; "
        "from freemoe.domain_experts import report; [p(typed(make_result())) for p in FIGURES]; print([m for m in ('torch', 'matplotlib.pyplot', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _axes(figure):
    return [a for a in figure.axes if a.lines or a.patches]


def test_gains_are_drawn_at_the_results_own_values():
    result = make_result()
    figure = gain_intervals(typed(result))
    math = result["domains"][0]
    drawn = {round(float(x), 9) for line in _axes(figure)[0].lines for x in line.get_xdata()}
    for rows in (math["rows"], *(s["rows"] for s in math["subdomains"])):
        for name in ("expert", "routed", "control", "oracle"):
            assert {round(v, 9) for v in rows[name]["gain"].values()} <= drawn


def test_bands_put_every_candidate_at_the_middle_of_its_band():
    result = make_result()
    panel = _axes(band_sweep(typed(result)))[1]
    sub = result["domains"][0]["subdomains"][1]
    curve = next(line for line in panel.lines if len(line.get_xdata()) == 10)
    assert list(curve.get_xdata()) == pytest.approx([0.05 + 0.1 * i for i in range(10)])
    assert list(curve.get_ydata()) == [sub["candidates"][n] for n in sub["bands"]]
    star = [line for line in panel.lines if line.get_marker() == "*"]
    assert [(list(s.get_xdata()), list(s.get_ydata())) for s in star] == [
        ([0.05], [sub["candidates"]["wanda p=2 0-10 %"]])
    ]


def test_improved_per_band_counts_subdomains_of_each_domain():
    result = make_result()
    up = sum(p.get_height() for p in improved_per_band(typed(result)).axes[0].patches if p.get_height() > 0)
    down = -sum(p.get_height() for p in improved_per_band(typed(result)).axes[0].patches if p.get_height() < 0)
    # Bands score base - 8 .. base + 1 on tasks (one better, eight worse) and 3 .. 1.2 times the perplexity on text.
    assert (up, down) == (5, 5 * 8 + 2 * 10)


def test_purification_marks_the_best_round():
    result = make_result()
    star = next(line for line in purification_curves(typed(result)).axes[0].lines if line.get_marker() == "*")
    curve = result["domains"][0]["subdomains"][0]["purification_curve"]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([2], [min(curve)])


def test_names_become_one_drawable_line():
    assert drawable_name("a\n b\t c") == "a b c"
    assert drawable_name("数学") == "□□"
    assert len(drawable_name("x" * 200, 24)) == 24
    with report_style():
        assert gain_intervals(typed(make_result([make_domain("$x$ 数", ("saliency",))]))) is not None


def test_many_subdomains_get_a_panel_in_order_of_interest():
    figure = band_sweep(typed(make_result([make_domain("many", ("base", "base", "saliency") * 12)])))
    titles = [a.get_title(loc="left").strip() for a in figure.axes]
    assert len(titles) == 24
    assert {f"many/s{i}" for i in range(2, 36, 3)} <= set(titles)
    assert titles == sorted(titles, key=lambda t: int(t.removeprefix("many/s")))
    assert "24 of 36 subdomains are drawn" in figure.get_supxlabel()


@pytest.mark.parametrize(("count", "width", "kind"), [(2, WIDE, "bars"), (3, WIDE, "polar"), (3, NARROW, "bars")])
def test_fewer_than_three_spokes_are_bars_of_the_same_scores(count, width, kind):
    result = make_result([make_domain("math", ("saliency",) * count)])
    (axes,) = score_radar(typed(result), width).axes
    rows = [s["rows"] for s in result["domains"][0]["subdomains"]]
    wanted = [r[name]["score"] for r in rows for name in ("base", "expert", "routed")]
    if kind == "polar":
        assert axes.name == "polar"
        drawn_ = [float(v) for line in axes.lines[:3] for v in line.get_ydata()[:-1]]
    else:
        drawn_ = [bar.get_width() for bar in axes.patches]
    assert sorted(drawn_) == pytest.approx(sorted(wanted))


def test_the_same_row_has_the_same_colour_in_every_figure():
    result = typed(make_result())
    for picture in FIGURES:
        for width in (WIDE, NARROW):
            for legend in picture(result, width).legends:
                for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
                    name = text.get_text().split()[0]
                    if name in ("expert", "routed", "control", "oracle"):
                        shown = handle.get_color() if hasattr(handle, "get_color") else to_hex(handle.get_facecolor())
                        assert shown == COLOURS[name][0], (picture.name, name)
