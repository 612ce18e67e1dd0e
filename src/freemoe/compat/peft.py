"""What freemoe asks of PEFT; in 0.18 to 0.21."""

from __future__ import annotations

from typing import Any


def unwrap_peft(model: Any) -> Any:
    """The language model itself, where PEFT has wrapped it."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model
