"""One palette for figures and pages: readable in both themes, and every colour there once."""

import itertools
import re
from importlib.resources import files

import pytest

from freemoe.report.palette import COLOURS, RAMPS, on_step, row_role, theme_css, use_theme_variables

THEMES = {"light": 0, "dark": 1}
WRITING = ("ink", "soft", "link")
ROWS = ("base", "expert", "routed", "control", "oracle", "rival")
MARKS = (*ROWS, "saliency", "wanda", "magnitude", "edge", "ink", "soft")


def luminance(colour):
    """Relative luminance of sRGB, as WCAG 2 has it."""
    parts = [byte / 255 for byte in bytes.fromhex(colour[1:])]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_measure_itself():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("ground", ["paper", "shade"])
def test_writing_and_marks_stand_out(theme, ground):
    number = THEMES[theme]
    behind = COLOURS[ground][number]
    found = {name: contrast(COLOURS[name][number], behind) for name in COLOURS}
    assert {n: found[n] for n in WRITING if found[n] < 4.5} == {}
    assert {n: found[n] for n in MARKS if found[n] < 3.0} == {}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("hue", RAMPS)
def test_numbers_on_shaded_cells_can_be_read(theme, hue):
    number = THEMES[theme]
    by_light = {pair[0]: pair for pair in COLOURS.values()}
    for step, face in enumerate(RAMPS[hue]):
        pair, writing = by_light[face], by_light[on_step(step)]
        assert contrast(pair[number], writing[number]) >= 4.5, (hue, step)
    shades = [luminance(by_light[face][number]) for face in RAMPS[hue]]
    assert shades == sorted(shades, reverse=theme == "light")


def test_every_light_colour_is_there_once_and_rows_differ_in_both_themes():
    lights = [pair[0] for pair in COLOURS.values()]
    assert len(lights) == len(set(lights))
    assert all(COLOURS[a][t] != COLOURS[b][t] for a, b in itertools.combinations(ROWS, 2) for t in (0, 1))


def test_a_figure_takes_its_colours_from_the_theme():
    assert (
        use_theme_variables(f'style="fill: {COLOURS["expert"][0]}; stroke: #123456"')
        == 'style="fill: var(--expert); stroke: #123456"'
    )
    light, dark = theme_css().split("@media")
    for name, pair in COLOURS.items():
        assert f"--{name}:{pair[0]};" in light
        assert f"--{name}:{pair[1]};" in dark


def test_the_page_has_no_colours_of_its_own():
    rules = files("freemoe.report").joinpath("templates/page.css").read_text(encoding="utf-8")
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b(?=[^{]*;)|rgba?\(", rules) == []
    assert set(re.findall(r"var\(--([\w-]+)\)", rules)) <= {*COLOURS, "font"}


def test_rows_of_all_commands_are_of_six_kinds():
    assert [row_role(n) for n in ("dense", "full", "hooks", "auto", "random", "plan")] == [
        "base", "base", "expert", "routed", "control", "rival",
    ]  # fmt: skip
    assert row_role("code/arith") == "expert"
    assert row_role("some rule", "rival") == "rival"
