"""The page of a converted model: what it costs and what it keeps, and how training went. Reads result JSON only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from freemoe.evals.held_out import record_text
from freemoe.report.figures.drawing import PALETTE, styled
from freemoe.report.page import plain_page, write_page
from freemoe.tomoe.card import headlines, rows


def write_conversion_report(folder: str | Path) -> Path:
    """Read a converted model's ``result.json`` and write ``report.html`` beside it."""
    return write_page(folder, page)


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    length = result["blocks"]["length"]
    return plain_page(
        f"{result['base']['name']} as a mixture of experts",
        ["on test text", "active", f"perplexity@{length}", "next-token accuracy"],
        [
            [name, f"{100 * active:.1f} %", f"{perplexity:.3f}", f"{100 * accuracy:.2f} %"]
            for name, active, perplexity, accuracy in rows(result)
        ],
        [*headlines(result)[-1:], record_text(result.get("seen"))],
        (
            ("Training: divergence from the dense model, and the active share.", curves(result)),
            ("Width of every layer's parts, as a share of the dense model's.", widths(result)),
            ("Share of the held-out tokens that each expert gets; even is one over their number.", usage(result)),
        ),
        result["recipe"],
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
