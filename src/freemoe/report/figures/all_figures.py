"""All figures of a build's report, in their order."""

from __future__ import annotations

from freemoe.report.figures.candidate_figures import band_sweep, candidate_boxes, improved_per_band
from freemoe.report.figures.gain_figures import gain_intervals, improvement_bars, score_radar
from freemoe.report.figures.inside_figures import purification_curves, where_off
from freemoe.report.figures.router_figures import router_confidence, router_confusion
from freemoe.report.figures.unit_figures import unit_curve

FIGURES = (
    gain_intervals,
    improvement_bars,
    score_radar,
    unit_curve,
    band_sweep,
    candidate_boxes,
    improved_per_band,
    where_off,
    purification_curves,
    router_confusion,
    router_confidence,
)
