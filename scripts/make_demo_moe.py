"""Train the tiny mixture of experts that comes with the package, from a seed, and write it where the package keeps it.

python scripts/make_demo_moe.py --dry-run
python scripts/make_demo_moe.py --seed 5
"""

from __future__ import annotations

from freemoe.assets.tiny_moe import main

if __name__ == "__main__":
    main()
