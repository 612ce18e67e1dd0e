"""What kernels may have to do without: the package that compiles them, and a device on which they run."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernels of Triton multiply."""

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's kernels run in its interpreter, on the CPU. It multiplies the bits of bfloat16, so they are made float32 first."""

failures: dict[tuple[str, torch.device], str] = {}
"""Kernels that could not be compiled or launched in this process, by function and device, and why."""


@functools.cache
def importable(package: str) -> bool:
    """Whether a package can be imported, which this does; one that breaks on the way counts as absent.

    Late, because numba and Triton take a second to load.
    """
    try:
        importlib.import_module(package)
    except ImportError:
        return False
    return True


def triton_takes(dtype: torch.dtype, device: str) -> bool:
    """Whether Triton's kernels take numbers of this type on this kind of device; Triton alone, on a CPU, changes nothing."""
    return device == "cuda" and dtype in TRITON_DTYPES and importable("triton")


def falls_back_to(reference: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Let a function that launches Triton's kernels be computed by another one where that fails.

    Kernels are compiled at their first launch, and another Triton, driver or GPU may turn them down. That is logged once; from
    then on the function is not tried on that device again. A kernel goes to the device of the first argument, which need
    not be the current one: a base may lie on several.

    Args:
        reference: Takes the same arguments.
    """

    def decorate(launch: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(launch)
        def launch_or_fallback(x: Tensor, *others: Any) -> Tensor:
            key = (launch.__name__, x.device)
            if key not in failures:
                try:
                    with torch.cuda.device_of(x):
                        return launch(x, *others)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    failures[key] = f"{type(error).__name__}: {error}"
                    log.warning("%s does not run on %s, and torch computes the same there: %s", *key, failures[key])
            return reference(x, *others)

        return launch_or_fallback

    return decorate
