"""A name that another package lacks is an error that says which release is installed, and which are tried."""

import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from freemoe.compat.names import TRIED, attribute_of, missing_name_error, name_of
from freemoe.core.errors import VersionError

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


@pytest.mark.parametrize(
    "path", ["transformers:NoSuchName", "transformers.no_such_module:Name", "transformers.no_such"]
)
def test_a_missing_name_says_release_and_cure(path):
    with pytest.raises(VersionError) as caught:
        name_of("transformers", path, "test it")
    assert str(caught.value) == (
        f"transformers {metadata.version('transformers')} has no {path.replace(':', '.')}; freemoe needs it to test it, and "
        "is tried with transformers>=5.16,<6. pip install 'transformers>=5.16,<6'"
    )
    assert caught.value.__cause__ is not None


def test_a_missing_attribute_says_whose_it_is():
    assert attribute_of(SimpleNamespace(_here=3), "_here", "peft", "test it") == 3
    with pytest.raises(VersionError, match=r"^peft [\d.]+ has no SimpleNamespace\._gone; freemoe needs it to test it"):
        attribute_of(SimpleNamespace(), "_gone", "peft", "test it")


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr("freemoe.compat.names.package_versions", lambda packages: {})
    expected = r"^lm-eval, which has lm_eval\.x, is not installed; .* tried with lm-eval>=0\.4\.13\."
    with pytest.raises(VersionError, match=expected):
        raise missing_name_error("lm-eval", "lm_eval.x", "test it")


def test_releases_that_are_tried_are_those_that_are_asked_for():
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *(r for rs in project["optional-dependencies"].values() for r in rs)]
    for package, releases in TRIED.items():
        assert f"{package}{releases}" in asked
