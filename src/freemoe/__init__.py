"""freemoe: find the experts inside a frozen, pretrained LLM, prove whether they help, ship them in megabytes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from freemoe.core.version import __version__

if TYPE_CHECKING:
    from freemoe.core.errors import FreeMoEError
    from freemoe.core.run.progress import Progress
    from freemoe.domain_experts.build import build
    from freemoe.domain_experts.mixture import FreeMoE
    from freemoe.hookmoe.trim import trim
    from freemoe.recipes import BuildRecipe, ConvertRecipe, EvalRecipe, TrimRecipe, load_recipe
    from freemoe.systems import evaluate, load, merge
    from freemoe.tomoe.convert import convert

# Public name -> the room it stands in. Loaded at first use, so that `import freemoe` loads no torch.
_PUBLIC = {
    "BuildRecipe": "freemoe.recipes",
    "ConvertRecipe": "freemoe.recipes",
    "EvalRecipe": "freemoe.recipes",
    "FreeMoE": "freemoe.domain_experts.mixture",
    "FreeMoEError": "freemoe.core.errors",
    "Progress": "freemoe.core.run.progress",
    "TrimRecipe": "freemoe.recipes",
    "build": "freemoe.domain_experts.build",
    "convert": "freemoe.tomoe.convert",
    "evaluate": "freemoe.systems",
    "load": "freemoe.systems",
    "load_recipe": "freemoe.recipes",
    "merge": "freemoe.systems",
    "trim": "freemoe.hookmoe.trim",
}

__all__ = [
    "BuildRecipe",
    "ConvertRecipe",
    "EvalRecipe",
    "FreeMoE",
    "FreeMoEError",
    "Progress",
    "TrimRecipe",
    "__version__",
    "build",
    "convert",
    "evaluate",
    "load",
    "load_recipe",
    "merge",
    "trim",
]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'freemoe' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
