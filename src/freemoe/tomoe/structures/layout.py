"""Where each neuron stands in an exported MLP: an order in which an expert's neurons lie in few contiguous runs.

A run of neighbouring rows is a matrix as it stands; neurons that lie apart have to be gathered first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def union_order(experts: Tensor) -> Tensor:
    """Order the neurons that some expert uses.

    Neurons of equal membership patterns stand together; from each pattern the next one is the nearest that is left (fewest
    experts that begin or end), a greedy walk. From (N, width) bool to (u,) int64, the neuron at each place; those that no
    expert uses are left out.
    """
    used = experts.any(dim=0).nonzero().flatten()
    patterns, own = experts[:, used].T.unique(dim=0, return_inverse=True)
    places = torch.empty(len(patterns), dtype=torch.int64)
    places[_greedy_pattern_order(patterns)] = torch.arange(len(patterns))
    return used[places[own].argsort(stable=True)]


def _greedy_pattern_order(patterns: Tensor) -> Tensor:
    """Order of the patterns (p, N), each next one the nearest left; among equally near ones the first."""
    bits = patterns.float()
    sizes = bits.sum(dim=1)
    # Begin at the edge: the pattern of the fewest experts.
    here = int(sizes.argmin())
    left = torch.ones(len(bits), dtype=torch.bool)
    order = [here]
    for _ in range(len(bits) - 1):
        left[here] = False
        # Patterns that differ in d experts: |a| + |b| - 2 |a and b| = d.
        distance = (sizes - 2 * bits @ bits[here]).masked_fill(~left, torch.inf)
        here = int(distance.argmin())
        order.append(here)
    return torch.tensor(order)
