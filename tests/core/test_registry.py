"""The registry: names in their order, near misses, no name twice."""

from __future__ import annotations

import pytest

from freemoe.core.errors import UnknownNameError
from freemoe.core.registry import Registry, unknown_name


@pytest.fixture
def registry() -> Registry[int]:
    found: Registry[int] = Registry("metric")
    found.add("wanda", 1, "first")
    found.add("magnitude", 2, "second")
    return found


def test_entries_come_back_in_order(registry: Registry[int]) -> None:
    assert registry.names() == list(registry) == ["wanda", "magnitude"]
    assert [registry.get(n) for n in registry] == [1, 2]
    assert registry.about("magnitude") == "second"
    assert "wanda" in registry
    assert "random" not in registry


def test_add_returns_what_it_was_given(registry: Registry[int]) -> None:
    assert registry.add("random", 3, "third") == 3


def test_a_name_is_taken_once(registry: Registry[int]) -> None:
    with pytest.raises(ValueError, match="metric 'wanda' is registered twice"):
        registry.add("wanda", 9, "again")
    assert registry.get("wanda") == 1
    assert registry.about("wanda") == "first"


def test_a_near_miss_is_suggested(registry: Registry[int]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.get("wandda")
    assert str(caught.value) == "Unknown metric 'wandda'. Did you mean 'wanda'? Known: wanda, magnitude."


def test_a_far_miss_lists_all_names(registry: Registry[int]) -> None:
    with pytest.raises(UnknownNameError) as caught:
        registry.get("zzz")
    assert str(caught.value) == "Unknown metric 'zzz'. Known: wanda, magnitude."


def test_advice_and_an_empty_list() -> None:
    assert str(unknown_name("task", "x", [], "Write FILE.jsonl.")) == "Unknown task 'x'. Known: none. Write FILE.jsonl."


def test_a_name_that_is_no_text() -> None:
    assert "Unknown metric 5." in str(unknown_name("metric", 5, ["wanda"]))  # type: ignore[arg-type]
