"""The project does not grow unnoticed, and what says so counts rightly."""

import ast

import pytest

from scripts.size import CEILINGS, arguments, called_once, measure, one_word


def test_nothing_is_above_its_ceiling():
    found = measure()
    assert list(found) == list(CEILINGS)
    over = {name: value for name, value in found.items() if value > CEILINGS[name][0] + 0.5}
    assert not over, "make something simpler, and see make size"


@pytest.mark.parametrize(
    ("names", "share"),
    [(["Row", "load_domain"], 50), (["_row", "__init__", "LayerPlan"], 50), (["HTTP", "top2"], 100), (["LoRA"], 0)],
)
def test_names_of_one_word(names, share):
    assert one_word(names) == share


def test_arguments_and_helpers_called_once():
    module = ast.parse(
        "def f(self, a, /, b, *args, c=1, **more): _once(_twice, _twice)\ndef _once(): ...\ndef _twice(): ..."
    )
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert arguments(function) == 3
    assert called_once(module) == 1
