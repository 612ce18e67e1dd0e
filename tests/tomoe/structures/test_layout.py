"""The order of neurons in memory."""

import itertools

import torch

from freemoe.tomoe.structures.layout import union_order


def count_runs(members):
    """How many groups of neighbouring rows an expert has; ``members``: (u,) bool, in the order of memory."""
    return int((torch.diff(members.int(), prepend=torch.zeros(1).int()) == 1).sum())


def test_order_is_the_union_with_equal_patterns_together():
    experts = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    order = union_order(experts)
    assert sorted(order.tolist()) == experts.any(dim=0).nonzero().flatten().tolist()
    patterns = [tuple(column.tolist()) for column in experts[:, order].T]
    # Each pattern is one block.
    assert len([key for key, _ in itertools.groupby(patterns)]) == len(set(patterns)) == 7


def test_neighbouring_patterns_differ_in_few_experts():
    experts = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0)) < 0.5
    order = union_order(experts)
    found = [count_runs(row[order]) for row in experts]
    # 16 would be perfect: all 255 patterns, each next one differing in one expert, the changes spread evenly.
    assert max(found) <= 40
    assert sum(found) <= 8 * 22
    assert sum(count_runs(row) for row in experts) > 20 * sum(found)


def test_nested_experts_are_one_run_each():
    # Bands that end later and later, in a shuffled order of neurons.
    ends = torch.tensor([10, 20, 30]).unsqueeze(1)
    experts = (torch.arange(40) < ends)[:, torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    order = union_order(experts)
    assert [count_runs(row[order]) for row in experts] == [1, 1, 1]
