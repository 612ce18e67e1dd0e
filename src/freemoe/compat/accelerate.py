"""What freemoe touches of accelerate beside its documented names. All of it is in 1.0 to 1.15."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def reading_hooks(module: nn.Module) -> Iterator[Any]:
    """A module's hooks that read its weights while it computes: ``AlignDevicesHook``, by itself or among others.

    Each has a mapping ``weights_map`` from the names of the module's own parameters to their values, which may be
    replaced, and an ``execution_device``.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "offload", False) and getattr(part, "weights_map", None) is not None:
            yield part
