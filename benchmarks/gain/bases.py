"""Fresh bases of the demo's kind: other weights, other training documents, other items of the benchmark.

They are trained once (about twenty minutes of one core each) and kept in the user's cache folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gain.contest import cores, one_thread_each
from freemoe.assets import DOMAINS, SPLITS
from freemoe.core.errors import DataError
from freemoe.core.run.progress import Progress
from scripts import make_demo_model

# Seeds of training, none of them the shipped base's. Their items of the benchmark have seeds of their own.
SEEDS = (101, 102, 103)
_QUICK_STEPS = 20


def eval_seed(seed: int) -> int:
    """Seed of the benchmark items that belong to a base."""
    return 9000 + seed


def base_folder(cache: Path, seed: int, quick: bool) -> Path:
    """Where a base is kept: ``demo_model/`` and ``benchmark/`` stand in it."""
    return cache / "bench" / f"demo-base-seed{seed}-steps{_steps(quick)}"


def _steps(quick: bool) -> int:
    return _QUICK_STEPS if quick else make_demo_model.STEPS


def is_ready(folder: Path, seed: int, quick: bool) -> bool:
    """Whether a folder holds the base that this version would train."""
    record = folder / "demo_model" / "PROVENANCE.json"
    if not record.is_file():
        return False
    kept = json.loads(record.read_text(encoding="utf-8"))
    # As JSON has it: tuples are lists there.
    wanted = json.loads(json.dumps(make_demo_model.recipe(seed, eval_seed(seed), _steps(quick))))
    return all(kept.get(key) == value for key, value in wanted.items())


def fresh_bases(cache: Path, seeds: Sequence[int], quick: bool, progress: Progress) -> dict[int, Path]:
    """Train the bases that are not in the cache yet, one per core at a time; returns their folders by seed.

    Raises:
        DataError: When a training run fails; says how it ended.
    """
    folders = {seed: base_folder(cache, seed, quick) for seed in seeds}
    missing = [seed for seed, folder in folders.items() if not is_ready(folder, seed, quick)]
    if missing:
        progress.say(f"training {len(missing)} bases, about 20 minutes of one core each; kept in {cache}")

        def work(seed: int) -> None:
            folders[seed].mkdir(parents=True, exist_ok=True)
            flags = {"seed": seed, "eval-seed": eval_seed(seed), "steps": _steps(quick), "out": folders[seed]}
            command = [sys.executable, "-m", "scripts.make_demo_model", *(f"--{k}={v}" for k, v in flags.items())]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise DataError(f"Training the base of seed {seed} ended with {done.returncode}: {done.stderr[-500:]}")
            advance(1)

        with (
            one_thread_each(),
            progress.stage("training bases", len(missing)) as advance,
            ThreadPoolExecutor(min(cores(), len(missing))) as pool,
        ):
            list(pool.map(work, missing))
    return folders


def benchmark_specs(folder: Path) -> dict[str, tuple[str, ...]]:
    """The domains of a base's own benchmark, as a recipe names them: ``REFERENCE::TEST``."""
    return {d: ("::".join(str(folder / "benchmark" / f"{d}.{split}.jsonl") for split in SPLITS),) for d in DOMAINS}
