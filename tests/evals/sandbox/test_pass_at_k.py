import pytest

from freemoe.evals.sandbox.runner import pass_at_k, passed_at


def test_pass_at_k():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    # Chen et al. 2021 as a product: 1 - prod (1 - k / i).
    product = 1.0
    for i in range(20 - 4 + 1, 21):
        product *= 1 - 5 / i
    assert pass_at_k(20, 4, 5) == pytest.approx(1 - product)
    assert pass_at_k(5, 1, 5) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    # Whether one of the first k passed, as the papers' Eq. 12 counts.
    assert [passed_at([False, True, False, False], k, "first") for k in (1, 2, 4)] == [0.0, 1.0, 1.0]
    assert passed_at([False, True, False, False], 2) == pytest.approx(1 - 3 / 6)
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(3, 4, 1)
