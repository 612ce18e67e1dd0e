"""The pictures of a report in docs/images, in both themes: verdict, table and one figure of a build's page, as a browser shows them.

    freemoe demo -o demo-out
    python scripts/report_pictures.py demo-out

Needs a chromium (Debian: apt install chromium).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from PIL import Image

from freemoe.domain_experts import report as experts
from freemoe.domain_experts.result import BuildResult
from freemoe.results import read_result

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 1280
# Of the whole page only what a picture of it has room for: verdict, table, and beside the table a figure as a phone has it.
ONLY = """(() => {
  const all = s => [...document.querySelectorAll(s)], one = s => document.querySelector(s);
  all('nav, .findings, main > section:not(#verdict, #scores, #pictures), #pictures > h2, figure:not(#figure-improvement)').forEach(
    e => e.style.display = 'none');
  one('#figure-improvement .wide').style.display = 'none';
  one('#figure-improvement .narrow').style.display = 'block';
  const top = one('#scores').getBoundingClientRect().top, main = one('main').getBoundingClientRect();
  one('#pictures').style.cssText = `position:absolute;border:0;margin:0;padding:0;width:360px;top:${top}px;left:${main.right - 392}px`;
  one('#scores-table').style.minWidth = '0';
  all('#scores-table th, #scores-table td').forEach(e => e.style.paddingRight = '9px');
  return one('#scores').getBoundingClientRect().bottom + 24;
})()"""
COLOURS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("artefact", help="folder of a finished build, or its result.json")
    parser.add_argument("--out", default=ROOT / "docs" / "images", type=Path)
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests.chromium import browser, find

    program = find()
    if program is None:
        sys.exit("No chromium on this machine. Debian: apt install chromium; or name one in FREEMOE_CHROMIUM.")
    asked.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, browser(program) as tab:
        page = Path(scratch) / "report.html"
        page.write_text(experts.page(read_result(asked.artefact, BuildResult)), encoding="utf-8")
        for theme in ("light", "dark"):
            tab.open(page, WIDTH, theme)
            height = tab.run(ONLY)
            picture = asked.out / f"report-{theme}.png"
            tab.picture(picture, {"x": 0, "y": 0, "width": WIDTH, "height": height})
            with Image.open(picture) as seen:
                # Those that cover the most are not all: a dot of a row's colour has to keep it.
                few = seen.convert("RGB").quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE)
            few.save(picture, optimize=True)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
