"""The exponential mean of what is trained: where steps flip choices to and fro, their mean stands still."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from freemoe.training.states import State, copy_into_parameters, pack_state, unpack_state


@dataclass(eq=False)
class ParameterMean:
    """The mean of parameters over the last steps, in their own precision.

    How far back it looks grows with the steps: a fixed decay either remembers the start of a short training or only the
    end of a long one.
    """

    parameters: Mapping[str, nn.Parameter]  # What is trained
    window: float  # Share of the steps so far that it looks back on; zero: the last step alone
    steps: int = 0  # That were taken note of
    values: dict[str, Tensor] = field(default_factory=dict)  # The mean

    @torch.no_grad()
    def update_mean(self) -> None:
        """Take note of the parameters after a step."""
        self.steps += 1
        if not self.values:
            self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
            return
        # How much of the mean so far stays: never more than its steps bear, so nothing of zero is in it.
        decay = 1 - 1 / max(1.0, self.window * self.steps)
        for name, p in self.parameters.items():
            self.values[name].lerp_(p, 1 - decay)

    @contextmanager
    def use_mean(self) -> Iterator[None]:
        """While open, the parameters are the mean; afterwards what they were, to the bit."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            if self.values:
                copy_into_parameters(self.parameters, self.values)
            yield
        finally:
            copy_into_parameters(self.parameters, own)

    def to_state(self) -> State:
        """As a part of a state."""
        return {**pack_state("mean", self.values), "mean steps": torch.tensor(self.steps)}

    def load_state(self, state: State) -> None:
        """Go on from a state."""
        # The next step writes into what was loaded, which came from a file to the host.
        self.values = {
            name: t.to(self.parameters[name].device, copy=True) for name, t in unpack_state("mean", state).items()
        }
        self.steps = int(state["mean steps"])
