"""Commands that take any artefact refuse what no row of the systems knows."""

import json

import pytest

from freemoe.artefacts import load
from freemoe.core.artifacts import write_manifest
from freemoe.core.errors import ArtifactError, RecipeError
from freemoe.systems import SYSTEMS, system_of

BODY = {"base_model_name_or_path": "base", "base_fingerprint": "0" * 64, "freemoe_version": "0", "revision": None}


def test_a_kind_that_no_row_knows_is_refused_by_every_command(freemoe, tmp_path):
    folder = tmp_path / "later"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"kind": "later"}))
    write_manifest(folder, {**BODY, "kind": "later"})
    with pytest.raises(
        ArtifactError, match="kind 'later', which this freemoe does not know; it knows domain-experts, "
    ):
        system_of(folder)
    for line in (
        ("inspect", str(folder)),
        ("report", str(folder)),
        ("generate", str(folder), "x"),
        ("merge", str(folder), "x"),
    ):
        freemoe(*line).refused("Install the freemoe that wrote it")
    assert system_of(tmp_path) is None
    assert len(SYSTEMS.names()) == 3


@pytest.mark.parametrize(
    ("kind", "message"), [("converted", "whole model already"), ("trimmed-moe", "Use freemoe.load")]
)
def test_what_no_plain_checkpoint_can_say_is_not_merged(kind, message, freemoe, tmp_path):
    folder = tmp_path / "made"
    folder.mkdir()
    write_manifest(folder, {**BODY, "kind": kind})
    freemoe("merge", str(folder), "base", "-o", str(tmp_path / "out")).refused("cannot be merged", message)
    assert not (tmp_path / "out").exists()


def test_what_is_converted_or_trimmed_lies_on_one_device(tmp_path):
    for kind in ("converted", "trimmed-moe"):
        folder = tmp_path / kind
        folder.mkdir()
        write_manifest(folder, {**BODY, "kind": kind})
        with pytest.raises(RecipeError, match="needs all of it on one device, and 'disk' spreads it"):
            load(folder, device="disk")
