"""The router's pictures show the result's own numbers."""

import pytest

from freemoe.domain_experts.figures.router_figures import router_confidence
from tests.report.synthetic import make_result, typed


def test_reliability_is_drawn_by_tenths_of_confidence():
    result = make_result()
    documents = [d for domain in result["domains"] for d in domain["documents"]]
    for i, d in enumerate(documents):
        sure = i % 4
        d["confidence"] = (0.72, 0.78, 1.0, 0.05)[sure]
        d["router_saw"] = d["subdomain"] if sure in (0, 2) else "another"
    figure = router_confidence(typed(result))
    dots = figure.axes[1].collections[0].get_offsets().tolist()
    counts = [sum(i % 4 == k for i in range(len(documents))) for k in range(4)]
    seventies = counts[0] + counts[1]
    expected = {((0.72 * counts[0] + 0.78 * counts[1]) / seventies, counts[0] / seventies), (1.0, 1.0), (0.05, 0.0)}
    assert sorted(map(tuple, dots)) == [pytest.approx(point) for point in sorted(expected)]
    areas = figure.axes[1].collections[0].get_sizes().tolist()
    assert areas.index(max(areas)) == 0
