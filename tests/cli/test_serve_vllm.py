"""`freemoe serve --engine vllm` without vLLM: the command that would be run, and what is refused."""

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from freemoe.core.artifacts import write_manifest
from freemoe.core.version import __version__
from freemoe.hookmoe.adapter import Trimmed, save_adapter
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.tomoe.export import export_converted_model
from tests.serve.conftest import free_port
from tests.tiny import tiny_model
from tests.tomoe.random_structures import random_structure

KEY = "a-key-of-ours"


def environment(folder, **packages):
    """A python with packages of these names; their text is their version."""
    folder.mkdir()
    for name, version in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} -S "$@"\n')
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def python(tmp_path, monkeypatch):
    for name in ("FREEMOE_API_KEY", "FREEMOE_VLLM_PYTHON", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return environment(tmp_path / "environment", vllm="0", freemoe=__version__)


def options(command):
    """Options of a command, and what stands behind each, the last of each name."""
    found = {}
    for part in command:
        if part.startswith("--"):
            found[name := part] = []
        elif found:
            found[name].append(part)
    return found


def test_a_dry_run_prints_the_command(folders, freemoe, python):
    line = ["serve", str(folders.own), "--engine", "vllm", "--vllm-python", python, "--dry-run", "--json"]
    done = freemoe(*line, "--context", "100", "--max-batch", "3", "--port", "8123", "--api-key", KEY).ok()
    found = done.json
    assert found["models"] == ["base", "base:a", "base:b"]
    command = shlex.split(found["command"])
    assert command[:3] == [python, "-m", "vllm.entrypoints.openai.api_server"]
    asked = options(command)
    assert asked["--served-model-name"] == found["models"]
    assert json.loads(asked["--hf-overrides"][0])["quantization_config"]["experts"] == str(folders.own)
    wanted = {
        "--host": "127.0.0.1",
        "--port": "8123",
        "--dtype": "float32",
        "--max-model-len": "100",
        "--max-num-seqs": "3",
    }
    assert {name: asked[name][0] for name in wanted} == wanted
    # 100 tokens take a block of 128, and one sequence more than those that are written fits: of 128 bytes a token.
    assert asked["--kv-cache-memory-bytes"] == [str(found["slot_bytes"] // 100 * 128 * 4)]
    assert KEY not in done.out + done.err


def test_experts_on_a_base_and_a_plain_model(folders, freemoe, python):
    line = ["--engine", "vllm", "--vllm-python", python, "--dry-run", "--json", "--dtype", "bfloat16"]
    found = freemoe("serve", str(folders.base), "--experts", str(folders.own), *line).json
    asked = options(shlex.split(found["command"]))
    assert asked["--model"] == [str(folders.base)]
    assert asked["--dtype"] == ["bfloat16"]
    assert "--middleware" in asked
    found = freemoe("serve", str(folders.base), *line).json
    plain = options(shlex.split(found["command"]))
    assert plain["--served-model-name"] == found["models"] == ["base"]
    assert not {"--middleware", "--hf-overrides", "--worker-cls"} & set(plain)


def test_it_becomes_vllm_with_the_key_in_the_environment_alone(folders, freemoe, python, monkeypatch):
    ran = []

    def become(*what):
        ran.append(what)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execve", become)
    monkeypatch.setenv("FREEMOE_VLLM_PYTHON", python)
    monkeypatch.setenv("FREEMOE_API_KEY", KEY)
    line = f"--engine vllm --host 0.0.0.0 --port {free_port()} --threads 3".split()
    freemoe("serve", str(folders.own), *line).ok()
    ((program, command, environ),) = ran
    assert program == command[0] == python
    assert environ["VLLM_API_KEY"] == KEY
    assert KEY not in " ".join(command)
    assert (environ["OMP_NUM_THREADS"], environ["VLLM_CPU_OMP_THREADS_BIND"]) == ("3", "nobind")
    assert options(command)["--host"] == ["0.0.0.0"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["{own}", "--on", "ray"], "--on is of freemoe's own engine"),
        (["{own}", "--queue", "256"], "--queue is of freemoe's own engine"),
        (["{own}", "--expert-root", "."], "--expert-root is of"),
        (["{own}", "--device", "cpu"], "--device is of"),
        (["{base}", "--experts", "{own}", "--experts", "{more}"], "experts of one folder"),
        (["{own}", "--experts", "{more}"], "experts of one folder"),
        (["{base}", "--experts", "x-={more}"], "keep their names"),
        (["{own}", "--host", "0.0.0.0"], "FREEMOE_API_KEY"),
        (["{own}", "--context", "10000"], "at most 256"),
        (["{gguf}"], "is a file"),
        (["{own}", "--vllm-python", "nowhere/python"], "no program"),
        (["{own}", "--vllm-python", "{broken}"], "does not run as a python"),
        (["{own}", "--vllm-python", "{bare}"], "lacks vLLM"),
        (["{own}", "--vllm-python", "{alone}"], "lacks freemoe"),
        (["{own}", "--vllm-python", "{older}"], f"lacks freemoe {__version__} (it has 0.0.9)"),
    ],
)
def test_what_is_refused(folders, freemoe, python, tmp_path, line, words):
    places = {**vars(folders), "gguf": tmp_path / "a.gguf"}
    places["gguf"].write_bytes(b"GGUF")
    places["bare"] = environment(tmp_path / "bare", freemoe=__version__)
    places["alone"] = environment(tmp_path / "alone", vllm="0")
    places["older"] = environment(tmp_path / "older", vllm="0", freemoe="0.0.9")
    places["broken"] = environment(tmp_path / "broken")
    Path(places["broken"]).write_text("#!/bin/sh\nexit 3\n")
    given = [part.format(**places) for part in line]
    named = [] if "--vllm-python" in given else ["--vllm-python", python]
    freemoe("serve", *given, *named, "--engine", "vllm", "--dry-run").refused(words)


def test_without_vllm_it_says_where_vllm_lives(folders, freemoe, python, monkeypatch):
    monkeypatch.setattr("freemoe.serve.vllm.launch.find_spec", lambda name: None)
    line, words = ["serve", str(folders.own)], ("environment of its own", "docs/vllm.md", "FREEMOE_VLLM_PYTHON")
    freemoe(*line, "--engine", "vllm").refused("--vllm-python", *words)
    freemoe(*line, "--vllm-python", python).refused("--vllm-python is of --engine vllm")
    freemoe(*line, "--engine", "tgi").refused("allowed: freemoe, vllm")


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Folders of the two other commands: two conversions, and two trims with their bases."""
    root, found = tmp_path_factory.mktemp("others"), SimpleNamespace()
    for family in ("llama", "phi"):
        model = tiny_model(family)
        export_converted_model(model, random_structure(model), root / family)
        write_manifest(root / family, {"kind": "converted", "freemoe_version": "0"})
        setattr(found, family, root / family)
    for family in ("mixtral", "gpt_oss"):
        model, folder = tiny_model(family), root / family
        model.save_pretrained(folder / "base")
        save_adapter(Trimmed(plan_of(model)), model, folder)
        body = {"kind": "trimmed-moe", "freemoe_version": "0", "base_model_name_or_path": str(folder / "base")}
        write_manifest(folder, body)
        setattr(found, family, folder)
    return found


def test_converted_and_trimmed_models(others, freemoe, python):
    line = ["--engine", "vllm", "--vllm-python", python, "--dry-run", "--json"]
    found = freemoe("serve", str(others.llama), *line).json
    asked = options(shlex.split(found["command"]))
    assert asked["--model"] == [str(others.llama)]
    assert asked["--served-model-name"] == found["models"] == ["base", "base:converted"]
    assert "--enforce-eager" in asked
    assert "--middleware" not in asked
    found = freemoe("serve", str(others.mixtral), *line).json
    asked = options(shlex.split(found["command"]))
    assert asked["--model"] == [found["base"]] == [str(others.mixtral / "base")]
    # Its base as it is would be another model.
    assert asked["--served-model-name"] == found["models"] == ["base:trimmed"]
    own = {"architectures": ["TrimmedMixtralForCausalLM"], "freemoe_trimmed": str(others.mixtral)}
    assert json.loads(asked["--hf-overrides"][0]) == own
    for folder, words in ((others.phi, "tomoe_phi"), (others.gpt_oss, "gpt_oss")):
        freemoe("serve", str(folder), *line[:-1]).refused(words, "freemoe's own")
