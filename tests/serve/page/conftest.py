"""One browser for the whole folder; a server of its own for each test, so that nothing is remembered from another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chromium import NAMES, Browser, browser, find
from tests.serve.page.stand_in import StandIn, standing_in


@pytest.fixture(scope="package")
def tab() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip(f"no chromium on this machine (looked for {', '.join(NAMES)})")
    with browser(program) as found:
        yield found


@pytest.fixture
def server() -> Iterator[StandIn]:
    with standing_in(StandIn()) as found:
        yield found
