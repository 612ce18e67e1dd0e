"""Run one expert per token instead of two in the bundled mixture, and see what hooks win back.

python examples/trim_and_evaluate.py
"""

from __future__ import annotations

import freemoe
from freemoe.artefacts import evaluate
from freemoe.hookmoe.result import TrimResult
from freemoe.recipes import EvalRecipe
from freemoe.results import read_result


def main() -> None:
    """Trim, read, evaluate on a task."""
    recipe = freemoe.TrimRecipe(
        model="freemoe-demo-moe",
        text="demo:",
        plan={"act": 1.0},
        training={"block": 128, "steps": 60},
        output="trimmed",
    )
    folder = freemoe.trim(recipe)

    for name, found in read_result(folder, TrimResult).test.rows.items():
        print(f"{name:16} loss {found['ce']:.4f}")

    # Text that the hooks were trained on the like of flatters: look at a task, too.
    found = evaluate(EvalRecipe(artefact=str(folder), domains={"math": ["demo:math"]}, data={"limit": 100}))
    for name, row in found["domains"][0]["rows"].items():
        print(f"{name:16} {row['score']:.1f} % of {row['documents']} questions")


if __name__ == "__main__":
    main()
