"""Private names of other libraries: what the benchmarks say where one is gone."""

from __future__ import annotations

import pytest

from benchmarks.compat import answers_of
from freemoe.core.errors import VersionError


def test_a_scorer_without_the_name() -> None:
    with pytest.raises(VersionError, match=r"has no object\._loglikelihood_tokens"):
        answers_of(object(), [])
