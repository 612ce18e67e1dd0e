"""Draw the table and the pictures of `python -m benchmarks real` from the JSON that it left.

First: python -m benchmarks real --model MODEL --data-root FOLDER -o docs/benchmarks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.real_llm.figures.pictures import draw_all

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def main(folder: Path) -> None:
    """Write `real.md` and the SVG files beside `real.json`."""
    result = json.loads((folder / "real.json").read_text(encoding="utf-8"))
    for path in draw_all(result["details"], folder):
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
