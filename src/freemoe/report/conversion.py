"""The page of a converted model: what it costs and what it keeps, and how training went. Reads result JSON only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from freemoe.report.drawing import PALETTE, styled, to_svg
from freemoe.report.html import REPORT
from freemoe.runs import write_atomic
from freemoe.tomoe.card import headlines, rows

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}figure{margin:1.5rem 0}figcaption{color:#5f6670}svg{max-width:100%}</style>
</head><body><h1>{{ title }}</h1>
<table><tr><th>on test text</th><th>active</th><th>perplexity@{{ length }}</th><th>next-token accuracy</th></tr>
{% for name, active, perplexity, accuracy in rows %}<tr><td>{{ name }}</td><td>{{ "%.1f %%"|format(100 * active) }}</td>
<td><data value="{{ perplexity }}">{{ "%.3f"|format(perplexity) }}</data></td>
<td><data value="{{ accuracy }}">{{ "%.2f %%"|format(100 * accuracy) }}</data></td></tr>
{% endfor %}</table>
{% for line in lines %}<p>{{ line }}</p>{% endfor %}
{% for caption, picture in pictures %}<figure>{{ picture }}<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}<h2>Recipe</h2><pre>{{ recipe }}</pre></body></html>
"""


def write_conversion_report(folder: str | Path) -> Path:
    """Read a converted model's ``result.json`` and write ``report.html`` beside it."""
    path = Path(folder)
    result = json.loads((path / "result.json").read_text(encoding="utf-8"))
    write_atomic(path / REPORT, page(result).encode())
    return path / REPORT


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    pictures = (
        ("Training: divergence from the dense model, and the active share.", curves(result)),
        ("Width of every layer's parts, as a share of the dense model's.", widths(result)),
        ("Share of the held-out tokens that each expert gets; even is one over their number.", usage(result)),
    )
    return (
        Environment(autoescape=True, undefined=StrictUndefined)
        .from_string(_PAGE)
        .render(
            title=f"{result['base']['name']} as a mixture of experts",
            length=result["blocks"]["length"],
            rows=rows(result),
            lines=headlines(result)[-1:],
            pictures=[
                (caption, Markup(to_svg(figure, f"conversion-{n}")))
                for n, (caption, figure) in enumerate(pictures)
                if figure is not None
            ],
            recipe=json.dumps(result["recipe"], indent=1),
        )
    )


@styled
def curves(result: dict[str, Any]) -> Figure | None:
    """Loss and active share over the steps; None where nothing was trained."""
    history = result["history"]
    if not history["rows"]:
        return None
    column = {name: [row[i] for row in history["rows"]] for i, name in enumerate(history["columns"])}
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(column["distillation"], color=PALETTE[0], linewidth=0.8, label="training text")
    left.set(xlabel="step", ylabel="KL to the dense model, nats")
    right.plot(column["active"], color=PALETTE[2], label="active")
    right.plot(column["target"], color=PALETTE[1], linestyle=":", label="wanted")
    right.set(xlabel="step", ylabel="active share", ylim=(0, 1.02))
    right.legend()
    return figure


@styled
def widths(result: dict[str, Any]) -> Figure | None:
    """Kept widths per layer."""
    layers = result["layers"]
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    parts = (
        ("queries and keys", [layer["query_dims"] / layer["head_dim"] for layer in layers]),
        ("values", [layer["value_dims"] / layer["head_dim"] for layer in layers]),
        ("an expert's neurons", [max(layer["widths"]) / layer["width"] for layer in layers]),
        ("some expert's neurons", [layer["union"] / layer["width"] for layer in layers]),
    )
    for n, (name, values) in enumerate(parts):
        axes.plot(range(len(layers)), values, marker="osd^"[n], color=PALETTE[n], label=name)
    axes.set(xlabel="layer", ylabel="share kept", ylim=(0, 1.05), xticks=range(len(layers)))
    axes.legend(ncols=2)
    return figure


@styled
def usage(result: dict[str, Any]) -> Figure | None:
    """Tokens per expert and layer."""
    shares = result["usage"]
    figure = Figure(figsize=(7, 0.6 + 0.28 * len(shares)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, vmin=0, cmap="Blues", aspect="auto")
    axes.set(xlabel="expert", ylabel="layer", xticks=range(len(shares[0])), yticks=range(len(shares)))
    figure.colorbar(image, ax=axes)
    return figure
