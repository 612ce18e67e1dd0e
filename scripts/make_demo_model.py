"""Train the tiny model that comes with the package, from seeds, and write it where the package keeps it.

python scripts/make_demo_model.py --dry-run
python scripts/make_demo_model.py --seed 11 --eval-seed 7301
"""

from __future__ import annotations

from freemoe.assets.tiny_base import main

if __name__ == "__main__":
    main()
