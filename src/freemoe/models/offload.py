"""Weights that are not in memory: accelerate reads them from disk (or the host) while their module is called.

Nothing can be edited there, so what is switched off is taken out as a weight is read; the files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from freemoe.compat.transformers import reading_hooks

Edit = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class OffloadedParameter:
    """One parameter that is read as it is needed."""

    source: Mapping[str, Tensor]  # Where accelerate reads it, by ``key``
    key: str  # Its name there
    device: torch.device  # Where its module computes
    # What is done to the values that are read, in this order; each gives a new tensor
    edits: list[Edit] = field(default_factory=list)

    def read_values(self) -> Tensor:
        """The values as the model computes with them, of the parameter's own shape; not to be written to."""
        tensor = self.source[self.key]
        for edit in self.edits:
            tensor = edit(tensor)
        return tensor


class _EditedWeightsMap(Mapping[str, Tensor]):
    """What a module's hook reads its weights from: the same values, edited."""

    def __init__(self, source: Mapping[str, Tensor], parts: dict[str, OffloadedParameter]) -> None:
        self.source, self.parts = source, parts

    def __getitem__(self, key: str) -> Tensor:
        return self.parts[key].read_values() if key in self.parts else self.source[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def stored_parameters(model: nn.Module) -> dict[str, OffloadedParameter]:
    """The parameters of a model that are not in memory, by name; empty for most models.

    From the first call on the model reads them through what is returned, so that edits show in its passes.
    """
    found: dict[str, OffloadedParameter] = {}
    for path, module in model.named_modules():
        for hook in reading_hooks(module):
            if not isinstance(hook.weights_map, _EditedWeightsMap):
                device = torch.device(hook.execution_device)
                own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
                parts = {name: OffloadedParameter(hook.weights_map, name, device) for name in own}
                hook.weights_map = _EditedWeightsMap(hook.weights_map, parts)
            found.update({f"{path}.{key}" if path else key: part for key, part in hook.weights_map.parts.items()})
    return found


def named_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter with its values in the order of names, tied ones once; read one by one where not in memory."""
    stored = stored_parameters(model)
    for name, parameter in sorted(model.named_parameters()):
        yield name, stored[name].read_values() if name in stored else parameter.detach()


def resident_bytes(model: nn.Module) -> int:
    """Bytes of the parameters that are in memory, and of the largest one that is read there while its module computes."""
    sizes: dict[bool, list[int]] = {True: [0], False: [0]}
    for parameter in model.parameters():
        sizes[parameter.is_meta].append(parameter.numel() * parameter.element_size())
    return sum(sizes[False]) + max(sizes[True])


def read_parameter(module: nn.Module, name: str) -> Tensor:
    """A module's own parameter to read, also between its calls where that is not in memory."""
    parameter = getattr(module, name)
    if parameter.is_meta:
        for hook in reading_hooks(module):
            return hook.weights_map[name].to(hook.execution_device)
    return parameter
