"""Tests of this folder need an accelerator: a real one (`make gpu`) or the pretended one (`make hardening`)."""

import pytest


@pytest.fixture(autouse=True)
def _there_is_one(accelerator):
    """Skip all where torch sees none."""


@pytest.fixture
def pretend_accelerator(accelerator):
    """`tests.pretend_accelerator`, for what is counted and for two devices; skipped on others."""
    if not accelerator.startswith("pretend"):
        pytest.skip("shown on the pretended accelerator alone (FREEMOE_TEST_DEVICE=pretend)")
    from tests import pretend_accelerator as module

    return module
