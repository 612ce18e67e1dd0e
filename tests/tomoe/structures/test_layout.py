"""The order of neurons in memory, and experts of equal widths."""

from __future__ import annotations

import itertools

import pytest
import torch

from freemoe.core.errors import DataError
from freemoe.tomoe.structures.layout import contiguous_runs, equal_widths, union_order
from freemoe.tomoe.structures.structure import LayerStructure


def layer(experts: torch.Tensor) -> LayerStructure:
    count = len(experts)
    return LayerStructure(
        torch.ones(4).bool(), torch.ones(8).bool(), torch.zeros(count, 6), torch.zeros(count), experts
    )


def test_order_is_the_union_with_equal_patterns_together() -> None:
    experts = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    order = union_order(experts)
    assert sorted(order.tolist()) == experts.any(dim=0).nonzero().flatten().tolist()
    patterns = [tuple(column.tolist()) for column in experts[:, order].T]
    # Each pattern is one block.
    assert len([key for key, _ in itertools.groupby(patterns)]) == len(set(patterns)) == 7


def test_neighbouring_patterns_differ_in_few_experts() -> None:
    experts = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0)) < 0.5
    order = union_order(experts)
    found = [len(contiguous_runs(row[order])) for row in experts]
    # 16 would be perfect: all 255 patterns, each next one differing in one expert, the changes spread evenly.
    assert max(found) <= 40
    assert sum(found) <= 8 * 22
    assert sum(len(contiguous_runs(row)) for row in experts) > 20 * sum(found)


def test_nested_experts_are_one_run_each() -> None:
    # Bands that end later and later, in a shuffled order of neurons.
    ends = torch.tensor([10, 20, 30]).unsqueeze(1)
    experts = (torch.arange(40) < ends)[:, torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    order = union_order(experts)
    assert [len(contiguous_runs(row[order])) for row in experts] == [1, 1, 1]


def test_runs() -> None:
    assert contiguous_runs(torch.tensor([1, 1, 0, 1, 0, 0, 1]).bool()) == [(0, 2), (3, 4), (6, 7)]
    assert contiguous_runs(torch.zeros(3).bool()) == []


def test_equal_widths_prefers_what_no_expert_covers() -> None:
    experts = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]).bool()
    scores = torch.tensor([[0.0] * 6, [9.0, 8.0, 7.0, 1.0, 3.0, 2.0]])
    structure = [layer(experts)]
    found = equal_widths(structure, [scores])[0].experts
    assert found[0].tolist() == experts[0].tolist()
    # 8 and 7 are the best scores, but covered already.
    assert found[1].nonzero().flatten().tolist() == [0, 4, 5]
    assert structure[0].experts is experts
    assert experts[1].sum() == 1


def test_equal_widths_falls_back_to_covered_ones_by_score() -> None:
    experts = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1]]).bool()
    found = equal_widths([layer(experts)], [torch.tensor([[0.0] * 4, [1.0, 3.0, 2.0, 0.0]])])[0].experts
    assert found[1].nonzero().flatten().tolist() == [1, 2, 3]


def test_equal_widths_holds_what_was_held() -> None:
    generator = torch.Generator().manual_seed(0)
    structure = [layer(torch.rand(5, 60, generator=generator) < 0.3) for _ in range(3)]
    scores = [torch.rand(5, 60, generator=generator) for _ in structure]
    for before, after in zip(structure, equal_widths(structure, scores), strict=True):
        assert after.neuron_counts == [max(before.neuron_counts)] * 5
        assert bool((after.experts | ~before.experts).all())


@pytest.mark.parametrize("scores", [[], [torch.zeros(2, 3)], [torch.full((2, 4), torch.nan)]])
def test_equal_widths_refuses_other_scores(scores: list[torch.Tensor]) -> None:
    with pytest.raises(DataError, match=r"needed|per layer"):
        equal_widths([layer(torch.ones(2, 4).bool())], scores)
