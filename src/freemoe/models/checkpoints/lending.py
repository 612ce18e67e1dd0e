"""A model that the caller has loaded takes the place of the one that would be loaded under its name.

So a run needs no other way for it: whoever asks `load_base` for the recipe's model is given the caller's. What a run changes
about a model beside its values (which it puts back itself) is put back here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

_LENT: ContextVar[Mapping[str, tuple[Any, Any]]] = ContextVar("lent models", default=MappingProxyType({}))
# What torch keeps of a module elsewhere than in plain attributes.
_HELD = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def provide_model(name: str, model: Any, tokenizer: Any) -> Iterator[None]:
    """Inside, ``load_base(name)`` gives this model in eval mode, and its tokenizer; afterwards the model is as it was."""
    # What is not a value is put back: train and eval mode, plain attributes, hooks, who asks for gradients, gradients.
    modules = [(m, {k: v for k, v in vars(m).items() if k not in _HELD}) for m in model.modules()]
    hooks = [
        (v, dict(v)) for _, held in modules for k, v in held.items() if k.endswith("_hooks") and isinstance(v, dict)
    ]
    gradients = [(p, p.requires_grad, p.grad) for p in model.parameters()]
    token = _LENT.set({**_LENT.get(), name: (model, tokenizer)})
    try:
        model.eval()
        yield
    finally:
        _LENT.reset(token)
        for module, held in modules:
            for key in [k for k in vars(module) if k not in held and k not in _HELD]:
                del vars(module)[key]
            vars(module).update(held)
        for place, before in hooks:
            place.clear()
            place.update(before)
        for parameter, asked, gradient in gradients:
            parameter.requires_grad_(asked)
            parameter.grad = gradient


def provided_model(name: object) -> tuple[Any, Any] | None:
    """The model and the tokenizer that are lent under a name; None where none is."""
    return _LENT.get().get(str(name))
