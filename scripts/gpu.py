"""All that needs an accelerator, in eight minutes at most: tests and benchmarks, and what they found in one JSON (``make gpu``).

It needs a checkout and the packages of `NEEDED`; it installs nothing and fetches nothing. Every step is a process of its own
with a time limit, the most telling ones first, and the JSON is written after each: what is cut off keeps what it has.
`--dry` runs every step at a small size on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
NAME = "gpu.json"
BUDGET = 480.0
"""Seconds of the whole script; a step is begun with what is left at the most."""

DRY_BUDGET = 3600.0
"""Seconds of a dry run, whose steps have no limits of their own: it may run on a slow and busy machine."""

ALONE = ("annotated-types", "pydantic-core", "typing-inspection")
"""Packages that come with pydantic where pip brings it, and must be carried with it where it does not."""

MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn"}
"""Package -> module, where the names differ by more than a dash."""

SPARED = ("numba",)
"""What the project asks for and can do without."""


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str  # Its name in the JSON
    about: str  # What it shows
    seconds: float = 0  # It is ended after so long
    bench: str = ""  # A benchmark; without one the tests are run
    flags: tuple[str, ...] = ()  # Of the benchmark

    def command(self, device: str, dry: bool, scratch: Path) -> list[str]:
        """What is run."""
        python = [sys.executable, "-m"]
        if not self.bench:
            # Releases that were never tried here may warn of what a test would call an error.
            quiet = ["-q", "-p", "no:cacheprovider", "-W", "default"]
            return [
                *python,
                "pytest",
                "tests/accelerator",
                "-m",
                "not hardening",
                *quiet,
                f"--junitxml={scratch / 'tests.xml'}",
            ]
        sizes = ("--quick",) if dry else ()
        asked = [self.bench, "--device", device, "-o", str(scratch), "-q", *self.flags, *sizes]
        return [*python, "benchmarks", *asked]


STEPS = (
    Step("tests", "CUDA and Triton tests", 105),
    Step("large", "calibration and learned switches of a base of 7B", 90, "large", ("--only", "cost:*")),
    Step("memory", "peak of the stages of a build above a base of 7B", 75, "large", ("--only", "memory:*")),
    Step("switch", "T5: switching experts against copying weights", 36, "switch"),
    Step("calibrate", "T3: calibration over a plain forward pass", 36, "calibrate"),
    Step("tomoe-speed", "T8: converted against dense", 75, "tomoe-speed", ("--only", "random masks")),
    Step("hookmoe", "T10: fewer experts per token, speed alone", 75, "hookmoe-speed"),
    Step("mixed", "T6: a batch of several experts", 36, "mixed", ("--only", "135M, bfloat16")),
)


def missing(dry: bool) -> list[str]:
    """What is not installed, or not in a release that will do, all at once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *ALONE, "pytest", "peft>=0.18", *(() if dry else ("triton",))]
    found = []
    for text in wanted:
        name: str = text.partition(">")[0].strip()
        if name in SPARED:
            continue
        if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is None:
            found.append(text)
        elif not _new_enough(text):
            found.append(f"{text} (there is {metadata.version(name)})")
    return found


def _new_enough(text: str) -> bool:
    from packaging.requirements import Requirement

    asked = Requirement(text)
    try:
        return not asked.specifier or asked.specifier.contains(metadata.version(asked.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return True


def run(step: Step, device: str, dry: bool, seconds: float, scratch: Path) -> dict[str, Any]:
    """Run a step; returns its record, whatever happens."""
    record: dict[str, Any] = {"step": step.name, "about": step.about}
    if seconds < 5:
        return record | {"status": "no time left"}
    command = step.command(device, dry, scratch)
    log, began = scratch / f"{step.name}.log", time.monotonic()
    with log.open("wb") as into:
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(dry), stdout=into, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    record |= {
        "seconds": round(time.monotonic() - began, 1),
        "limit": round(seconds, 1),
        "command": ["python", *command[1:]],
    }
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    found = _of_bench(scratch / f"{step.bench}.json") if step.bench else _of_tests(scratch / "tests.xml")
    status = found.pop("status", "failed") if code is not None else "timed out"
    if not step.bench and code:
        status = "failed"
    return record | {"status": status} | found | ({} if status == "ok" else {"error": said[-4000:]})


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(dry: bool) -> dict[str, str]:
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return {**os.environ, **own, **({"FREEMOE_TEST_DEVICE": "cpu"} if dry else {})}


def _of_bench(path: Path) -> dict[str, Any]:
    """Figures and details that a benchmark left; a figure without a value is a part that failed."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    # The next step may be the same benchmark.
    path.unlink()
    holes = [figure["line"] for figure in found["figures"] if figure["value"] is None]
    lines = [figure["line"] for figure in found["figures"]]
    kept = {"lines": lines, "figures": found["figures"], "details": found["details"]}
    return kept | {"status": "in part" if holes else "ok"} | ({"holes": holes} if holes else {})


def _of_tests(path: Path) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, and what those that failed say."""
    if not path.exists():
        return {}
    suite = next(ElementTree.parse(path).iter("testsuite")).attrib
    counts = {key: int(suite[key]) for key in ("tests", "failures", "errors", "skipped")}
    bad = {
        f"{case.get('classname')}.{case.get('name')}": (case.find(kind).get("message") or "")[:600]  # type: ignore
        for case in ElementTree.parse(path).iter("testcase")
        for kind in ("failure", "error")
        if case.find(kind) is not None
    }
    return {**counts, "failed": bad, "status": "failed" if bad else "ok"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; 0 where every one that is there came to its end, 1 where not, 2 where nothing could be begun."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="small sizes on the CPU: that every step runs")
    parser.add_argument("--steps", help="names, with commas between them; all of them by default")
    parser.add_argument("-o", "--output", type=Path, help=f"folder of {NAME}; by default $OUT, else bench-out")
    asked = parser.parse_args(arguments)
    unknown = set(asked.steps.split(",") if asked.steps else ()) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no steps {', '.join(sorted(unknown))}; there are {', '.join(step.name for step in STEPS)}")
    lacking = missing(asked.dry)
    if lacking:
        print(f"Not installed, and nothing runs without: {', '.join(lacking)}", file=sys.stderr)
        return 2
    device = "cpu" if asked.dry else "cuda"
    record = _record(device, asked.dry)
    if record is None:
        print("torch sees no CUDA device. make gpu DRY=1 runs every step at small sizes on the CPU.", file=sys.stderr)
        return 2
    output = asked.output or Path(os.environ.get("OUT") or ROOT / "bench-out")
    output.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not asked.steps or step.name in asked.steps.split(",")]
    return _run_all(steps, record, device, asked.dry, output / NAME)


def _record(device: str, dry: bool) -> dict[str, Any] | None:
    """What the JSON says of machine and versions; None where the device is not there."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]
    import torch

    from benchmarks.devices import about
    from freemoe.core.environment import describe_environment, package_versions

    if device != "cpu" and not torch.cuda.is_available():
        return None
    return {
        "dry": dry,
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": about(device),
        "environment": describe_environment() | {"triton": package_versions(["triton"]).get("triton")},
        "budget": DRY_BUDGET if dry else BUDGET,
        "steps": [],
    }


def _run_all(steps: Sequence[Step], record: dict[str, Any], device: str, dry: bool, path: Path) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for step in steps:
            left = record["budget"] - (time.monotonic() - began)
            found = run(step, device, dry, left if dry else min(step.seconds, left), Path(scratch))
            record["steps"].append(found)
            record["seconds"] = round(time.monotonic() - began, 1)
            path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"{found['step']}: {found['status']}, {found.get('seconds', 0):.0f} s", flush=True)
            for line in found.get("lines", ()):
                print(f"    {line}")
            if found["status"] not in ("ok", "in part"):
                print("    " + found.get("error", "").strip().replace("\n", "\n    ")[-1500:])
    print(f"{record['device']['name']}, {record['seconds']:.0f} s -> {path}")
    return 0 if all(s["status"] == "ok" for s in record["steps"]) else 1


if __name__ == "__main__":
    sys.exit(main())
