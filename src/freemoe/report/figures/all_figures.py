"""All figures of a report, in their order: each a function of the result that gives a figure, or None without data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from freemoe.report.figures.candidate_figures import bands, candidate_boxes, improved_per_band
from freemoe.report.figures.drawing import NARROW, WIDE, to_svg
from freemoe.report.figures.gain_figures import gains, improvement, radar
from freemoe.report.figures.inside_figures import purification, where_off
from freemoe.report.figures.router_figures import confidence, confusion
from freemoe.report.figures.unit_figures import unit_curve

__all__ = [
    "FIGURES",
    "Drawn",
    "Picture",
    "bands",
    "candidate_boxes",
    "confidence",
    "confusion",
    "drawn",
    "gains",
    "improved_per_band",
    "improvement",
    "purification",
    "radar",
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
        draw: Result and width -> figure, or None when the result has nothing for it.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[dict[str, Any], float], Figure | None]


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
        "Score in per cent: along each spoke, or, where there are fewer than three or no room, as bars. Further out is better. Text "
        "domains are not in it.",
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
        "Above zero: subdomains whose score is higher (perplexity lower) than the base's with that band off; hollow, below "
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
        "Confidence on the reported documents. The threshold was set on reference documents. And how often a route of "
        "that confidence was right; on the line, confidence is the chance to be right. Larger dots: more documents.",
        confidence,
    ),
)


@dataclass(frozen=True)
class Drawn:
    """A picture as it stands in a page: drawn once for a screen and once for a phone.

    Attributes:
        name: Its anchor.
        title: Heading.
        caption: What to see in it.
        wide: SVG.
        narrow: SVG.
    """

    name: str
    title: str
    caption: str
    wide: str
    narrow: str


def drawn(pictures: Sequence[Picture], result: dict[str, Any]) -> Iterator[Drawn]:
    """Those pictures that the result has data for, as inline SVG."""
    for picture in pictures:
        figures = [picture.draw(result, width) for width in (WIDE, NARROW)]
        if figures[0] is not None and figures[1] is not None:
            told = (picture.title, picture.caption)
            wide, narrow = (to_svg(f, f"{picture.name}-{n}", *told) for n, f in zip("wn", figures, strict=True))  # pyright: ignore[reportArgumentType]
            yield Drawn(picture.name, *told, wide, narrow)
