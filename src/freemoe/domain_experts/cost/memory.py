"""Peak memory of a build's stages above the loaded base, by arithmetic: from shapes alone, so also for models that are not there.

The few factors were measured on Llama shapes of 0.3 to 1.1 G parameters in bf16 (``python -m benchmarks memory``, `docs/hardware.md`).

Shapes: E fused experts (1 for a plain linear), R rows (outputs), C columns (inputs).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freemoe.domain_experts.purify.activations import max_activation_bytes
from freemoe.domain_experts.purify.running_sums import state_bytes
from freemoe.evals.engine.output_head import CHUNK
from freemoe.models.weights import WeightMatrix

STAGES = ("scoring", "calibration", "band search", "greedy", "learned", "report")
"""What can be the largest moment of a build."""

FITTED = ("greedy", "learned")
"""Those of them that fit a candidate: the ways of signed purification."""

DEVICES = (8, 16, 24, 48, 80)
"""Sizes of accelerators in GiB."""

# A layer's working set, as a part of the inputs and outputs of all its matrices.
_WORKING = 0.92
# What autograd keeps of a layer, likewise.
_KEPT = 1.1
# Bytes per logit of a chunk besides the head's own: fp32 logits and their softmax; with gradients, these too.
_LOGIT, _LOGIT_BACKWARD = 8, 16
# Bytes per weight of the largest matrix while it is ranked: by a band, and by gradient, curvature and uncertainty.
_RANKED, _SCORED = 16, 34
# Of a device, what its driver, libraries and the allocator's rounding take.
_SPARE = 0.1
# What `greedy` and `learned` may take per candidate, and learned switches' candidates (specification).
_CANDIDATE, _CANDIDATES = 12, 0.1


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes of a stage above the base."""

    expected: float  # What a stage is expected to take
    most: float  # What it may take (`docs/hardware.md`)


def stage_peaks(
    model: Any, weights: Sequence[WeightMatrix], tokens: int, width: float, budget: float, cut: float = 5e-5
) -> dict[str, MemoryPeaks]:
    """Peaks of all stages above the loaded base.

    ``tokens`` are of a batch; ``width`` is the share of the weights that a band has off, ``budget`` what learned switches
    have off at most, ``cut`` what a round of greedy purification switches off.
    """
    each = weights[0].parameter.element_size()
    size, largest = sum(w.size for w in weights), max(w.size for w in weights)
    vocabulary = model.config.get_text_config().vocab_size
    rows = min(tokens, max(1, CHUNK // vocabulary)) * vocabulary
    # Numbers that a token brings into a layer's weights and takes out of them.
    through: Counter[int] = Counter()
    for w in weights:
        experts = w.gate.experts_per_token if w.is_fused and w.gate is not None else w.num_experts
        through[w.layer] += experts * (w.num_rows + w.num_columns)
    hidden = tokens * each * min(w.num_columns for w in weights)
    forward = _WORKING * each * tokens * max(through.values())
    scoring = max(forward, hidden + rows * (each + _LOGIT))
    kept = min(_KEPT * each * tokens * sum(through.values()), max_activation_bytes(model))
    head = rows * (2 * each + _LOGIT_BACKWARD)
    # The head's turn is over when the first matrix is ranked.
    backward = kept + max(head, _SCORED * largest)
    off = min(1 / 8, 2 * width) * size
    search = max(scoring, _RANKED * largest) + off + width * each * size
    # As `purify.greedy` spreads its leaders: 256 times a cut's share, place and score each.
    leaders = min(1.0, 256 * cut) * size
    state = 3 * sum(state_bytes(w.shape) for w in weights)
    switched = budget * size * (6 + each + 2)
    return {
        "scoring": MemoryPeaks(scoring, scoring + size / 8),
        "calibration": MemoryPeaks(forward, scoring + size / 8),
        "band search": MemoryPeaks(search, scoring + size / 4 + _RANKED * largest),
        "greedy": MemoryPeaks(backward + 6 * leaders, kept + head + each * largest + _CANDIDATE * leaders),
        "learned": MemoryPeaks(backward + state + switched, kept + head + _CANDIDATE * _CANDIDATES * size),
        "report": MemoryPeaks(search + off, scoring + size / 4 + _RANKED * largest),
    }


def fitting_devices(total: float) -> str:
    """On how many accelerators of which size so many bytes fit, in words."""
    usable = [gib * (1 - _SPARE) * 2**30 for gib in DEVICES]
    for gib, bytes_ in zip(DEVICES, usable, strict=True):
        if total <= bytes_:
            return f"1 device of {gib} GiB"
    return f"{math.ceil(total / usable[-1])} devices of {DEVICES[-1]} GiB"
