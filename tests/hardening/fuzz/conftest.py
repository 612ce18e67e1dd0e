"""What cases are made of, once for all tests."""

import pytest

from tests.hardening.fuzz.material import make_material


@pytest.fixture(scope="package")
def material(tmp_path_factory):
    return make_material(tmp_path_factory.mktemp("material"))
