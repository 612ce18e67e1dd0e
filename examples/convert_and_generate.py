"""Make the bundled dense model a mixture of its own weights, half of them per token, and generate with it.

python examples/convert_and_generate.py
"""

from __future__ import annotations

from pathlib import Path

import freemoe
from freemoe.assets import demo_documents
from freemoe.results import read_result
from freemoe.tomoe.result import ConvertResult


def main() -> None:
    """Write a text, convert, read, generate."""
    # Any text will do that looks like what the model shall write later; this is the bundled model's own world, drawn anew.
    Path("corpus.txt").write_text("\n\n".join(demo_documents()[:4000]))
    recipe = freemoe.ConvertRecipe(
        model="freemoe-demo",
        text=("corpus.txt",),
        active=0.5,
        train={"steps": 40, "block": 128, "batch_tokens": 1024},
        output="half",
    )
    folder = freemoe.convert(recipe)

    # The dense model, the converted one, and rivals at the same share, on text that chose nothing.
    for name, found in read_result(folder, ConvertResult).scores.items():
        print(f"{name:18} perplexity {found['perplexity@128']:8.3f}")

    # The folder is a Hugging Face model; freemoe.load opens it as it opens everything else.
    text, _ = freemoe.load(folder).generate_text("17+5=", max_new_tokens=6)
    print(repr(text))


if __name__ == "__main__":
    main()
