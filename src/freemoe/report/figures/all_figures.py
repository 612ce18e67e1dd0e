"""All figures of a build's report, in their order."""

from __future__ import annotations

from freemoe.report.figures.candidate_figures import bands, candidate_boxes, improved_per_band
from freemoe.report.figures.gain_figures import gains, improvement, radar
from freemoe.report.figures.inside_figures import purification, where_off
from freemoe.report.figures.router_figures import confidence, confusion
from freemoe.report.figures.unit_figures import unit_curve

FIGURES = (
    gains,
    improvement,
    radar,
    unit_curve,
    bands,
    candidate_boxes,
    improved_per_band,
    where_off,
    purification,
    confusion,
    confidence,
)
