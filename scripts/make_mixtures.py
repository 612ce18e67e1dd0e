"""Train mixtures of OLMoE's and Qwen3-MoE's shape on real text and keep them in the cache folder, for `freemoe bench hookmoe`.

python scripts/make_mixtures.py --data-root FOLDER --dry-run
python scripts/make_mixtures.py --data-root FOLDER --shape olmoe --steps 400
"""

from __future__ import annotations

from freemoe.bench.hookmoe.mixtures import main

if __name__ == "__main__":
    main()
