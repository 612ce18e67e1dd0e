"""Artefacts to a hub and back; what stands there already is left alone."""

import os
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard

import freemoe
from freemoe.core.artifacts import MANIFEST
from freemoe.core.errors import ArtifactError, HubError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.pipeline import build
from freemoe.hub.push import artefact_files, copy_artefact, push_artefact
from tests.artefacts import rewritten
from tests.domain_experts.conftest import task_recipe
from tests.fake_hub import LARGE, READER, WRITER
from tests.rows import write_rows

# Of the hub's client, when a large file goes up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")


@pytest.fixture
def writer(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", WRITER)


def bytes_of(folder):
    return {name: path.read_bytes() for name, path in artefact_files(folder).items()}


# ------------------------------------------------------------------------- round trips


def test_experts_pushed_are_the_experts_that_come_back(hub, writer, experts, world):
    moe = FreeMoE.from_pretrained(world.model, experts)
    said = moe.push_to_hub("owner/experts", private=True, commit_message="First")
    there = hub.repositories["owner/experts"]
    assert (there.private, there.messages) == (True, ["", "First"])
    assert said["commit"] == there.branches["main"]
    assert said["url"] == f"{hub.url}/owner/experts"
    assert said["files"] == {name: len(data) for name, data in there.files().items() if name != ".gitattributes"}
    # Files of both ways of uploading, and one folder back.
    assert {size >= LARGE for size in said["files"].values()} == {True, False}
    back = FreeMoE.from_pretrained("owner/experts", base=world.model)
    here, come = bytes_of(experts), bytes_of(back.folder)
    assert b'freemoe.load("owner/experts"' in come.pop("README.md")
    assert here.pop("README.md")
    assert come == here
    with moe.expert(moe.experts[0]), torch.no_grad():
        wanted = moe(torch.arange(3, 27)[None]).logits
    with back.expert(back.experts[0]), torch.no_grad():
        torch.testing.assert_close(back(torch.arange(3, 27)[None]).logits, wanted, rtol=0, atol=0)


def test_the_other_kinds_go_and_come_back(hub, writer, kinds, cut):
    hub.add("maker/mixture", kinds.mixture)
    for name, folder in (("owner/trimmed", kinds.trimmed), ("owner/half", kinds.converted)):
        opened = freemoe.load(folder, device="cpu")
        text = opened.generate_text("a", max_new_tokens=3, do_sample=False)
        opened.push_to_hub(name)
        back = freemoe.load(name, device="cpu")
        assert back.generate_text("a", max_new_tokens=3, do_sample=False) == text
        assert bytes_of(back.folder).keys() == bytes_of(folder).keys()
    # Pushed again it is the same commit's content, and a file that is no more goes.
    hub.add("owner/trimmed", {**hub.repositories["owner/trimmed"].files(), "mine.txt": b"kept"})
    push_artefact(kinds.trimmed, "owner/trimmed")
    assert hub.repositories["owner/trimmed"].files()["mine.txt"] == b"kept"


def test_from_a_base_of_the_hub_to_experts_on_it(hub, writer, world, tmp_path, cut, monkeypatch):
    hub.add("maker/base", world.base)
    folder = build(task_recipe(world, tmp_path / "out", model="maker/base", domains={"law": [str(world.law)]}))
    # A folder that is called like the repository is in nobody's way.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "experts").mkdir(parents=True)
    assert not push_artefact(folder, "owner/experts")["note"]
    (tmp_path / "owner" / "experts").rmdir()
    header = ModelCard(hub.repositories["owner/experts"].files()["README.md"].decode()).data
    assert header.base_model == "maker/base"
    moe = FreeMoE.from_pretrained("owner/experts", device="cpu")
    text = moe.generate_text("a b", max_new_tokens=3, do_sample=False)
    cut()
    again = FreeMoE.from_pretrained("owner/experts", device="cpu")
    assert again.generate_text("a b", max_new_tokens=3, do_sample=False) == text


def test_files_of_the_artefact_before_go(hub, writer, kinds, tmp_path):
    old = copy_artefact(kinds.trimmed, tmp_path / "old")
    write_rows(old / "exports" / "old.json", [{}])
    push_artefact(rewritten(old, tmp_path / "older"), "owner/trimmed")
    assert "exports/old.json" in hub.repositories["owner/trimmed"].files()
    push_artefact(kinds.trimmed, "owner/trimmed")
    assert "exports/old.json" not in hub.repositories["owner/trimmed"].files()
    with pytest.raises(ArtifactError, match="there already and public"):
        push_artefact(kinds.trimmed, "owner/trimmed", private=True)


def test_a_branch(hub, writer, kinds):
    push_artefact(kinds.trimmed, "owner/trimmed", revision="v1")
    there = hub.repositories["owner/trimmed"]
    assert MANIFEST in there.files("v1")
    assert MANIFEST not in there.files("main")
    push_artefact(kinds.trimmed, "owner/trimmed", revision="v2")
    hub.add("maker/mixture", kinds.mixture)
    for how in ({"revision": "v2"}, {"token": READER, "revision": "v1"}):
        assert freemoe.load("owner/trimmed", device="cpu", **how).experts == ["trimmed", "base"]
    assert freemoe.load("owner/trimmed@v1", device="cpu").experts == ["trimmed", "base"]


def test_a_converted_model_needs_no_freemoe_on_the_hub(hub, kinds, tmp_path):
    push_artefact(kinds.converted, "owner/half", token=WRITER)
    code = (
        "import sys, torch\n"
        "sys.modules['freemoe'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained('owner/half', trust_remote_code=True)\n"
        "print(float(model(torch.arange(3, 27)[None]).logits.abs().sum()))\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    model = freemoe.load(kinds.converted, device="cpu").model
    with torch.no_grad():
        wanted = float(model(torch.arange(3, 27)[None]).logits.abs().sum())
    assert float(done.stdout.split()[-1]) == pytest.approx(wanted, rel=1e-4)


# ------------------------------------------------------------------------------- refusals


def test_what_stands_there_is_not_replaced(hub, writer, kinds, experts):
    hub.add("owner/plain", kinds.dense)
    hub.add("owner/files", {"notes.txt": b"x"})
    hub.add("owner/trimmed", kinds.trimmed)
    hub.add("owner/odd", {MANIFEST: b"[]"})
    before = {name: dict(r.branches) for name, r in hub.repositories.items()}
    for name, message in (
        ("owner/plain", r"a model \(config.json\) that freemoe did not write.*--overwrite"),
        ("owner/files", r"1 files that are no artefact of freemoe \(notes.txt\)"),
        ("owner/trimmed", "an artefact of kind 'trimmed-moe', and this is one of kind 'domain-experts'"),
        ("owner/odd", "no artefact"),
    ):
        with pytest.raises(ArtifactError, match=message):
            push_artefact(experts, name)
        with pytest.raises(ArtifactError, match=message):
            push_artefact(experts, name, revision="new")
    assert {name: dict(r.branches) for name, r in hub.repositories.items()} == before
    hub.add("owner/empty", {"README.md": b"words"})
    for name in ("owner/plain", "owner/empty"):
        push_artefact(experts, name, overwrite=True)
        held = {n for n in hub.repositories[name].files() if n != ".gitattributes"}
        assert held == set(artefact_files(experts))


def test_tokens(hub, kinds, monkeypatch):
    with pytest.raises(HubError, match=r"needs a token with the right to write.*HF_TOKEN.*hf auth login"):
        push_artefact(kinds.trimmed, "owner/trimmed")
    assert not [method for method, _ in hub.asked if method != "HEAD"]
    with pytest.raises(HubError, match=r"the hub forbids it \(HTTP 403\)"):
        push_artefact(kinds.trimmed, "owner/trimmed", token=READER)
    assert not hub.repositories
    hub.add("owner/secret", kinds.trimmed, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(HubError, match=r"'owner/secret'.*HTTP 403"):
        push_artefact(kinds.trimmed, "owner/secret")


def test_a_hub_that_is_not_there(gone, kinds, monkeypatch):
    with pytest.raises(
        HubError, match=f"Nothing can be pushed to 'owner/trimmed': the hub at {gone} cannot be reached"
    ):
        push_artefact(kinds.trimmed, "owner/trimmed", token=WRITER)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        push_artefact(kinds.trimmed, "owner/trimmed", token=WRITER)


def test_a_hub_that_fails_while_it_is_written_to(hub, writer, kinds):
    for part in ("repos/create", "preupload", "commit"):
        hub.failing, hub.asked = {part: 500}, []
        with pytest.raises(HubError, match=r"failed \(HTTP 500\)"):
            push_artefact(kinds.trimmed, "owner/trimmed")
        assert hub.count(part) <= 2


@pytest.mark.parametrize("name", ["owner", "a/b/c", "owner/na me", "owner/name@v1", "./owner/name", "../x"])
def test_no_name_of_a_repository(name, kinds):
    with pytest.raises(HubError, match=r"no name of a repository\. Write owner/name"):
        push_artefact(kinds.trimmed, name, dry=True)


def test_only_whole_artefacts_are_pushed_or_copied(kinds, tmp_path):
    with pytest.raises(ArtifactError, match="is not an artefact"):
        push_artefact(kinds.dense, "owner/plain", dry=True)
    copy_artefact(kinds.trimmed, tmp_path / "copy")
    (tmp_path / "copy" / "hookmoe_config.json").write_text("{}")
    with pytest.raises(ArtifactError, match="was cut short or edited"):
        push_artefact(tmp_path / "copy", "owner/trimmed", dry=True)
    with pytest.raises(ArtifactError, match="was cut short or edited"):
        copy_artefact(tmp_path / "copy", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# -------------------------------------------------------------------------------- copies


def test_copies(kinds, tmp_path):
    target = tmp_path / "deep" / "copy"
    assert copy_artefact(kinds.trimmed, target) == target
    assert bytes_of(target) == bytes_of(kinds.trimmed)
    assert copy_artefact(target, target) == target
    with pytest.raises(ArtifactError, match="exists already"):
        copy_artefact(kinds.trimmed, target)
    copy_artefact(kinds.converted, target, overwrite=True)
    assert bytes_of(target) == bytes_of(kinds.converted)
    (tmp_path / "mine").mkdir()
    for folder, fault in ((tmp_path / "mine", "is not an artefact"), (target, "holds 'notes.txt', which its manifest")):
        (folder / "notes.txt").write_text("x")
        with pytest.raises(ArtifactError, match=fault):
            copy_artefact(kinds.trimmed, folder, overwrite=True)
        assert (folder / "notes.txt").read_text() == "x"


def test_what_an_artefact_does_not_hold_is_not_pushed(experts, world):
    moe = FreeMoE.from_pretrained(world.model, experts)
    one = next(iter(moe._experts.values()))
    with pytest.raises(ArtifactError, match="This FreeMoE was not opened from an artefact"):
        FreeMoE(world.model, [one]).push_to_hub("owner/x", token=WRITER)
    moe._experts = {"mine": one, **moe._experts}
    with pytest.raises(ArtifactError, match=r"other experts \(mine, .*save_pretrained"):
        moe.push_to_hub("owner/x", token=WRITER)
