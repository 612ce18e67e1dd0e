"""All figures of a report, in their order: each a function of the result that gives a figure, or None without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from freemoe.report.figures.candidate_figures import bands, candidate_boxes, improved_per_band
from freemoe.report.figures.drawing import to_svg
from freemoe.report.figures.gain_figures import gains, improvement, radar
from freemoe.report.figures.inside_figures import purification, where_off
from freemoe.report.figures.router_figures import confidence, confusion
from freemoe.report.figures.unit_figures import unit_curve

__all__ = [
    "FIGURES",
    "Picture",
    "bands",
    "candidate_boxes",
    "confidence",
    "confusion",
    "gains",
    "improved_per_band",
    "improvement",
    "purification",
    "radar",
    "svgs",
    "to_svg",
    "unit_curve",
    "where_off",
]


@dataclass(frozen=True)
class Picture:
    """One figure of the page.

    Attributes:
        name: Its anchor, and the prefix of its ids.
        title: Heading.
        caption: What to see in it.
        draw: Result -> figure, or None when the result has nothing for it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[dict[str, Any]], Figure | None]


FIGURES = (
    Picture(
        "gains",
        "Gain over the base",
        "Dots: paired difference to the base on held-out documents; lines: 95 % intervals. Hollow diamonds (oracle) were "
        "selected on these very documents and are not a result.",
        gains,
    ),
    Picture(
        "improvement",
        "Improvement per domain",
        "Paired gain per domain with its 95 % interval; for text, by how many per cent perplexity falls. Up is better.",
        improvement,
    ),
    Picture(
        "radar",
        "Base, expert and routed mixture",
        "Score in per cent along each spoke; further out is better. Text domains have no spoke.",
        radar,
    ),
    Picture(
        "units",
        "How much can go: units off against the held-out figure",
        "Whole units switched off, as many at each share for every ranking. The dashed line is the base; below it perplexity "
        "is better (above it, points). Measured on the reported split; the candidate was chosen by the stopping loss.",
        unit_curve,
    ),
    Picture(
        "bands",
        "Score over the bands of the importance ranking",
        "Each point: the score with that share of the ranking switched off. Measured on the reported split, not used to choose.",
        bands,
    ),
    Picture(
        "boxes",
        "Gains of all candidates",
        "Every candidate of every subdomain (their number in brackets): boxes span the quartiles, whiskers 1.5 times their "
        "distance. Measured on the reported split, not used to choose.",
        candidate_boxes,
    ),
    Picture(
        "improved",
        "Subdomains improved per band",
        "Above zero: subdomains whose score is higher (perplexity lower) than the base's with that band off; pale, below "
        "zero: worse. Differences due to chance count too. Measured on the reported split, not used to choose.",
        improved_per_band,
    ),
    Picture(
        "where",
        "Where the switched-off weights lie",
        "Per cent of the weights of each layer and sublayer that is off. Every panel has its own scale; where the base "
        "stayed, the panel shows the best candidate that was turned down.",
        where_off,
    ),
    Picture(
        "purification",
        "Signed purification, round by round",
        "Loss on reference documents that gave no gradients; the star marks the round that was kept.",
        purification,
    ),
    Picture(
        "confusion",
        "What the router saw",
        "Reported documents by known subdomain (rows) and by the subdomain the router saw (columns); shade: share of the "
        "row. The last column counts the documents on which it abstained.",
        confusion,
    ),
    Picture(
        "confidence",
        "How sure the router was",
        "Confidence on the reported documents. The threshold was set on reference documents. Right: how often a route of "
        "that confidence was right; on the line, confidence is the chance to be right. Larger dots: more documents.",
        confidence,
    ),
)


def svgs(result: dict[str, Any]) -> Iterator[tuple[Picture, str]]:
    """Every figure that the result has data for, as inline SVG."""
    for picture in FIGURES:
        figure = picture.draw(result)
        if figure is not None:
            yield picture, to_svg(figure, picture.name)
