"""Units that `python -m benchmarks scale` hands out."""

from __future__ import annotations

import functools
from typing import Any

import torch

from freemoe.assets import BUNDLED
from freemoe.models.checkpoints.loading import load_base


def nothing() -> None:
    """What takes no time: all that is left is what handing it out costs."""


def score(documents: int, length: int, times: int) -> list[float]:
    """Sums of log-likelihoods of made-up documents, each of so many tokens, under the bundled model, which is loaded once."""
    model = _bundled()
    vocabulary = model.config.vocab_size
    ids = torch.tensor([[(7 * n + 3 * i) % vocabulary for i in range(length)] for n in range(documents)])
    with torch.inference_mode():
        for _ in range(times):
            scores = model(ids[:, :-1]).logits.log_softmax(-1).gather(2, ids[:, 1:, None]).sum((1, 2))
    return scores.tolist()


@functools.cache
def _bundled() -> Any:
    return load_base(BUNDLED, device="cpu")[0]
