"""An expert that the significance test rejected is the base, and is called so wherever experts are named."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from freemoe import FreeMoE
from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.artefact import inspect_artefact
from freemoe.serve.catalogue import ExpertCatalogue
from tests.domain_experts.conftest import artefact, world  # noqa: F401  (fixtures)
from tests.domain_experts.structured.artefacts import unit_artefact
from tests.serve.conftest import served


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Three experts and ``law/none``, which was rejected."""
    return unit_artefact(tmp_path_factory.mktemp("rejected"))


def test_it_is_not_merged_unasked(built, tmp_path, freemoe):
    for names in (["law/none"], ["law/single", "law/none", "--op", "union"], ["law/single+law/none"]):
        for dry in ([], ["--dry-run"]):
            freemoe("merge", str(built), *names, "-o", str(tmp_path / "m"), *dry).refused(
                "'law/none' was rejected", "--allow-rejected"
            )
            assert not (tmp_path / "m").exists()
    done = freemoe("merge", str(built), "law/none", "-o", str(tmp_path / "m"), "--allow-rejected").ok()
    assert "0 weights are zero" in done.out
    base, merged = (
        AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (built.parent / "base", tmp_path / "m")
    )
    assert all(torch.equal(merged[name], value) for name, value in base.items())
    moe = FreeMoE.from_pretrained(built)
    assert moe.rejected == ["law/none"]
    with pytest.raises(ArtifactError, match="'law/none' was rejected"):
        moe.merge_and_save("law/none", tmp_path / "n")
    with pytest.raises(ArtifactError, match="allow_rejected=True"):
        moe.merge_and_unload("law/none")
    assert moe.merge_and_unload("law/none", allow_rejected=True) is moe.model


def test_lists_mark_it(built, freemoe, capsys):
    rows = freemoe("inspect", str(built), "--json").json["experts"]
    assert {row["name"]: row["accepted"] for row in rows} == {
        "law/all": None,
        "law/free": None,
        "law/single": None,
        "law/none": False,
    }
    plan = freemoe("serve", str(built), "--dry-run", "--json").json
    assert len(plan["models"]) == 5
    assert plan["rejected"] == ["base:law/none"]
    for name, marked in (("law/none", True), ("law/single", False), ("base", False)):
        said = freemoe("generate", str(built), "court", "--expert", name, "--dry-run").ok().err
        said = said[said.index("expert: ") :]
        assert said.startswith(f"expert: {name}")
        assert ("rejected" in said) is marked
        assert freemoe("generate", str(built), "x", "--expert", name, "--dry-run", "--json").json["rejected"] is marked
    capsys.readouterr()
    FreeMoE.from_pretrained(built).print_expert_summary()
    table = capsys.readouterr().out.splitlines()
    assert ["rejected" in line for line in table] == [False, False, False, False, True]


def test_models_mark_it(built):
    marks = {"base": None, "base:law/all": None, "base:law/free": None, "base:law/single": None, "base:law/none": True}
    with served(FreeMoE.from_pretrained(built)) as there:
        rows = there.client.get("/v1/models").json()["data"]
        assert {row["id"]: row.get("rejected") for row in rows} == marks
        experts = there.client.get("/v1/freemoe/experts").json()["data"]
        assert [row["name"] for row in experts if row["accepted"] is False] == ["law/none"]
    # The same where experts are put onto the base when they are asked for.
    assert ExpertCatalogue().with_artefact(built, "x-").rejected_experts == ["x-law/none"]


def test_inspect_says_what_the_build_found(artefact):  # noqa: F811
    subs = [s for d in json.loads((artefact / "result.json").read_text())["domains"] for s in d["subdomains"]]
    found = inspect_artefact(artefact)["experts"]
    for row, sub in zip(found, subs, strict=True):
        gain = sub["rows"]["expert"]["gain"]
        assert (row["name"], row["verdict"], row["accepted"]) == (sub["name"], sub["verdict"], sub["chosen"] != "base")
        assert [row["gain"], row["gain_low"], row["gain_high"]] == [gain[end] for end in ("mean", "low", "high")]
        assert row["gain_unit"]
