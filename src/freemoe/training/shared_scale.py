"""AdamW, and for chosen tensors an Adam that divides by one number for the whole tensor instead of one per entry.

Adam moves every entry by about its rate, however small its gradient. Where entries are logits of hard choices, those whose
gradient is mere noise then flip to and fro as fast as those that matter move. With one scale per tensor (as in Adam-mini, Zhang
et al. 2024) an entry moves in proportion to its own gradient, and by the rate at most: a few entries have gradients many times
the others'.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_SQUARES = 0.99


class SharedScaleAdamW(torch.optim.AdamW):
    """AdamW whose groups may have ``shared=True``: one scale per tensor, no weight decay."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step as `torch.optim.AdamW.step` does, with one scale per tensor of shared groups."""
        groups = self.param_groups
        # AdamW itself does the others, to the bit.
        self.param_groups = [group for group in groups if not group.get("shared")]
        try:
            loss = super().step(closure)  # pyright: ignore[reportArgumentType]
        finally:
            self.param_groups = groups
        for group in groups:
            if group.get("shared"):
                for p in group["params"]:
                    if p.grad is not None:
                        self._update_tensor(p, p.grad, group["lr"], group["betas"][0])
        return loss

    def _update_tensor(self, p: Tensor, grad: Tensor, rate: float, momentum: float) -> None:
        state = self.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), square=p.new_zeros(()))
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - momentum)
        # The mean over entries of Adam's second moments.
        state["square"].lerp_(grad.square().mean(), 1 - _SQUARES)
        steps = float(state["step"])
        scale = (state["square"] / (1 - _SQUARES**steps)).sqrt() + 1e-12
        p.sub_((state["exp_avg"] / (scale * (1 - momentum**steps))).clamp(-1, 1) * rate)
