"""Hooks: see or change what goes into a module and what comes out of it. The one owner of them.

A hook stands while its block is open and is gone behind it, also after an error; hooks nest. They run in the order in
which their blocks were opened. What a hook is given and what it may return is torch's rule for the hook of that kind.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from freemoe.compat.names import attribute_replaced

Hook = Callable[..., Any]


@contextmanager
def forward_pre_hook(module: nn.Module, hook: Hook, *, kwargs: bool = False) -> Iterator[None]:
    """While open, call ``hook(module, args)`` before every forward; what it returns replaces ``args``, None leaves them.

    With ``kwargs`` it is ``hook(module, args, kwargs)``, and returns both or None.
    """
    with module.register_forward_pre_hook(hook, with_kwargs=kwargs):
        yield


@contextmanager
def forward_hook(module: nn.Module, hook: Hook, *, kwargs: bool = False) -> Iterator[None]:
    """While open, call ``hook(module, args, output)`` after every forward; what it returns replaces ``output`` unless None.

    With ``kwargs`` it is ``hook(module, args, kwargs, output)``.
    """
    with module.register_forward_hook(hook, with_kwargs=kwargs):
        yield


@contextmanager
def post_accumulate_grad_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> Iterator[None]:
    """While open, call ``hook(parameter)`` whenever a backward pass has added to the parameter's gradient.

    It may take the gradient away.
    """
    with parameter.register_post_accumulate_grad_hook(hook):
        yield


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Call ``hook(gradient)`` when a backward pass has made a tensor's gradient; the hook goes with the tensor.

    What the hook returns replaces the gradient, None leaves it. It must not hold the tensor itself: the two would be freed
    by the garbage collector alone, and with them all activations behind them.
    """
    tensor.register_hook(hook)


@contextmanager
def combined_hooks(*hooks: AbstractContextManager[None]) -> Iterator[None]:
    """Open several in their order; when one cannot be opened, those before it are closed."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook)
        yield


@contextmanager
def hooks_disabled(module: nn.Module, *, inputs: bool = True) -> Iterator[None]:
    """While open, a module's hooks are not called. With ``inputs`` hooks before its forward rest as well as those after it."""
    names = ("_forward_hooks", "_forward_pre_hooks") if inputs else ("_forward_hooks",)
    standing = {name: module.__dict__[name] for name in names}
    try:
        module.__dict__.update({name: OrderedDict() for name in names})
        yield
    finally:
        module.__dict__.update(standing)


def replace_method(
    module: nn.Module, method: Callable[..., Any], name: str = "forward"
) -> AbstractContextManager[None]:
    """While open, ``method`` is called instead of a module's own of that name; its hooks are called as before. It nests.

    The module itself is not kept alive by what is open.
    """
    return attribute_replaced(module.__dict__, name, method)


def has_hooks(module: nn.Module) -> bool:
    """Whether any hook stands on a module, of whatever kind and by whomever."""
    others = (module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return has_hooks_after(module) or any(others)


def has_hooks_after(module: nn.Module) -> bool:
    """Whether a hook stands behind a module's forward, and may change what comes out of it."""
    return bool(module._forward_hooks)


def hook_count(module: nn.Module) -> int:
    """How many hooks stand before and behind a module's forward."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)
