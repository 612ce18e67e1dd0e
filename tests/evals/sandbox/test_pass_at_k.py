import pytest

from freemoe.evals.sandbox.runner import pass_at_k


def test_pass_at_k():
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    # Chen et al. 2021 as a product: 1 - prod (1 - k / i).
    product = 1.0
    for i in range(20 - 4 + 1, 21):
        product *= 1 - 5 / i
    assert pass_at_k(20, 4, 5) == pytest.approx(1 - product)
    assert pass_at_k(5, 1, 5) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(10, 1, 10, unbiased=False) == 1.0
    with pytest.raises(ValueError, match="n = k"):
        pass_at_k(10, 1, 5, unbiased=False)
    with pytest.raises(ValueError, match="needs"):
        pass_at_k(3, 4, 1)
