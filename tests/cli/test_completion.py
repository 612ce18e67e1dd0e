"""What the shell completes, in each shell's own way, and that it takes no torch to do so."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freemoe.assets import BUNDLED, BUNDLED_MOE
from freemoe.cli.completion import BUNDLED as COMPLETED
from freemoe.domain_experts.recipe import METRICS
from freemoe.evals.tasks.benchmarks import BENCHMARKS
from freemoe.systems import SYSTEMS
from tests.test_architecture import HEAVY

PROGRAM = Path(sys.executable).with_name("freemoe")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with an artefact of two experts, a model and a GGUF file, by their names only."""
    monkeypatch.chdir(tmp_path)
    for name, file in (("experts", "freemoe_config.json"), ("base", "config.json"), ("other", "notes.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "experts" / "freemoe_config.json").write_text(
        json.dumps({"kind": "domain-experts", "experts": [{"name": "math/0"}, {"name": "law/all"}]})
    )
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "freemoe_config.json").write_text("{")
    (tmp_path / "model.gguf").write_text("")
    return tmp_path


def of_bash(line):
    """What bash sets when it asks for the end of a line; a space there begins a new word."""
    position = len(line.split()) - (not line.endswith(" "))
    return {"_FREEMOE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(position)}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("freemoe bui", ["build"]),
        ("freemoe build --orac", ["--oracle"]),
        ("freemoe build free", ["freemoe-demo", "freemoe-demo-moe"]),
        ("freemoe build ", [*COMPLETED, "base", "model.gguf"]),
        ("freemoe build sub/", []),
        ("freemoe inspect ", ["broken", "experts", *COMPLETED, "base", "model.gguf"]),
        ("freemoe report e", ["experts"]),
        ("freemoe generate experts hi --expert ", ["auto", "base", "math/0", "law/all"]),
        ("freemoe eval experts --expert l", ["law/all"]),
        ("freemoe merge experts m", ["math/0"]),
        ("freemoe merge broken ", ["auto", "base"]),
        ("freemoe merge nothing ", ["auto", "base"]),
        ("freemoe build m --metric ", METRICS),
        ("freemoe build m --metric wanda,r", ["wanda,random"]),
        ("freemoe build m --scope ", ["row", "layer"]),
        ("freemoe build m --search h", ["halving"]),
        ("freemoe build m --purify gr", ["greedy"]),
        ("freemoe build m --domain math=gs", ["math=gsm8k"]),
        ("freemoe build m --domain math=gsm8k,mathq", ["math=gsm8k,mathqa"]),
        ("freemoe convert m --method static-m", ["static-magnitude"]),
        ("freemoe trim m --loss ", ["kd", "lm", "state"]),
        ("freemoe eval m --device d", ["disk"]),
        ("freemoe eval m --dtype b", ["bfloat16"]),
        ("freemoe ls me", ["metrics"]),
        ("freemoe schema conv", ["converted", "convert", "convert-plan"]),
    ],
)
def test_names_are_completed(line, expected, here, freemoe, monkeypatch):
    for name, value in of_bash(line).items():
        monkeypatch.setenv(name, value)
    done = freemoe()
    assert (done.code, done.err, done.out.split()) == (0, "", expected)


def test_what_is_completed_is_what_there_is():
    assert COMPLETED == (BUNDLED, BUNDLED_MOE)
    assert SYSTEMS.loaded_names() == SYSTEMS.names()
    assert "gsm8k" in BENCHMARKS


def run(home, *arguments):
    """What the program prints for whoever lives there."""
    environ = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1", "HOME": str(home), "ZDOTDIR": str(home)}
    environ = {**os.environ, **environ, "XDG_CONFIG_HOME": str(home / ".config")}
    done = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60, env=environ, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_script(shell, tmp_path):
    script = run(tmp_path, "--show-completion", shell)
    assert "_FREEMOE_COMPLETE" in script
    program = shutil.which(shell)
    if program:
        checked = subprocess.run([program, "-n"], input=script, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stderr
    assert "completion installed in" in run(tmp_path, "--install-completion", shell)
    written = [p for p in tmp_path.rglob("*") if p.is_file() and "_FREEMOE_COMPLETE" in p.read_text()]
    assert len(written) == 1


def test_bash_itself_completes(here):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash")
    typed = """
COMP_WORDS=(freemoe merge experts ma); COMP_CWORD=3
_freemoe_completion freemoe
echo "${COMPREPLY[@]}"
"""
    script = run(here, "--show-completion", "bash") + typed
    environ = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [bash, "--norc"], input=script, capture_output=True, text=True, cwd=here, env=environ, check=True
    )
    assert done.stdout.split() == ["math/0"]


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [("zsh", "freemoe ls me", '"metrics"'), ("fish", "freemoe merge experts ma", "math/0")],
)
def test_zsh_and_fish_are_answered(shell, line, expected, here, freemoe, monkeypatch):
    monkeypatch.setenv("_FREEMOE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    done = freemoe().ok()
    assert expected in done.out


@pytest.mark.parametrize("line", ["freemoe build m --metric ", "freemoe merge experts ", "freemoe schema "])
def test_completion_loads_nothing_heavy(line, here):
    code = """
import sys
sys.argv = ["freemoe"]
from freemoe.cli import main
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("LOADED", *sorted({m.split(".")[0] for m in sys.modules}))
"""
    environ = {**os.environ, **of_bash(line)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, cwd=here, check=True
    )
    offered, loaded = done.stdout.rsplit("LOADED", 1)
    assert offered.strip()
    assert not set(HEAVY) & set(loaded.split())
