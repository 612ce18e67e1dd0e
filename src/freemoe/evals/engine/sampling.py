"""Sampled continuations that do not depend on how they are batched: each row's random numbers come from its own tokens.

Shapes: B rows, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from freemoe.core.errors import NumericError
from freemoe.evals.engine.row_plan import Ids
from freemoe.recipes import DomainRecipe


@dataclass(frozen=True)
class SamplingConfig:
    """How continuations of prompts are drawn."""

    samples: int = 1  # Continuations of every prompt
    temperature: float = 0.0  # Logits are divided by it; 0 takes the likeliest token
    # The likeliest tokens that together have this probability are drawn from (Holtzman et al. 2020)
    top_p: float = 1.0
    seed: int = 0  # Another seed, other continuations

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    def random_numbers(self, prompt: Ids, sample: int, new: int) -> np.ndarray:
        """One number in [0, 1) for each of ``new`` steps, the same for the same prompt, sample and seed."""
        said = np.asarray([self.seed, sample, *prompt], dtype="<i8").tobytes()
        key = hashlib.blake2b(said, digest_size=16, person=b"freemoe sample").digest()
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little"))).random(new)

    def sample_tokens(self, logits: Tensor, chances: Tensor) -> Tensor:
        """One token of each row.

        ``logits``: ``(B, V)``. ``chances``: ``(B,)``, in [0, 1): at which point of a row's cumulative probability its token
        lies. Gives token ids ``(B,)`` on the logits' device, which is not waited for; of a row with NaN -1, see
        `tokens_to_list`.
        """
        tokens = logits.argmax(-1) if self.is_greedy else self._draw_tokens(logits, chances)
        return tokens.masked_fill(logits.isnan().any(-1), -1)

    def _draw_tokens(self, logits: Tensor, chances: Tensor) -> Tensor:
        # In fp64: the sum over a large vocabulary must not move a boundary.
        wide = logits.to(widest_float(logits.device))
        shares, tokens = (wide / self.temperature).softmax(-1), None
        last = torch.full((len(wide), 1), wide.shape[-1] - 1, device=wide.device)
        if self.top_p < 1:
            shares, tokens = shares.sort(dim=-1, descending=True, stable=True)
            # A token counts while those before it have less than top_p; the likeliest always does.
            last = (shares.cumsum(-1) - shares < self.top_p).sum(-1, keepdim=True) - 1
        total = shares.cumsum(-1)
        point = chances.to(total)[:, None] * total.gather(-1, last)
        place = torch.minimum((total <= point).sum(-1, keepdim=True), last)
        return (place if tokens is None else tokens.gather(-1, place))[:, 0]


def widest_float(device: torch.device) -> torch.dtype:
    """The widest floats that a device has: Apple's has none of 64 bits."""
    return torch.float32 if device.type == "mps" else torch.float64


def tokens_to_list(tokens: Tensor) -> list[int]:
    """What was picked, for the host.

    Raises:
        NumericError: A logit was NaN: no token is the likeliest.
    """
    found = tokens.tolist()
    if min(found) < 0:
        raise NumericError(
            "The next token's logits are NaN. The base model or its dtype is broken for this text; try --dtype float32, and "
            "check the checkpoint."
        )
    return found


GREEDY = SamplingConfig()  # The likeliest token, once


def sampling_of(recipe: DomainRecipe) -> SamplingConfig:
    """How a recipe has programs written."""
    data = recipe.data
    count = data.samples or data.pass_at
    usual = 0.8 if count > 1 else 0.0
    return SamplingConfig(count, usual if data.temperature is None else data.temperature, data.top_p, recipe.seed or 0)
