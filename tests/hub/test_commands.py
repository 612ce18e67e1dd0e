"""The commands take names of the hub wherever they take an artefact."""

import json
import os
import subprocess
import sys

import pytest

from freemoe.hub.push import artefact_files
from tests.fake_hub import WRITER

# Of the hub's client, when a large file goes up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ran(freemoe, *line):
    done = freemoe(*line)
    assert done.code == 0, done.err
    return done.out


def test_every_command_takes_a_name(shelf, freemoe, world, here, cut):
    for name in ("owner/experts", "owner/trimmed"):
        ran(freemoe, "generate", name, "a b", "--max-new-tokens", "3", "--device", "cpu")
    # From here on all of it is in the cache.
    cut()
    assert "maker/base" in ran(freemoe, "inspect", "owner/experts")
    assert "hooks" in ran(freemoe, "inspect", "owner/trimmed")
    assert "llama" in ran(freemoe, "inspect", "maker/base")
    assert "law" in ran(freemoe, "report", "owner/experts", "--dry-run")
    line = ("eval", "owner/experts", "-d", f"law={world.law}", "-e", "law/0", "--device", "cpu")
    found = json.loads(ran(freemoe, *line, "--json"))
    # Its own seed carves its own split again, of which it has seen nothing.
    assert found["recipe"]["artefact"] == "owner/experts"
    assert found["seen"]["known"]
    assert list(found["domains"][0]["rows"]) == ["base", "law/0"]
    assert json.loads(ran(freemoe, *line, "--dry-run", "--json"))["base"] == "maker/base"
    ran(freemoe, "merge", "owner/experts", "law/0", "-o", "merged")
    config = json.loads((here / "merged" / "config.json").read_text())
    assert str(here / "cache") not in json.dumps(config)


def test_lm_evals_model_takes_a_name(shelf):
    pytest.importorskip("lm_eval")
    from freemoe.domain_experts.hosting.lm_eval_model import FreeMoELM

    found = FreeMoELM("owner/experts", device="cpu")
    assert found.moe is not None
    assert found.expert == "auto"
    assert found.witness.record is not None
    assert FreeMoELM("maker/base", artefact="owner/experts", device="cpu").moe is not None
    plain = FreeMoELM("maker/base", device="cpu")
    assert plain.moe is None
    assert plain.tokenizer_name == "maker__base"


def test_push(hub, freemoe, kinds, monkeypatch):
    line = ("push", str(kinds.trimmed), "owner/trimmed")
    outlook = json.loads(ran(freemoe, *line, "--dry-run", "--json"))
    assert not hub.asked
    assert outlook["schema"] == "freemoe.push-plan/1"
    assert {file["name"] for file in outlook["files"]} == set(artefact_files(kinds.trimmed))
    assert outlook["bytes"] == sum(file["bytes"] for file in outlook["files"])
    assert outlook["commit"] is None
    done = freemoe(*line)
    assert done.code == 2
    assert done.err.count("error:") == 1
    assert "hf auth login" in done.err
    monkeypatch.setenv("HF_TOKEN", WRITER)
    said = ran(freemoe, *line, "--message", "Mine", "--private")
    there = hub.repositories["owner/trimmed"]
    assert there.messages[-1] == "Mine"
    assert there.private
    assert there.branches["main"][:12] in said
    assert "note" not in said
    hub.add("owner/plain", kinds.dense)
    assert "--overwrite" in freemoe("push", str(kinds.trimmed), "owner/plain").err
    ran(freemoe, "push", str(kinds.trimmed), "owner/plain", "--overwrite", "--revision", "v1")
    assert "config.json" not in hub.repositories["owner/plain"].files("v1")
    assert "config.json" in hub.repositories["owner/plain"].files()


def test_push_says_that_the_base_is_a_place_of_this_machine(freemoe, artefact):
    assert "note: its base is " in ran(freemoe, "push", str(artefact), "owner/x", "--dry-run")


def test_one_message_where_the_hub_is_out_of_reach(gone, freemoe):
    for line in (
        ("generate", "owner/none", "a"),
        ("inspect", "owner/none"),
        ("merge", "owner/none", "x"),
        ("report", "owner/none"),
        ("build", "owner/none", "-d", "x=text:none.txt"),
    ):
        done = freemoe(*line)
        assert done.code == 2, line
        assert done.err.count("\n") == 1, done.err
        if line[0] != "build":
            assert f"the hub at {gone} cannot be reached" in done.err, line


@pytest.mark.parametrize(
    "line",
    [["build", "no/body", "-d", "a=demo:math"], ["eval", "no/body", "-d", "a=demo:math"], ["generate", "no/body", "x"]],
)
def test_what_is_out_of_reach_is_said_before_anything_heavy_is_loaded(line, tmp_path):
    code = (
        f"import sys; sys.argv = ['freemoe', *{line!r}]\n"
        "from freemoe.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n"
        "    assert stop.code == 2, stop.code\n    assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "'no/body': it is not in the cache, and HF_HUB_OFFLINE is set" in done.stderr
