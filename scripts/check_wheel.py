"""Build the wheel and the sdist, and try both as a stranger would.

    python scripts/check_wheel.py [--python PYTHON] [--sdist-only]

The wheel goes into an environment of its own that has nothing of this checkout and no extra; the commands run there, in an empty
folder. The sdist is unpacked, and its quick tests run from what it holds. `--python` names another interpreter for the bare
environment (3.11 to 3.13).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMMANDS = (
    ["freemoe", "--version"],
    ["freemoe", "--help"],
    ["freemoe", "ls", "systems"],
    ["freemoe", "inspect", "freemoe-demo"],
    ["freemoe", "demo", "--limit", "40", "-o", "demo-out", "--quiet"],
    ["freemoe", "generate", "demo-out", "17+5=", "--max-new-tokens", "4"],
    ["freemoe", "inspect", "demo-out", "--base", "freemoe-demo"],
)
"""What the wheel must do where there is nothing but its own dependencies."""

OWN_TESTS = (
    "tests/core",
    "tests/test_recipes.py",
    "tests/test_recipe_files.py",
    "tests/test_docs.py",
    "tests/models/test_mask.py",
)
"""The quick tests that an unpacked sdist runs on itself."""


def run(command: list[str], where: Path, **variables: str) -> None:
    """Run a command in a folder; what failed is shown whole, and ends this.

    Raises:
        SystemExit: The command failed.
    """
    print("$", " ".join(command), flush=True)
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    found = subprocess.run(command, cwd=where, env={**kept, **variables}, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {found.returncode}:\n{found.stdout}{found.stderr}")


def built(folder: Path) -> tuple[Path, Path]:
    """Wheel and sdist of this checkout."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], folder)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def try_wheel(wheel: Path, python: str, folder: Path) -> None:
    """Install a wheel into a bare environment and run its commands in an empty folder."""
    environment, work = folder / "bare", folder / "work"
    work.mkdir()
    run([python, "-m", "venv", str(environment)], folder)
    bin_ = environment / ("Scripts" if os.name == "nt" else "bin")
    constraints = ["-c", str(ROOT / "constraints.txt")]
    run([str(bin_ / "python"), "-m", "pip", "install", "--quiet", *constraints, str(wheel)], folder)
    for command in COMMANDS:
        run([str(bin_ / command[0]), *command[1:]], work, HF_HUB_OFFLINE="1")


def try_sdist(sdist: Path, folder: Path) -> None:
    """Unpack a sdist and run its own tests against its own source, with this environment's packages."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    root = folder / sdist.name.removesuffix(".tar.gz")
    run([sys.executable, "-m", "pytest", "-q", "-x", *OWN_TESTS], root, PYTHONPATH=str(root / "src"))


def main() -> None:
    """Build both, try both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Interpreter of the bare environment.")
    parser.add_argument("--sdist-only", action="store_true", help="Leave the bare environment out.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="freemoe-wheel-") as name:
        folder = Path(name)
        wheel, sdist = built(folder)
        try_sdist(sdist, folder)
        if not asked.sdist_only:
            try_wheel(wheel, asked.python, folder)
        print(f"{wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB) and {sdist.name} work.")


if __name__ == "__main__":
    main()
