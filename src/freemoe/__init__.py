"""freemoe: find the experts inside a frozen, pretrained LLM, prove whether they help, ship them in megabytes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from freemoe.core.version import __version__

if TYPE_CHECKING:
    from freemoe.artefacts import evaluate, load, merge
    from freemoe.core.errors import FreeMoEError
    from freemoe.core.run.progress import Progress
    from freemoe.domain_experts.mixture import FreeMoE
    from freemoe.domain_experts.pipeline import build
    from freemoe.domain_experts.recipe import BuildRecipe
    from freemoe.hookmoe.pipeline import trim
    from freemoe.hookmoe.recipe import TrimRecipe
    from freemoe.recipes import EvalRecipe, load_recipe
    from freemoe.tomoe.pipeline import convert
    from freemoe.tomoe.recipe import ConvertRecipe

# Public name -> the room it stands in. Loaded at first use, so that `import freemoe` loads no torch.
_PUBLIC = {
    "BuildRecipe": "freemoe.domain_experts.recipe",
    "ConvertRecipe": "freemoe.tomoe.recipe",
    "EvalRecipe": "freemoe.recipes",
    "FreeMoE": "freemoe.domain_experts.mixture",
    "FreeMoEError": "freemoe.core.errors",
    "Progress": "freemoe.core.run.progress",
    "TrimRecipe": "freemoe.hookmoe.recipe",
    "build": "freemoe.domain_experts.pipeline",
    "convert": "freemoe.tomoe.pipeline",
    "evaluate": "freemoe.artefacts",
    "load": "freemoe.artefacts",
    "load_recipe": "freemoe.recipes",
    "merge": "freemoe.artefacts",
    "trim": "freemoe.hookmoe.pipeline",
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
