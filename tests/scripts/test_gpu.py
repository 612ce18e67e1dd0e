"""`make gpu`: every step runs at a small size on the CPU, fails by itself alone, and leaves its record."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from benchmarks.harness import ON_DEVICES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import gpu  # noqa: E402


def dry(folder, *flags):
    command = [sys.executable, str(ROOT / "scripts" / "gpu.py"), "--dry", "-o", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


@pytest.mark.hardening
def test_every_step_runs(tmp_path):
    done, record = dry(tmp_path)
    steps = {step.pop("step"): step for step in record["steps"]}
    assert list(steps) == [step.name for step in gpu.STEPS]
    assert {step["status"] for step in steps.values()} == {"ok"}, done.stdout
    assert done.returncode == 0
    tests = steps.pop("tests")
    assert tests["tests"] > 20
    assert tests["failures"] == tests["errors"] == 0
    for step in steps.values():
        assert all(figure["value"] is not None for figure in step.get("figures", ()))
    assert len(steps["large"]["lines"]) == 5
    assert all("bytes per candidate" in line for line in steps["memory"]["lines"][-2:])
    assert record["dry"] is True
    assert record["device"] == {"name": "cpu"}
    assert record["environment"]["packages"]["torch"]
    assert record["seconds"] >= sum(step.get("seconds", 0) for step in steps.values())


def test_a_step_that_fails_or_hangs_says_so_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    left = "import json; print('begun', flush=True); json.dump({'figures': [FIGURE], 'details': {}}, open('OUT', 'w'))"
    figure = {"line": "speed: not measured; out of memory", "value": None}
    codes = {
        "breaks": "raise SystemExit('no such kernel')",
        "hangs": "import subprocess, sys, time; print('begun', flush=True); time.sleep(600)",
        "half": left.replace("FIGURE", str(figure)),
        "whole": left.replace("FIGURE", str({"line": "speed: 2.00x", "value": 2.0})) + "; raise SystemExit(1)",
    }
    steps = [gpu.Step(name, "for this test", 6 if name == "hangs" else 60, name) for name in codes]

    def command(step, device, dry, scratch):
        return [sys.executable, "-c", codes[step.name].replace("OUT", str(scratch / f"{step.bench}.json"))]

    monkeypatch.setattr(gpu.Step, "command", command)
    record = {"device": {"name": "cpu"}, "budget": 480.0, "steps": []}
    assert gpu._run_all(steps, record, "cuda", False, tmp_path / "gpu.json") == 1
    found = {s["step"]: s for s in json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["steps"]}
    statuses = {name: step["status"] for name, step in found.items()}
    assert statuses == {"breaks": "failed", "hangs": "timed out", "half": "in part", "whole": "ok"}
    assert found["breaks"]["error"] == "no such kernel"
    assert found["hangs"]["error"] == "begun"
    assert found["half"]["holes"] == [figure["line"]]
    assert "no such kernel" in capsys.readouterr().out


def test_no_step_is_begun_without_time(monkeypatch, tmp_path):
    record = {"device": {"name": "cpu"}, "budget": 4.0, "steps": []}
    gpu._run_all(gpu.STEPS[:2], record, "cuda", False, tmp_path / "gpu.json")
    assert [step["status"] for step in record["steps"]] == ["no time left"] * 2


def test_without_a_device_nothing_is_begun(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu, "missing", lambda dry: [])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["-o", str(tmp_path)]) == 2
    assert "make gpu DRY=1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_that_is_missing_is_said_at_once(monkeypatch, tmp_path, capsys):
    there = gpu.importlib.util.find_spec
    gone = ("pydantic", "pydantic_core", "yaml", "peft", "triton")
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None if name in gone else there(name))
    real = gpu.metadata.version
    monkeypatch.setattr(gpu.metadata, "version", lambda name: "2.1.0" if name == "torch" else real(name))
    assert gpu.main(["-o", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    for text in ("torch>=2.9 (there is 2.1.0)", "pydantic>=2.8", "pydantic-core", "pyyaml>=6", "peft>=0.18", "triton"):
        assert text in said
    assert "triton" not in gpu.missing(dry=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    wanted = {text for text in project["dependencies"] if not text.startswith(gpu.SPARED)}
    assert wanted <= set(gpu.missing(dry=False))


def test_steps_are_benchmarks_that_go_to_devices_and_fit_the_time():
    assert {step.bench for step in gpu.STEPS if step.bench} == set(ON_DEVICES)
    assert sum(step.seconds for step in gpu.STEPS) <= 1.1 * gpu.BUDGET
    with pytest.raises(SystemExit):
        gpu.main(["--steps", "nonsense"])


def test_make_gpu_asks_for_this_script():
    for flags, expected in (((), "scripts/gpu.py"), (("DRY=1",), "scripts/gpu.py --dry")):
        command = ["make", "-n", "--no-print-directory", "gpu", *flags]  # a make that calls this test would say where
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout.strip().endswith(expected), done
