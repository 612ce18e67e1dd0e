"""How figures look and how they become SVG: one style, the same bytes for the same figure.

Figures are made on matplotlib's object API, so nothing global changes and no window system is needed. Every function that draws takes
the width that it has, and draws otherwise where that is a phone's.
"""

from __future__ import annotations

import functools
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import PlaceHolderLayoutEngine

from freemoe.core import neutral
from freemoe.report.palette import EDGE, FAINT, INK, PAPER, RAMPS, SOFT, on_step, use_theme_variables

WIDE, NARROW = 10.0, 3.58
"""Widths in inches, of 100 pixels each, of the two drawings that a page has of every figure: for a screen, and for a phone."""

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a6d00", "#000000")
"""For pictures that stand alone and tell many methods apart; figures of a page take the colours of `report.palette`."""

ROW_MARKERS = {"base": "|", "expert": "o", "routed": "s", "control": "^", "oracle": "D", "rival": "v"}
ROW_LABELS = {
    "base": "base",
    "expert": "expert (known subdomain)",
    "routed": "routed",
    "control": "control (random weights)",
    "oracle": "oracle (selected on test)",
}
METRIC_MARKERS = {"wanda": "o", "magnitude": "s", "random": "^"}

_MOST_PANELS = 24

_STYLE: dict[str, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "freemoe",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": EDGE,
    "axes.labelcolor": SOFT,
    "axes.titlesize": 9,
    "axes.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "grid.color": FAINT,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}


@contextmanager
def report_style() -> Iterator[None]:
    """The report's own look, whatever the user's matplotlib settings are; they come back afterwards. Also a decorator."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)  # pyright: ignore[reportCallIssue, reportArgumentType]
        yield


@dataclass(frozen=True)
class ReportFigure:
    """One figure of a page."""

    name: str  # Its anchor, and the prefix of its ids
    title: str  # Heading
    caption: str  # What to see in it
    # Result and width in inches -> figure, or None when the result has nothing for it
    draw: Callable[..., Figure | None]

    def __call__(self, result: Any, width: float = WIDE) -> Figure | None:
        """Draw it; None where the result has nothing for it."""
        return self.draw(result, width)

    def svgs(self, result: Any) -> tuple[str, str] | None:
        """Inline SVG for a screen and for a phone; None when the result has nothing for it."""
        wide, narrow = (self.draw(result, width) for width in (WIDE, NARROW))
        if wide is None or narrow is None:
            return None
        said = (self.title, self.caption)
        return to_svg(wide, f"{self.name}-w", *said), to_svg(narrow, f"{self.name}-n", *said)


def report_figure(name: str, title: str, caption: str) -> Callable[[Callable[..., Figure | None]], ReportFigure]:
    """Make a figure function a `ReportFigure`, drawn in the report's style."""
    return lambda draw: ReportFigure(name, title, caption, report_style()(draw))


def is_narrow(width: float) -> bool:
    """Whether a figure of so many inches is drawn for a phone."""
    return width < WIDE / 2


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of a size in inches (100 pixels each on the page), laid out so that nothing overlaps."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


@functools.cache
def _known_characters() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def drawable_name(name: object, most: int = 30) -> str:
    """A name as it can be drawn: one line, not too long, only characters that the font has."""
    known = _known_characters()
    text = "".join(c if ord(c) in known else "\u25a1" for c in neutral.one_line(name))
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[: most - 1 - half]}…{text[-half:]}"


def panels_of(items: Sequence[Any], has_expert: Callable[[Any], bool]) -> tuple[list[Any], str]:
    """The items that get a panel, in their order, and a line that says so when that is not all of them."""
    if len(items) <= _MOST_PANELS:
        return list(items), ""
    ranked = sorted(range(len(items)), key=lambda i: (not has_expert(items[i]), i))[:_MOST_PANELS]
    note = f"{_MOST_PANELS} of {len(items)} subdomains are drawn, those with an expert first"
    return [items[i] for i in sorted(ranked)], note


def make_panels(count: int, columns: int = 4, width: float = WIDE, height: float = 2.3) -> tuple[Figure, list[Axes]]:
    """A figure of small multiples: ``count`` panels, row by row, all of one size; one beside another only where there is room."""
    columns = 1 if is_narrow(width) else min(columns, count)
    rows = math.ceil(count / columns)
    height = min(height, 1.75) if is_narrow(width) else height
    # Few panels are not stretched over the page.
    figure = new_figure(min(width, 3.7 * columns + 0.8), height * rows + 0.6)
    grid = figure.add_gridspec(rows, columns)
    return figure, [figure.add_subplot(grid[i // columns, i % columns]) for i in range(count)]


def draw_heatmap(
    axes: Axes,
    shares: Sequence[Sequence[float]],
    top: float,
    hue: str,
    number: Callable[[int, int], str] | None = None,
    left: float = 0.0,
) -> None:
    """A grid of cells, the darker the larger the share: in steps, each with a colour to write on it in.

    The darkest step is the share ``top``; ``hue`` is one of `palette.RAMPS`, ``number`` makes of row and column what to
    write into a cell, and ``left`` is where the first column begins.
    """
    steps = RAMPS[hue]
    place = [[min(len(steps) - 1, int(len(steps) * share / top)) if top else 0 for share in row] for row in shares]
    axes.pcolormesh(
        [left + x for x in range(len(shares[0]) + 1)],
        range(len(shares) + 1),
        place,
        cmap=ListedColormap(steps),
        norm=Normalize(0, len(steps) - 1),
        edgecolors=PAPER,
        linewidth=1,
    )
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if number is None:
        return
    for y, row in enumerate(place):
        for x, step in enumerate(row):
            where = (left + x + 0.5, y + 0.5)
            axes.annotate(number(y, x), where, ha="center", va="center", fontsize=7.5, color=on_step(step))


def row_axis(axes: Axes, names: Sequence[str]) -> None:
    """One named row below the other, from the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def signed_ticks(axis: Any, most: int) -> None:
    """Ticks that are written with their sign."""
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(most))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:+g}" if v else "0"))


def first_column(axes: Axes) -> bool:
    """Whether a panel stands in the first column of its grid."""
    place = axes.get_subplotspec()
    return place is not None and place.is_first_col()


def wrap_label(text: str, inches: float) -> str:
    """Text in lines that fit a width, at the size of an axis' label."""
    return "\n".join(textwrap.fill(line, max(16, int(13 * inches))) for line in text.split("\n"))


def set_bottom_label(figure: Figure, text: str) -> None:
    """One soft line, or several, under the whole figure."""
    figure.supxlabel(wrap_label(text, float(figure.get_size_inches()[0])), fontsize=8.5, color=SOFT)


def set_panel_title(axes: Axes, title: str, below: str = "", most: int = 26) -> None:
    """A panel's name of at most so many characters, and one softer line under it."""
    axes.set_title(
        drawable_name(title, most) + ("\n" if below else ""), loc="left", fontweight="bold", fontsize=9, pad=4
    )
    if below:
        axes.annotate(
            drawable_name(below, most * 3 // 2),
            (0, 1),
            (0, 4),
            "axes fraction",
            "offset points",
            fontsize=7.5,
            color=SOFT,
            va="bottom",
        )


def legend_above(figure: Figure, handles: Sequence[Any], columns: int = 5) -> None:
    """One legend for the whole figure, above its panels."""
    if handles:
        room = 13 * float(figure.get_size_inches()[0])
        longest = 5 + max(len(h.get_label()) for h in handles)
        columns = max(1, min(columns, int(room / longest)))
        figure.legend(handles=list(handles), loc="outside upper left", ncols=columns, handletextpad=0.5, borderpad=0)


def ratio_ticks(axis: Any, low: float, high: float, most: int = 6) -> None:
    """Ticks of a logarithmic axis at round numbers, written as plain numbers."""
    span = math.log10(max(high, 1e-12) / max(low, 1e-12))
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if span < 1 else (1, 2, 5) if span < 3 else (1,)
    values = [
        m * 10.0**e for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1) for m in steps
    ]
    values = [v for v in values if low * 0.999 <= v <= high * 1.001]
    if len(values) < 3:
        values = [v for v in matplotlib.ticker.MaxNLocator(4).tick_values(low, high) if low <= v <= high]
    stride = max(1, math.ceil(len(values) / most))
    # The base, at 1, is kept where it is in range.
    first = values.index(1.0) % stride if 1.0 in values else 0
    axis.set_major_locator(matplotlib.ticker.FixedLocator(values[first::stride]))
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:.6g}" if v < 10**5 else f"{v:.0e}"))
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def _lay_out(figure: Figure) -> None:
    """Lay a figure out once and pin it; the solver's last bits vary from run to run, so positions are rounded."""
    engine = figure.get_layout_engine()
    if engine is None or isinstance(engine, PlaceHolderLayoutEngine):
        return
    engine.execute(figure)
    figure.set_layout_engine("none")
    for axes in figure.axes:
        left, bottom, width, height = axes.get_position(original=True).bounds
        axes.set_position((round(left, 5), round(bottom, 5), round(width, 5), round(height, 5)))
    for text in figure.texts:
        x, y = text.get_position()
        text.set_position((round(x, 5), round(y, 5)))


def to_svg(figure: Figure, name: str, title: str = "", description: str = "") -> str:
    """Inline SVG of a figure: text as text, colours as variables, no XML head, comments or date, and ids that are its own.

    The name is the prefix of its ids, so that several figures can stand in one page; title and description are for those
    who do not see it.
    """
    stream = io.StringIO()
    with report_style():
        matplotlib.rcParams["svg.fonttype"] = "none"
        _lay_out(figure)
        figure.savefig(stream, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.S)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href=", "href=")
    used = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    svg = re.sub(r'\sid="([^"]*)"', lambda m: f' id="{name}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    # Writing takes the page's font; matplotlib's versions differ in how they name their own.
    svg = re.sub(r" font-family: 'DejaVu Sans'[^;\"]*;?", "", re.sub(r"px 'DejaVu Sans'[^;\"]*", "px var(--font)", svg))
    svg = use_theme_variables(re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", svg))
    width = float(figure.get_size_inches()[0])
    head = (
        f'<svg role="img" aria-labelledby="{name}-title" aria-describedby="{name}-text" '
        f'style="width:100%;max-width:{100 * width:.0f}px;stroke-linejoin:round;stroke-linecap:butt"'
    )
    svg = re.sub(r'\s(?:width|height|version)="[^"]*"', "", svg[: svg.index(">")]) + svg[svg.index(">") :]
    told = f'<title id="{name}-title">{neutral.escape_html(title or name)}</title>'
    told += f'<desc id="{name}-text">{neutral.escape_html(description or title or name)}</desc>'
    svg = svg.replace("<svg", head, 1).replace(">", f">\n{told}", 1)
    return re.sub(r"\n\s*", "\n", svg).strip()
