"""The four pages in a headless browser: nothing sticks out, nothing complains, in two widths and both themes.

Screenshots are kept in the folder that FREEMOE_SCREENSHOTS names.
"""

import os
from pathlib import Path

import pytest

from tests.chromium import NAMES, STICKING_OUT, browser, find
from tests.report.family import FAMILY

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(find() is None, reason=f"no chromium on this machine (looked for {', '.join(NAMES)})"),
]

WIDTHS = (390, 1280)

OUT_OF_FIGURE = """[...document.querySelectorAll('svg text')].filter(t => {
  const box = t.getBoundingClientRect(), own = t.closest('svg').getBoundingClientRect();
  return box.width && (box.left < own.left - 2 || box.right > own.right + 2);
}).map(t => t.closest('figure').id + ': ' + t.textContent)"""

SMALLEST_WRITING = """Math.min(...[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().width).map(
  t => parseFloat(getComputedStyle(t).fontSize) * t.closest('svg').getBoundingClientRect().width / t.closest('svg').viewBox.baseVal.width))"""


@pytest.fixture(scope="module")
def tab():
    program = find()
    assert program is not None
    with browser(program) as found:
        yield found


@pytest.fixture(scope="module")
def files(pages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name in FAMILY:
        (folder / f"{name}.html").write_text(pages[name], encoding="utf-8")
    return {name: folder / f"{name}.html" for name in FAMILY}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", FAMILY)
def test_a_page_fits_and_is_quiet(tab, files, name, width, theme):
    tab.open(files[name], width, theme)
    kept = os.environ.get("FREEMOE_SCREENSHOTS")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        tab.picture(Path(kept) / f"{name}-{width}-{theme}.png")
    tab.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    seen = tab.run(STICKING_OUT)
    assert seen["room"] == width
    assert seen["scroll"] <= width
    assert seen["found"] == []
    assert tab.run(OUT_OF_FIGURE) == []
    assert tab.run(SMALLEST_WRITING) >= 9
    assert tab.complaints() == []
    # The theme is the reader's, and every figure is there once.
    paper = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[theme]
    assert tab.run("getComputedStyle(document.body).backgroundColor") == paper
    shown = tab.run("[...document.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width).length")
    assert shown == tab.run("document.querySelectorAll('figure').length") > 0


def test_the_check_sees_what_sticks_out_and_what_complains(tab, tmp_path):
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><meta name=viewport content='width=device-width'><body><p style='width:900px'>wide</p>"
        "<script>console.error('no')</script></body>"
    )
    tab.open(page, 390)
    seen = tab.run(STICKING_OUT)
    assert seen["scroll"] > 390
    assert any("wide" in line for line in seen["found"])
    assert tab.complaints() == ["console.error"]
