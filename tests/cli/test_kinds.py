"""Commands that take any artefact refuse what no row of the systems knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freemoe.core.errors import ArtifactError
from freemoe.systems import SYSTEMS, system_of
from tests.cli.conftest import Freemoe
from tests.test_systems import manifest
from tests.tiny import tiny_model


def test_a_kind_that_no_row_knows_is_refused_by_every_command(freemoe: Freemoe, tmp_path: Path) -> None:
    folder = tmp_path / "later"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"kind": "later"}))
    manifest(folder, "later", tmp_path, tiny_model("llama"))
    with pytest.raises(
        ArtifactError, match="kind 'later', which this freemoe does not know; it knows domain-experts, "
    ):
        system_of(folder)
    for line in (("inspect", str(folder)), ("report", str(folder)), ("generate", str(folder), "x")):
        done = freemoe(*line)
        assert done.code == 2
        assert "Install the freemoe that wrote it" in done.err
    assert system_of(tmp_path) is None
    assert len(SYSTEMS.names()) == 3
