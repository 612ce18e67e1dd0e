"""Write the tiny benchmark that comes with the package, `{domain}.{reference|test}.jsonl`, and its text, `documents.jsonl`.

    python -m scripts.make_demo_benchmark --eval-seed 7301

The benchmark is a function of the seed alone; the text is always the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scripts.tiny_world import write_benchmark, write_documents

EVAL_SEED = 7301
OUT = Path(__file__).resolve().parents[1] / "src" / "freemoe" / "assets" / "benchmark"


def main() -> None:
    """Parse the flags and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eval-seed", type=int, default=EVAL_SEED, help="which items are drawn (default %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to (default: the package's own)")
    args = parser.parse_args()
    for path in (*write_benchmark(args.out, args.eval_seed), write_documents(args.out / "documents.jsonl")):
        lines = path.read_text(encoding="utf-8").count("\n")
        print(f"{path.name}: {lines} items, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
