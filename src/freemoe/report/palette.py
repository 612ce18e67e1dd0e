"""The colours of every figure and page: one meaning each, in a light and in a dark theme.

Figures are drawn in the light colours; in a page each of them becomes a CSS variable, so that one figure serves both themes. That
needs every light colour to be there once only. The hues of rows are those of Okabe and Ito, darkened where white paper asks for it;
what is told apart by colour is told apart by marker or dash too.
"""

from __future__ import annotations

import re

LIGHT, DARK = 0, 1

COLOURS: dict[str, tuple[str, str]] = {
    # Paper and writing.
    "paper": ("#ffffff", "#14171a"),
    "shade": ("#f3f5f7", "#1e2328"),
    "line": ("#dfe3e8", "#333a42"),
    "edge": ("#868e98", "#7b8591"),
    "ink": ("#20242a", "#e8eaed"),
    "soft": ("#59616b", "#a9b2bc"),
    "link": ("#0a5a9c", "#7cbcf0"),
    # What a row is.
    "base": ("#68707a", "#98a2ad"),
    "expert": ("#0072b2", "#56a8e4"),
    "routed": ("#00805c", "#3dbd92"),
    "control": ("#a66f00", "#dfa436"),
    "oracle": ("#b4548c", "#e08ab7"),
    "rival": ("#c44f00", "#f08449"),
    # What a candidate was found by; one of random weights is a control.
    "saliency": ("#7a4f2a", "#c9a17c"),
    "wanda": ("#6a4fa8", "#a893e2"),
    "magnitude": ("#66700a", "#b4bd4c"),
}
"""Name -> light and dark."""

_STEPS = (0.05, 0.14, 0.24, 0.34, 0.45, 0.97)
_INKED = 5  # steps on which one writes in ink; on the others in the paper's colour


def mix_colours(colour: str, paper: str, share: float) -> str:
    """So much of a colour on so much paper."""
    pairs = zip(*(bytes.fromhex(c[1:]) for c in (colour, paper)), strict=True)
    return "#" + "".join(f"{round(share * c + (1 - share) * p):02x}" for c, p in pairs)


for _hue in ("expert", "routed", "base"):
    for _n, _share in enumerate(_STEPS):
        COLOURS[f"{_hue}-{_n}"] = (
            mix_colours(COLOURS[_hue][LIGHT], COLOURS["paper"][LIGHT], _share),
            mix_colours(COLOURS[_hue][DARK], COLOURS["paper"][DARK], _share),
        )

RAMPS = {hue: tuple(COLOURS[f"{hue}-{n}"][LIGHT] for n in range(len(_STEPS))) for hue in ("expert", "routed", "base")}
"""Steps from nearly the paper's colour to nearly the hue itself, for cells that hold a share."""

PAPER, SHADE, FAINT, EDGE, INK, SOFT = (COLOURS[n][LIGHT] for n in ("paper", "shade", "line", "edge", "ink", "soft"))
BASE, EXPERT, ROUTED, CONTROL, ORACLE, RIVAL = (
    COLOURS[n][LIGHT] for n in ("base", "expert", "routed", "control", "oracle", "rival")
)

ROLES = {
    **dict.fromkeys(("base", "full", "dense"), "base"),
    **dict.fromkeys(("expert", "hooks", "rescaled", "trimmed", "converted"), "expert"),
    **dict.fromkeys(("routed", "auto"), "routed"),
    **dict.fromkeys(("control", "random"), "control"),
    "oracle": "oracle",
    **dict.fromkeys(("plan", "scale and bias"), "rival"),
}
"""Row of a table -> what it is, of the six kinds of row."""


def row_role(row: str, other: str = "expert") -> str:
    """What a row is; a name of the user's own is an expert's, unless told otherwise."""
    return ROLES.get(row, other)


def light_colour(name: str) -> str:
    """The light colour of a name, for drawing."""
    return COLOURS[name][LIGHT]


def on_step(number: int) -> str:
    """The colour of writing on a step of a ramp."""
    return INK if number < _INKED else PAPER


def theme_css() -> str:
    """The variables of both themes; paper is always light."""
    light, dark = ("".join(f"--{name}:{pair[theme]};" for name, pair in COLOURS.items()) for theme in (LIGHT, DARK))
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"


_NAMES = {pair[LIGHT]: name for name, pair in COLOURS.items()}


def use_theme_variables(svg: str) -> str:
    """The figure with variables in the place of its colours."""
    return re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda m: f"var(--{_NAMES[m[0]]})" if m[0] in _NAMES else m[0], svg)
