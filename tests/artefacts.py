"""Artefacts that are edited and whose checksums are made right again: a checksum is no signature."""

import json
import shutil

from safetensors.torch import load_file, save_file

from freemoe.core.artifacts import MANIFEST, write_manifest
from freemoe.models.checkpoints.fingerprint import fingerprint_model


def rewritten(source, target, *, manifest=None, **files):
    """A copy of an artefact with other contents and right checksums.

    Args:
        source: The artefact.
        target: Where the copy shall stand; what stands there is replaced.
        manifest: Changes what it says of itself.
        files: Stem of a safetensors or JSON file of it -> changes its contents.
    """
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    for stem, edit in files.items():
        path = next(p for p in target.iterdir() if p.stem == stem)
        if path.suffix == ".json":
            held = json.loads(path.read_text())
            edit(held)
            path.write_text(json.dumps(held))
        else:
            held = load_file(path)
            edit(held)
            save_file(held, path, metadata={"format": "pt"})
    said = json.loads((target / MANIFEST).read_text())
    if manifest is not None:
        manifest(said)
    write_manifest(target, {k: v for k, v in said.items() if k not in ("format", "files", "checksum")})
    return target


def finish_artefact(folder, kind, base, name="tiny", **said):
    """Write the manifest of an artefact for a base that is called ``name``, whose other files are there; returns its folder."""
    body = {"kind": kind, "base_model_name_or_path": name, "base_fingerprint": fingerprint_model(base)}
    write_manifest(folder, {**body, "freemoe_version": "0", "revision": None, **said})
    return folder


def rename(held, old, new):
    """Give an entry another key."""
    held[new] = held.pop(old)
