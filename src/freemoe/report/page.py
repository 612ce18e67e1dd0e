"""The plain page that conversions and trims share: a table, a few sentences, pictures, the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from freemoe.core.files import write_atomic
from freemoe.report.figures.drawing import to_svg
from freemoe.report.html import REPORT
from freemoe.results import read_result

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}td:not(:last-child){white-space:nowrap}figure{margin:1.5rem 0}figcaption{color:#5f6670}svg{max-width:100%}</style>
</head><body><h1>{{ title }}</h1>
<table><tr>{% for name in header %}<th>{{ name }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% for line in lines %}<p>{{ line }}</p>{% endfor %}
{% for caption, picture in pictures %}<figure>{{ picture }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}<h2>Recipe</h2><pre>{{ recipe }}</pre></body></html>
"""


def write_page(folder: str | Path, page: Callable[[dict[str, Any]], str]) -> Path:
    """Read an artefact's ``result.json`` and write its page, ``report.html``, beside it."""
    path = Path(folder)
    result = read_result(path)
    write_atomic(path / REPORT, page(result).encode())
    return path / REPORT


def plain_page(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    lines: Sequence[str],
    pictures: Sequence[tuple[str, Figure | None]],
    recipe: dict[str, Any],
) -> str:
    """One HTML page that needs no other file.

    Args:
        title: Its heading.
        header: Of the table.
        rows: Of the table, as text.
        lines: Sentences below it.
        pictures: Caption and figure; those without a figure are left out.
        recipe: Shown at the end.
    """
    drawn = [
        (caption, Markup(to_svg(figure, f"picture-{n}")))
        for n, (caption, figure) in enumerate(pictures)
        if figure is not None
    ]
    return (
        Environment(autoescape=True, undefined=StrictUndefined)
        .from_string(_PAGE)
        .render(title=title, header=header, rows=rows, lines=lines, pictures=drawn, recipe=json.dumps(recipe, indent=1))
    )
