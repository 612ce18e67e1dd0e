"""States of a training as flat dicts of tensors, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.core.errors import NumericError

State = dict[str, Tensor]


def pack_state(part: str, tensors: Mapping[str, Any]) -> State:
    """Copies of tensors and numbers, as a part of a state: each is called ``part|name``."""
    return {f"{part}|{name}": torch.as_tensor(t).detach().clone() for name, t in tensors.items()}


def unpack_state(part: str, state: State) -> State:
    """Inverse of `pack_state`: the tensors of one part."""
    return {name.removeprefix(f"{part}|"): t for name, t in state.items() if name.startswith(f"{part}|")}


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """What an optimizer remembers of earlier steps: ``optimizer|number of the parameter|name``."""
    own = optimizer.state_dict()["state"]
    return pack_state(
        "optimizer", {f"{number}|{name}": t for number, found in own.items() for name, t in found.items()}
    )


def load_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Let an optimizer go on from a state."""
    own: dict[int, State] = {}
    for key, tensor in unpack_state("optimizer", state).items():
        number, name = key.split("|")
        # Loading does not copy, and the next step writes into what was loaded.
        own.setdefault(int(number), {})[name] = tensor.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": own})


@torch.no_grad()
def copy_into_parameters(parameters: Mapping[str, nn.Parameter], values: State) -> None:
    """Write values into the parameters of the same names."""
    for name, p in parameters.items():
        p.copy_(values[name])


@dataclass(eq=False)
class BestCheckpoint:
    """The losses of a training's looks, and the values of its parameters at the first of the lowest."""

    parameters: Mapping[str, nn.Parameter]  # What is trained
    losses: list[float] = field(default_factory=list)  # One per look
    values: State = field(default_factory=dict)  # Of the parameters at the best look

    def record_loss(self, loss: float) -> int:
        """Take note of a look's loss; returns how many looks ago the best one was.

        Raises:
            NumericError: It is NaN or infinite.
        """
        if not math.isfinite(loss):
            raise NumericError(
                f"The loss of look {len(self.losses)} is {loss}. Lower the learning rate, or use float32."
            )
        self.losses.append(loss)
        waited = len(self.losses) - 1 - self.losses.index(min(self.losses))
        if not waited:
            self.values = {name: p.detach().clone() for name, p in self.parameters.items()}
        return waited

    def restore_best(self) -> None:
        """Give the parameters their values at the best look."""
        copy_into_parameters(self.parameters, self.values)

    def to_state(self) -> State:
        """As a part of a state."""
        return {**pack_state("best", self.values), "losses": torch.tensor(self.losses, dtype=torch.float64)}

    def load_state(self, state: State) -> None:
        """Go on from a state."""
        self.losses, self.values = state["losses"].tolist(), unpack_state("best", state)
