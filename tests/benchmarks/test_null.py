"""The null benchmark: its draws have no gain, its rival test is what it says, and a run that was cut goes on."""

import json
import math
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks import null
from benchmarks.harness import Settings


@pytest.mark.parametrize("shape", null.SHAPES)
def test_null_differences_have_mean_zero(shape):
    drawn = null.differences(shape, np.random.default_rng(0), 400_000)
    assert abs(drawn.mean()) < 5 * drawn.std() / math.sqrt(len(drawn))


def test_a_build_of_gains_is_accepted_and_one_of_nothing_is_not():
    nothing = np.zeros((40, 3))
    gains = nothing.copy()
    gains[:30, 1] = 1.0
    assert null.accepts([nothing, gains], 0)
    assert not null.accepts([nothing, nothing], 0)


def test_the_earlier_test_by_hand():
    gains = np.zeros((20, 2))
    gains[:, 1] = 1.0
    # Both halves pick the second candidate: twenty won, none lost.
    assert null.two_folds(gains, 0) == pytest.approx(0.5**20)


def test_a_run_that_was_cut_goes_on(tmp_path):
    measure = Mock(return_value=1)
    settings = Settings(cells=tmp_path)
    assert null.kept(settings, "x", 5, 2, measure) == (3, 5)
    assert null.kept(settings, "x", 9, 4, measure) == (4, 9)
    assert [call.args for call in measure.call_args_list] == [(0, 2), (2, 2), (4, 1), (5, 4)]
    assert json.loads((tmp_path / "null-x-0.json").read_text()) == [9, 4]


def test_a_quick_run_has_every_kind_of_figure(monkeypatch):
    monkeypatch.setattr(null, "null_build", lambda seed: False)
    monkeypatch.setattr(null, "ACCEPTANCE", null.ACCEPTANCE[:1])
    names = {figure.name for figure in null.run(Settings(quick=True, only="[!c]*")).figures}
    for kind in ("null builds accepted", "power over the earlier test's", "a true loss", "null builds of the bundled"):
        assert any(name.startswith(kind) for name in names), kind
