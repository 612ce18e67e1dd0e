"""A CPU that plays two accelerators and their host, so that what would fail there fails here.

Inside `Neighbours` every tensor has a place: the first or the second device, or the host, where all is that was made without saying
where or fetched by ``.cpu()``. An operation that takes tensors of two places fails. What crosses by ``.to`` has crossed. Tensors name
their place when they are asked for their device, so that code goes the ways that it goes on accelerators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from freemoe.models.hooks import before, hooked

HOST, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)

_NAMES = [
    "tensor",
    "zeros",
    "ones",
    "full",
    "empty",
    "arange",
    "eye",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "from_numpy",
    "as_tensor",
]
_MADE = {getattr(torch, name) for name in _NAMES}
_READ = {Tensor.numpy, Tensor.__array__}
# These take tensors of two places on accelerators too; indices may lie on the host.
_CROSSING = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__, Tensor.to}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def place(tensor: Tensor) -> torch.device:
    """Where a tensor lies; what nothing is known of lies on the first device."""
    return getattr(tensor, "_place", FIRST)


def put(value: Any, where: torch.device) -> Any:
    """The same tensors, lying somewhere else."""
    with torch._C.DisableTorchFunction():
        if isinstance(value, Tensor):
            moved = value.view_as(value)
            moved._place = where  # type: ignore[attr-defined]
            return moved
    if isinstance(value, dict):
        return {name: put(part, where) for name, part in value.items()}
    return type(value)(put(part, where) for part in value) if isinstance(value, list | tuple) else value


class Neighbours(TorchFunctionMode):
    """The mode; see above."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__self__", None) is Tensor.device:
            return place(args[0])
        # A module that is moved or cast gives its parameters other numbers, wherever these lie.
        if function in (torch._has_compatible_shallow_copy_type, torch._C._nn._parse_to, torch.device):
            return function(*args, **kwargs)
        if function == Tensor.data.__set__:
            function(*args)
            args[0]._place = place(args[1])
            return None
        if function is Tensor.__deepcopy__:
            with torch._C.DisableTorchFunction():
                return put(function(*args), place(args[0]))
        if function in _READ and place(args[0]) != HOST:
            raise AssertionError(f"numpy reads the host's memory alone, and this tensor lies on {place(args[0])}")
        # A number without dimensions may lie anywhere.
        places = [place(t) for t in _tensors((args, kwargs)) if t.ndim]
        if function not in _CROSSING and len(dict.fromkeys(places)) > 1:
            shapes = [(tuple(t.shape), str(place(t))) for t in _tensors((args, kwargs))]
            raise AssertionError(f"{getattr(function, '__name__', function)} takes tensors of two devices: {shapes}")
        asked = next((torch.device(v) for v in (*args, *kwargs.values()) if _is_device(v)), None)
        if function is Tensor.to and asked is None:
            asked = next((place(v) for v in args[1:] if isinstance(v, Tensor)), None)
        if function is Tensor.cpu:
            asked = HOST
        found = function(*map(_really, args), **{name: _really(value) for name, value in kwargs.items()})
        if function in (Tensor.to, Tensor.cpu) and asked is not None:
            # Without need to copy it gives the very tensor back, which still lies where it lay.
            return put(found, asked)
        where = asked or (HOST if function in _MADE else places[0] if places else None)
        if where is not None:
            for tensor in _tensors(found):
                tensor._place = where  # type: ignore[attr-defined]
        return found


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda"))


def _really(value: Any) -> Any:
    return HOST if _is_device(value) else value


@contextmanager
def split_over_two(model: Any, layers: list[nn.Module]) -> Iterator[None]:
    """Inside, the first half of a model's layers lies on the first device and the rest on the second; all else on the first."""

    def to(where: torch.device) -> Callable[..., Any]:
        return lambda module, args, kwargs: (put(args, where), put(kwargs, where))

    for layer in layers[len(layers) // 2 :]:
        for tensor in (*layer.parameters(), *layer.buffers()):
            tensor._place = SECOND  # type: ignore[attr-defined]
    last = next(m for name, m in model.named_modules() if name in ("model.norm", "transformer.ln_f"))
    crossings = [before(layer, to(SECOND), kwargs=True) for layer in layers[len(layers) // 2 :]]
    with hooked(*crossings, before(last, to(FIRST), kwargs=True)), Neighbours():
        yield
