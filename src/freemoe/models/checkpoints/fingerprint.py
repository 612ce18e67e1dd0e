"""The fingerprint of a base: a SHA-256 over its parameters' values as fp32.

So the same checkpoint gives the same fingerprint whether it is held in bf16 or in fp32, in memory or on disk.
"""

from __future__ import annotations

import hashlib
from typing import Any

from freemoe.models.offload import named_values

_CHUNK = 1 << 22


def fingerprint_model(model: Any) -> str:
    """SHA-256 over the names, shapes and fp32 values of a model's parameters; tied ones count once."""
    total = hashlib.sha256()
    for name, values in named_values(model):
        total.update(f"{name}:{tuple(values.shape)};".encode())
        flat = values.reshape(-1)
        for start in range(0, flat.numel(), _CHUNK):
            total.update(flat[start : start + _CHUNK].float().cpu().numpy().tobytes())
    return total.hexdigest()
