"""An expert of units as a checkpoint of its own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from freemoe.core.errors import ArtifactError
from freemoe.domain_experts.hosting.merging import merge
from freemoe.domain_experts.mixture import FreeMoE
from tests.domain_experts.structured.artefacts import mixture_artefact, unit_artefact
from tests.tiny import IDS, logits


def cut_out(artefact, expert, folder):
    return merge(artefact, expert, folder, shrink=True)["folder"]


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    return unit_artefact(tmp_path_factory.mktemp("merge"))


def test_the_small_checkpoint_computes_what_the_expert_does(artefact, tmp_path):
    folder = cut_out(artefact, "law/all", tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(folder)
    moe = FreeMoE.from_pretrained(None, artefact)
    wanted = moe(IDS, expert="law/all").logits
    assert (wanted - moe(IDS, expert="base").logits).abs().max() > 1e-3
    torch.testing.assert_close(logits(small), wanted, atol=1e-5, rtol=0)
    # The artefact belongs to the whole base, and to it only.
    with pytest.raises(ArtifactError, match="made for the base"):
        FreeMoE.from_pretrained(folder, artefact)


def test_experts_of_a_mixture_are_cut_out_and_never_left_as_zeros(tmp_path):
    artefact = mixture_artefact(tmp_path)
    folder = cut_out(artefact, "law/all", tmp_path / "small")
    small = AutoModelForCausalLM.from_pretrained(folder)
    moe = FreeMoE.from_pretrained(None, artefact)
    assert small.config.num_local_experts == moe.config.num_local_experts - 1
    torch.testing.assert_close(logits(small), moe(IDS, expert="law/all").logits, atol=1e-5, rtol=0)
    assert torch.equal(moe(IDS, expert="base").logits, logits(moe.model))
    # A router would choose experts that are nothing but zeros.
    with pytest.raises(ArtifactError, match="--shrink"):
        moe.merge_and_save("law/all", tmp_path / "zeros")
    with pytest.raises(ArtifactError, match="--shrink"):
        merge(artefact, "law/all", str(tmp_path / "zeros"), dry=True)
    assert not (tmp_path / "zeros").exists()


@pytest.mark.parametrize(("name", "words"), [("law/none", "--select argmax"), ("law/al", "law/all")])
def test_other_experts_cannot_be_cut_out(artefact, tmp_path, name, words):
    with pytest.raises(Exception, match=words):
        cut_out(artefact, name, tmp_path / "small")
    assert not list(tmp_path.iterdir())
