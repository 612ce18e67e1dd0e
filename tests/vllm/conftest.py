"""vLLM lives in an environment of its own (`make vllm-test`); anywhere else these tests are skipped."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("vllm") is None:
        skip = pytest.mark.skip(reason="vLLM is not installed here (make vllm-test)")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    from tests.vllm.world import differences

    if differences:
        terminalreporter.write_line(
            f"vLLM and Hugging Face: {len(differences)} batches, log-probabilities differ by {max(differences):.1e} at most"
        )


@pytest.fixture(scope="session")
def ask(tmp_path_factory):
    """Run steps of `scenario` on several models in one process: ``ask(runner, steps, *folders, base=...)``."""

    def run(runner, steps, *folders, base=None):
        folder = tmp_path_factory.mktemp("scenario")
        asked, answered = folder / "asked.json", folder / "answered.json"
        asked.write_text(json.dumps({"folders": folders, "base": base, "steps": steps}, default=str))
        command = [sys.executable, "-m", "tests.vllm.scenario", runner, str(asked), str(answered)]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return json.loads(answered.read_text())

    return run
