"""What cases are made of, once for all tests."""

import pytest

from tests.hardening.fuzz.material import Material, make_material


@pytest.fixture(scope="package")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"))
