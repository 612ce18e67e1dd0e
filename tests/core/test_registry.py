"""The registry: names in their order, near misses, no name twice."""

import pytest

from freemoe.core.errors import UnknownNameError
from freemoe.core.registry import Registry, unknown_name


@pytest.fixture
def registry():
    found = Registry("metric")
    found.add("wanda", 1, "first")
    found.add("magnitude", 2, "second")
    return found


def test_entries_come_back_in_order(registry):
    assert registry.names() == list(registry) == ["wanda", "magnitude"]
    assert [registry.get(n) for n in registry] == [1, 2]
    assert registry.about("magnitude") == "second"
    assert "wanda" in registry
    assert "random" not in registry


def test_a_name_is_taken_once(registry):
    with pytest.raises(ValueError, match="metric 'wanda' is registered twice"):
        registry.add("wanda", 9, "again")
    assert registry.get("wanda") == 1
    assert registry.about("wanda") == "first"


@pytest.mark.parametrize(("name", "hint"), [("wandda", "Did you mean 'wanda'? "), ("zzz", "")])
def test_a_miss_lists_all_names(registry, name, hint):
    with pytest.raises(UnknownNameError) as caught:
        registry.get(name)
    assert str(caught.value) == f"Unknown metric {name!r}. {hint}Known: wanda, magnitude."


def test_advice_an_empty_list_and_a_name_that_is_no_text():
    assert str(unknown_name("task", "x", [], "Write FILE.jsonl.")) == "Unknown task 'x'. Known: none. Write FILE.jsonl."
    assert "Unknown metric 5." in str(unknown_name("metric", 5, ["wanda"]))  # type: ignore[arg-type]
