"""The page of a converted model: what it costs and what it keeps, and how training went. Reads result JSON only."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from freemoe.report.figures.drawing import (
    WIDE,
    draw_heatmap,
    drawable_name,
    is_narrow,
    legend_above,
    new_figure,
    ratio_ticks,
    report_figure,
    row_axis,
)
from freemoe.report.page import (
    PageTable,
    ReportPage,
    TableGroup,
    common_facts,
    format_size,
    intervals_text,
    provenance_line,
    record_line,
    render_page,
)
from freemoe.report.palette import BASE, EXPERT, INK, RIVAL, SOFT
from freemoe.report.reading import format_number
from freemoe.report.tables import plain_table
from freemoe.tomoe.card import headlines, score_rows, score_table, verdict
from freemoe.tomoe.result import ConvertResult

_READINGS = (
    ("dense model", "base", "The base as it came: every weight is used for every token."),
    (
        "converted",
        "expert",
        "This artefact: a router gives every token one expert of each layer. Its weights are the base's, none was changed; what was "
        "trained is which of them an expert has, and the router.",
    ),
    (
        "static pruning",
        "rival",
        "As many weights left, the same for every token, chosen by a rule and not trained: by magnitude, or by activation times "
        "weight. Of every rule, the variant that held-out text chose.",
    ),
    (
        "activation-statistics split",
        "rival",
        "Experts of the same size made from activation statistics, with a router that is not trained either.",
    ),
)


def tables(result: ConvertResult) -> tuple[list[Any], list[str]]:
    """Tables for the terminal, and lines below them."""
    return [plain_table(*score_table(result))], headlines(result)


def page(result: ConvertResult) -> str:
    """The page of a result."""
    length, blocks = result.blocks.length, result.blocks
    header, cells = score_table(result)
    scored = [(role_of(name), row) for name, row in zip(result.scores, cells, strict=True)]
    present = {role_of(name) for name in result.scores}
    return render_page(
        ReportPage(
            title=f"{result.base.name} as a mixture of experts",
            about=provenance_line(result, "every token uses a part of the weights, and none was changed"),
            verdict=verdict(result),
            findings=[("fact", line.replace("->", "→")) for line in headlines(result)[1:]],
            heading="Figures on test text",
            table=PageTable(
                f"{blocks.test:,} tokens of text that neither trained nor chose anything, in contexts of at most {length} tokens.",
                header,
                [TableGroup(scored)],
                (1, 2, 3),
            ),
            reading="Perplexity: less is better. Active: the share of the weights of the decoder's linears that one token uses. The "
            f"verdict's ratios are of perplexities on the same text, with {intervals_text(len(set(blocks.test_groups or ())))}",
            readings=[r for r in _READINGS if r[1] in present],
            pictures=(perplexity_figure, gate_training_curves, kept_widths, usage_heatmap),
            splits=[
                f"The text was divided by content: {blocks.train:,} tokens trained, {blocks.held_out:,} settled what training left "
                f"open, {blocks.test:,} are reported.",
                record_line(result.seen),
            ],
            facts=[
                ("base", result.base.name),
                ("base fingerprint", result.base.fingerprint),
                ("base layout", result.base.model_type),
                *common_facts(result),
                *([("model on disk", format_size(result.cost.model_bytes))] if result.cost.model_bytes else []),
            ],
        ),
        result,
    )


def role_of(name: str) -> str:
    """What a row of the scores is."""
    return {"dense": "base", "converted": "expert"}.get(name, "rival")


@report_figure("figures", "Perplexity of every row", "On test text, on a logarithmic axis; further left is better.")
def perplexity_figure(result: ConvertResult, width: float = WIDE) -> Figure | None:
    """Perplexity of every row, on a logarithmic axis."""
    scored = [
        (name, shown, perplexity)
        for name, (shown, _, perplexity, _) in zip(result.scores, score_rows(result), strict=True)
    ]
    narrow = is_narrow(width)
    figure = new_figure(min(width, 8.0), 0.8 + 0.34 * len(scored))
    axes = figure.subplots()
    axes.set_xscale("log")
    lows, highs = min(v for *_, v in scored), max(v for *_, v in scored)
    room = max(1.3, (highs / lows) ** 0.25)
    axes.set_xlim(lows / room**0.4, highs * room)
    for y, (name, _, value) in enumerate(scored):
        own = {"base": BASE, "expert": EXPERT}.get(role_of(name), RIVAL)
        axes.plot([axes.get_xlim()[0], value], [y, y], color=own, lw=1.2)
        axes.plot([value], [y], color=own, marker={"base": "|", "expert": "o"}.get(role_of(name), "v"), markersize=7)
        axes.annotate(
            format_number(value), (value, y), (8, 0), "data", "offset points", va="center", fontsize=8, color=SOFT
        )
    row_axis(axes, [drawable_name(shown, 18 if narrow else 40) for _, shown, _ in scored])
    axes.set_xlabel("perplexity, logarithmic" if narrow else "perplexity (logarithmic; left is better)")
    ratio_ticks(axes.xaxis, *axes.get_xlim(), most=4 if narrow else 8)
    return figure


@report_figure(
    "training",
    "Training",
    "Divergence from the dense model on the text of each step, and the active share beside the wanted one.",
)
def gate_training_curves(result: ConvertResult, width: float = WIDE) -> Figure | None:
    """Loss and active share over the steps; None where nothing was trained."""
    history = result.history
    if not history["rows"]:
        return None
    column = {name: [row[i] for row in history["rows"]] for i, name in enumerate(history["columns"])}
    narrow = is_narrow(width)
    figure = new_figure(min(width, 9.0), 5.0 if narrow else 2.8)
    left, right = figure.subplots(2, 1) if narrow else figure.subplots(1, 2)
    left.plot(column["distillation"], color=EXPERT, linewidth=1, label="training text")
    left.set(xlabel="step", ylabel="KL to the dense model, nats")
    right.plot(column["active"], color=EXPERT, label="active")
    right.plot(column["target"], color=INK, linestyle=":", label="wanted")
    right.set(xlabel="step", ylabel="active share", ylim=(0, 1.02))
    right.legend()
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid()
    return figure


@report_figure("widths", "What every layer keeps", "Width of a layer's parts, as a share of the dense model's.")
def kept_widths(result: ConvertResult, width: float = WIDE) -> Figure | None:
    """Figure of the share of each width that a layer keeps; None where there is none to draw."""
    layers = result.layers
    narrow = is_narrow(width)
    figure = new_figure(min(width, 9.0), 3.2 if narrow else 2.8)
    axes = figure.subplots()
    parts = (
        ("queries and keys", [layer.query_dims / layer.head_dim for layer in layers], SOFT, "-"),
        ("values", [layer.value_dims / layer.head_dim for layer in layers], SOFT, "--"),
        ("an expert's neurons", [max(layer.widths) / layer.width for layer in layers], EXPERT, "-"),
        ("some expert's neurons", [layer.union / layer.width for layer in layers], EXPERT, "--"),
    )
    looks = []
    for n, (name, values, own, dashes) in enumerate(parts):
        look = {"color": own, "ls": dashes, "marker": "osd^"[n], "markersize": 4, "lw": 1.3}
        axes.plot(range(len(layers)), values, **look)
        looks.append(Line2D([], [], label=name, **look))
    axes.set(xlabel="layer", ylabel="share kept", ylim=(0, 1.05))
    axes.xaxis.set_major_locator(MaxNLocator(6 if narrow else 12, integer=True))
    axes.grid()
    legend_above(figure, looks, 4)
    return figure


@report_figure(
    "usage",
    "Which experts are used",
    "Per cent of the held-out tokens of a layer that each expert gets; even is one hundred over their number.",
)
def usage_heatmap(result: ConvertResult, width: float = WIDE) -> Figure | None:
    """Tokens per expert and layer."""
    shares = result.usage
    figure = new_figure(min(width, 8.0), 0.7 + 0.3 * len(shares))
    axes = figure.subplots()
    legible = len(shares[0]) <= (8 if is_narrow(width) else 20)
    top = max(max(row) for row in shares)
    draw_heatmap(axes, shares, top, "expert", (lambda y, x: f"{100 * shares[y][x]:.0f}") if legible else None)
    axes.set_xticks([i + 0.5 for i in range(len(shares[0]))], [str(i) for i in range(len(shares[0]))])
    axes.set_yticks([i + 0.5 for i in range(len(shares))], [str(i) for i in range(len(shares))])
    axes.set(xlabel="expert", ylabel="layer")
    axes.invert_yaxis()
    return figure
