"""Whether a change left every result as it was: run the same commands at another commit and here, and compare what they write.

    python -m scripts.same_results COMMIT          # the bundled models in full, some minutes of two cores for each side
    python -m scripts.same_results COMMIT --quick  # few documents and steps

Tensors are compared byte by byte. Of JSON, what a second run of one and the same commit changes too is left out: times,
memory, machine, paths. Both sides run on this machine, one after the other, because another processor rounds otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.tomoe.quality import bundled_text

ROOT = Path(__file__).resolve().parents[1]
# Entries that tell of a run rather than of its result.
OF_THE_RUN = (
    "created", "environment", "cost", "speed", "wall_seconds", "seconds", "peak_memory_bytes", "units_done",
    "units_reused", "workers", "output", "measured", "freemoe", "freemoe_version", "ms", "files", "checksum",
)  # fmt: skip
COMPARED = (".safetensors", ".json")


def commands(quick: bool, text: str) -> dict[str, list[str]]:
    """Output folder -> command line, without the output."""
    few = ["--limit", "40"] if quick else []
    steps = "4" if quick else "40"
    return {
        "demo": ["demo", *few],
        "mixture": ["build", "freemoe-demo-moe", "-d", "code=demo:code", "--limit", "40" if quick else "120"],
        "converted": ["convert", "freemoe-demo", "--text", text, "--steps", steps, "--block", "256"],
        "trimmed": [
            "trim", "freemoe-demo-moe", "--text", "demo:", "--act", "1.0", "--block", "64", "--steps", steps,
            "--limit", "64",
        ],
    }  # fmt: skip


def run_all(source: Path, out: Path, text: str, quick: bool) -> None:
    """Run every command with the package below ``source``."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    for name, command in commands(quick, text).items():
        print(f"  {name}", flush=True)
        line = [sys.executable, "-m", "freemoe", *command, "-q", "-o", str(out / name)]
        done = subprocess.run(line, env=environment, cwd=out, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{source}: {' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def plain(value: Any) -> Any:
    """A JSON value without what tells of the run."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items() if not any(k == o or k.endswith(f"_{o}") for o in OF_THE_RUN)}
    return [plain(v) for v in value] if isinstance(value, list) else value


def differences(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Paths inside two JSON values at which they are not the same."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key in before and key in after:
                yield from differences(before[key], after[key], f"{where}/{key}")
            else:
                yield f"{where}/{key} is only {'before' if key in before else 'after'}"
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{where}/{number}")
    elif before != after:
        yield f"{where}: {str(before)[:80]} -> {str(after)[:80]}"


def compare(before: Path, after: Path) -> list[str]:
    """What differs between two folders of outputs."""
    sides = [
        {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in COMPARED} for folder in (before, after)
    ]
    found = [f"{name} is only {'before' if name in sides[0] else 'after'}" for name in sorted(sides[0] ^ sides[1])]
    for name in sorted(sides[0] & sides[1]):
        old, new = before / name, after / name
        if old.suffix == ".json":
            pair = (plain(json.loads(p.read_text(encoding="utf-8"))) for p in (old, new))
            found += [f"{name}{line}" for line in differences(*pair)]
        elif old.suffix == ".safetensors" and old.read_bytes() != new.read_bytes():
            found.append(f"{name}: other bytes")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("commit", help="what to compare the working tree with")
    parser.add_argument("--quick", action="store_true", help="few documents and steps")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        text = bundled_text(folder)
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(folder / "source"), asked.commit], check=True)
        try:
            for side, source in (("before", folder / "source"), ("after", ROOT)):
                print(side, flush=True)
                (folder / side).mkdir()
                run_all(source, folder / side, text, asked.quick)
        finally:
            subprocess.run([*git, "remove", "--force", str(folder / "source")], check=True)
        found = compare(folder / "before", folder / "after")
    print("\n".join(found) or "every result is the same")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
