"""Run the quick tests with another transformers, in an environment of its own.

    python scripts/try_transformers.py 5.16.0 [TESTS ...]

The environment inherits every other package of the one that runs this, so that only transformers differs (and what pip has to change
for it).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TESTS = (
    "tests/compat",
    "tests/models",
    "tests/evals/engine",
    "tests/domain_experts/test_mixture.py",
    "tests/domain_experts/test_expert.py",
    "tests/tomoe/test_modeling.py",
    "tests/hookmoe/test_adapter.py",
    "tests/test_systems.py",
)
"""What touches transformers most."""


def main(version: str, tests: list[str]) -> int:
    """Make the environment, run the tests in it; pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="freemoe-transformers-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        inside = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
        # A venv of a venv inherits nothing by itself: the outer packages stand behind the inner ones on the path.
        outer = next(p for p in sys.path if p.endswith("site-packages"))
        found = subprocess.run(
            [inside, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        )
        (Path(found.stdout.strip()) / "outer.pth").write_text(f"{outer}\n")
        subprocess.run([inside, "-m", "pip", "install", "--quiet", f"transformers=={version}"], check=True)
        command = [inside, "-m", "pytest", "-q", *(tests or TESTS)]
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("Name a version: python scripts/try_transformers.py 5.16.0")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
