"""One browser for the whole folder; a server of its own for each test, so that nothing is remembered from another."""

import pytest

from tests.chromium import NAMES, browser, find
from tests.serve.page.stand_in import StandIn, standing_in
from tests.serve.page.using import opened


@pytest.fixture(scope="package")
def tab():
    program = find()
    if program is None:
        pytest.skip(f"no chromium on this machine (looked for {', '.join(NAMES)})")
    with browser(program) as found:
        yield found


@pytest.fixture
def server():
    with standing_in(StandIn()) as found:
        yield found


@pytest.fixture
def page(tab, server):
    """The stand-in's page, opened in the browser."""
    opened(tab, server)
    return tab
