"""Numbers for people: nothing that is not zero is printed as zero."""

import pytest

from freemoe.core.numbers import format_decimals, format_percent


@pytest.mark.parametrize(
    ("value", "places", "expected"),
    [
        (0.249, 3, "0.249"),
        (1.0, 3, "1.000"),
        (0.001, 3, "0.001"),
        (0.00099, 3, "0.00099"),
        (0.000424, 3, "0.00042"),
        (0.0, 3, "0.000"),
        (-0.0004, 3, "-0.0004"),
        (3e-9, 3, "3e-09"),
        (24.961, 2, "24.96"),
        (float("inf"), 2, "inf"),
        (float("nan"), 2, "nan"),
    ],
)
def test_decimals(value, places, expected):
    assert format_decimals(value, places) == expected


def test_percent():
    assert [format_percent(share) for share in (0.5, 0.0004, 0.0, 0.00123)] == ["50.0%", "0.04%", "0.0%", "0.1%"]
