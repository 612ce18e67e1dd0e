"""All figures of a build's report, in their order."""

from __future__ import annotations

from freemoe.domain_experts.figures.candidate_figures import band_sweep, candidate_boxes, improved_per_band
from freemoe.domain_experts.figures.inside_figures import purification_curves, where_off
from freemoe.domain_experts.figures.router_figures import router_confidence, router_confusion
from freemoe.domain_experts.figures.score_figures import improvement_bars, score_radar
from freemoe.domain_experts.figures.unit_figures import unit_curve
from freemoe.report.figures.gain_figures import gain_intervals

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
