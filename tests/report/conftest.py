"""The pages of the four commands, rendered once."""

from __future__ import annotations

import pytest

from tests.report.family import FAMILY


@pytest.fixture(scope="session")
def pages() -> dict[str, str]:
    """Command -> HTML."""
    return {name: page(make()) for name, (make, page) in FAMILY.items()}
