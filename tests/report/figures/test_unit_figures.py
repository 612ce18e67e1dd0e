"""The curve of structured purification."""

import numpy as np
import pytest

from freemoe.domain_experts.figures.unit_figures import unit_curve
from freemoe.domain_experts.prove.card import unit_lines
from tests.report.synthetic import make_domain, make_result, typed


def result(text):
    return make_result([make_domain("wiki", ("saliency",), text=text)])


@pytest.mark.parametrize("text", [True, False])
def test_the_curve_starts_at_the_base_and_passes_through_every_share(text):
    figure = unit_curve(typed(result(text)))
    assert figure is not None
    (axes,) = figure.axes
    points = axes.lines[1].get_xydata()
    wanted = [[0.0, 1.0 if text else 0.0], [10.0, 0.9], [20.0, 0.8], [30.0, 1.2]]
    assert np.array_equal(np.asarray(points), wanted)
    assert len(axes.lines) == 4


def test_nothing_is_drawn_without_units():
    bare = result(False)
    del bare["domains"][0]["subdomains"][0]["units"]
    assert unit_curve(typed(bare)) is None


def test_words_name_share_rivals_and_speed():
    units = result(True)["domains"][0]["subdomains"][0]["units"]
    text = "\n".join(unit_lines("wiki/all", units))
    assert "20 of 100 neurons off (20.0%) (the candidate): held out perplexity x 0.800 [0.75, 0.85]" in text
    assert "wanda x 1.000, random x 1.200" in text
    assert "largest share off shown to have a loss below 1 nats per token on 90 selection documents" in text
    assert "20.0%; held out perplexity x 0.800 [0.75, 0.85]" in text
    assert "80.0% of the parameters, prefill x 1.50, decode x 1.20" in text
    assert "no share tried is shown to have a loss below 1" in "\n".join(
        unit_lines("a", {**units, "largest_share": 0.0})
    )
    assert "not cut out: because" in "\n".join(unit_lines("a", {**units, "cut": {"cannot": "because"}}))
