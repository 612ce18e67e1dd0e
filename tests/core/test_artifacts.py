"""Artefacts: whole or refused."""

import json
import shutil

import pytest

from freemoe.core.artifacts import FORMAT, MANIFEST, read_manifest, write_manifest
from freemoe.core.errors import ArtifactError


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "experts"
    (root / "deep").mkdir(parents=True)
    (root / "units").mkdir()
    (root / "experts.safetensors").write_bytes(b"tensors")
    (root / "deep" / "more.json").write_bytes(b"{}")
    (root / "units" / "left.safetensors").write_bytes(b"x")
    (root / "journal.jsonl").write_bytes(b"line\n")
    (root / "identity.json").write_bytes(b"{}")
    write_manifest(root, {"kind": "domain-experts", "name": "ü"})
    return root


def test_the_manifest_vouches_for_what_belongs_to_the_artefact(folder):
    manifest = read_manifest(folder)
    assert manifest["format"] == FORMAT
    assert manifest["name"] == "ü"
    assert sorted(manifest["files"]) == ["deep/more.json", "experts.safetensors"]
    # Neither files beside it nor its layout matter.
    (folder / "report.html").write_text("made later")
    (folder / "journal.jsonl").unlink()
    (folder / MANIFEST).write_text(json.dumps(dict(reversed(manifest.items()))))
    assert read_manifest(str(folder)) == manifest


def edit(name, change):
    def harm(folder):
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return harm


def manifest_with(**changes):
    """Change entries of the manifest, or drop those set to None."""

    def harm(folder):
        body = json.loads((folder / MANIFEST).read_text())
        kept = {k: v for k, v in {**body, **changes}.items() if v is not None}
        (folder / MANIFEST).write_text(json.dumps(kept))

    return harm


HARM = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"is not an artefact: it has no {MANIFEST}"),
    "nothing there": (shutil.rmtree, "is not an artefact: there is nothing of that name. Give the folder that"),
    "an empty folder": (lambda f: (shutil.rmtree(f), f.mkdir()), "is not an artefact: the folder is empty. Give"),
    "a plain file": (lambda f: (shutil.rmtree(f), f.touch()), "is not an artefact: it is a file. Give"),
    "empty manifest": (edit(MANIFEST, lambda b: b""), "is damaged"),
    "cut manifest": (edit(MANIFEST, lambda b: b[: len(b) // 2]), "is damaged"),
    "binary manifest": (edit(MANIFEST, lambda b: b"\xff\xfe"), "is damaged"),
    "manifest of another shape": (edit(MANIFEST, lambda b: b"[]"), "is not whole"),
    "manifest without files": (manifest_with(files=None), "is not whole"),
    "files of another shape": (manifest_with(files=["a"]), "is not whole"),
    "manifest without format": (manifest_with(format=None), "is not whole"),
    "newer format": (manifest_with(format=FORMAT + 1), f"has format {FORMAT + 1}; this freemoe reads format {FORMAT}"),
    "older format": (manifest_with(format=1, checksum=None), "Install the freemoe that wrote it"),
    "edited manifest": (manifest_with(name="another"), f"{MANIFEST}' in .* was edited"),
    "edited and added to": (manifest_with(extra=1), "was edited"),
    "one vouched file fewer": (manifest_with(files={"deep/more.json": "0"}), "was edited"),
    "no checksum of its own": (manifest_with(checksum=None), "was edited"),
    "cut file": (edit("experts.safetensors", lambda b: b[:-1]), "'experts.safetensors'.*cut short or edited"),
    "edited file": (edit("deep/more.json", lambda b: b"[]"), "'deep/more.json'.*cut short or edited"),
    "missing file": (lambda f: (f / "deep" / "more.json").unlink(), "lacks 'deep/more.json'"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_harmed_artefact_is_refused(case, folder):
    harm, message = HARM[case]
    harm(folder)
    with pytest.raises(ArtifactError, match=message):
        read_manifest(folder)


def test_checksums_can_be_left_out(folder):
    edit("experts.safetensors", lambda b: b[:-1])(folder)
    manifest_with(name="another")(folder)
    assert read_manifest(folder, check=False)["name"] == "another"


def test_what_json_has_no_word_for_comes_back_vouched_for(tmp_path):
    write_manifest(tmp_path, {"kind": "k", "layers": (0, 2), "share": 0.1 + 0.2, "none": None})
    assert read_manifest(tmp_path)["layers"] == [0, 2]


def test_an_unfinished_run_is_pointed_to(tmp_path):
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(ArtifactError, match=r"An unfinished run stands at .*out.partial"):
        read_manifest(tmp_path / "out")
