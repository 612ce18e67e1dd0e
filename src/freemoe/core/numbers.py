"""Numbers, percentages and byte counts as text for people."""

from __future__ import annotations


def format_decimals(value: float, places: int) -> str:
    """A number with so many decimals, or with two significant digits where those decimals would show less.

    A ratio of 0.0004 is not "0.000", and a share of 0.00012 is not "0.0 %".
    """
    small = 0 < abs(value) < 10.0**-places
    return f"{value:.2g}" if small else f"{value:.{places}f}"


def format_percent(share: float) -> str:
    """A share in per cent, ``12.3%``; see `format_decimals`."""
    return f"{format_decimals(100 * share, 1)}%"


def format_bytes(count: float) -> str:
    """Bytes in a unit that people read."""
    for size, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:,.1f} {name}"
    return f"{count:,.0f} bytes"
