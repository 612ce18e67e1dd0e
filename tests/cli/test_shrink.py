"""`freemoe merge --shrink`: an expert of units as a smaller checkpoint, and what is refused before anything is loaded."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from freemoe.domain_experts.mixture import FreeMoE
from tests.cli.conftest import document
from tests.domain_experts.structured.artefacts import mixture_artefact, unit_artefact

IDS = torch.arange(5, 33).reshape(2, 14)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    return unit_artefact(tmp_path_factory.mktemp("shrink"))


def test_the_folder_is_a_smaller_model_that_computes_the_same(artefact, freemoe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = ["merge", str(artefact), "law/all", "-o", "small", "--shrink", "--json"]
    assert document(freemoe(*arguments, "--dry-run"), "merge-plan")["shrink"] is True
    assert not list(tmp_path.iterdir())
    found = document(freemoe(*arguments), "merge")
    assert found["folder"] == "small"
    assert found["bytes"]["model.safetensors"] == (tmp_path / "small" / "model.safetensors").stat().st_size
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert small.config.intermediate_size == 32
    assert AutoTokenizer.from_pretrained(tmp_path / "small")("a")["input_ids"]
    with torch.no_grad():
        wanted = FreeMoE.from_pretrained(None, artefact)(IDS, expert="law/all").logits
        torch.testing.assert_close(small(input_ids=IDS).logits, wanted, atol=1e-5, rtol=0)

    freemoe(*arguments[:-1]).refused("'small' exists already", "--overwrite")
    (tmp_path / "small" / "left.txt").write_text("x")
    freemoe(*arguments[:-1], "--overwrite").refused("'small' also holds 'left.txt'")
    (tmp_path / "small" / "left.txt").unlink()
    assert freemoe(*arguments, "--overwrite").code == 0
    (tmp_path / "other").mkdir()
    freemoe(*arguments[:4], "other", "--shrink", "--overwrite").refused("is no model folder")


def test_pad_fills_a_free_layout_up(artefact, freemoe, tmp_path):
    arguments = ["merge", str(artefact), "law/free", "-o", str(tmp_path / "small"), "--shrink"]
    freemoe(*arguments).refused("different numbers of units", "--pad")
    assert not list(tmp_path.iterdir())
    done = freemoe(*arguments, "--pad").ok()
    assert "its units are cut out" in done.out
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").config.intermediate_size == 48


def test_units_of_two_experts_are_cut_out_together(artefact, freemoe, tmp_path):
    both = ["merge", str(artefact), "law/all", "law/free", "--op"]
    done = freemoe(*both, "union", "--shrink", "--pad", "-o", str(tmp_path / "small")).ok()
    assert "law/all+law/free: its units are cut out" in done.out
    small = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    # Layer 0 loses 16 neurons and 2 more, layer 1 its 16.
    assert small.config.intermediate_size == 32
    with torch.no_grad():
        wanted = FreeMoE.from_pretrained(None, artefact)(IDS, expert="law/all+law/free").logits
        torch.testing.assert_close(small(input_ids=IDS).logits, wanted, atol=1e-5, rtol=0)
    freemoe(*both, "intersection", "--shrink", "-o", str(tmp_path / "other")).refused(
        "different numbers of units", "--pad"
    )


def test_refused_before_anything_is_loaded(artefact, freemoe, monkeypatch):
    monkeypatch.setattr("freemoe.domain_experts.mixture.load_own_base", lambda *a: pytest.fail("the base was loaded"))
    out = str(artefact)
    freemoe("merge", out, "law/all", "--shrink", "--gguf", "f16").refused("exclude each other", "convert_hf_to_gguf")
    freemoe("merge", out, "law/all", "--pad").refused("--pad fills up what --shrink leaves")
    freemoe("merge", out, "law/single", "--shrink").refused("of kind 'switch'", "--unit neuron")
    freemoe("merge", out, "base", "--shrink").refused("of kind 'base'", "nothing can be cut out")
    combine = ("merge", out, "law/all", "law/single")
    freemoe(*combine).refused("2 experts are named", "--op union")
    freemoe(*combine, "--op", "sum").refused("--op is 'sum': --op union", "--op intersection")
    freemoe(*combine, "--op", "union", "--shrink").refused("'law/single' is of kind 'switch'")
    freemoe(*combine, "law/sngle", "--op", "union").refused("Unknown expert 'law/sngle'", "'law/single'")
    freemoe(*combine, "base", "--op", "union").refused("Unknown expert 'base'")
    freemoe("merge", out, "law/all", "--op", "union").refused("'law/all' is one", "at least 2")
    freemoe("merge", out, "law/all+law/sngle").refused("Unknown expert 'law/sngle'")
    found = freemoe("merge", out, "law/all+law/single", "--dry-run", "--json")
    assert document(found, "merge-plan")["expert"] == "law/all+law/single"


def test_experts_of_two_artefacts(freemoe, artefact, tmp_path):
    second = unit_artefact(tmp_path)
    freemoe(
        "merge", str(artefact), "law/single", f"{second}:law/free", "--op", "union", "-o", str(tmp_path / "m"), "--json"
    ).ok()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    with torch.no_grad():
        wanted = FreeMoE.from_pretrained(None, artefact)(IDS, expert="law/single+law/free").logits
        assert torch.equal(merged(input_ids=IDS).logits, wanted)
    (tmp_path / "mixture").mkdir()
    other = mixture_artefact(tmp_path / "mixture")
    freemoe(
        "merge", str(artefact), "law/single", f"{other}:law/all", "--op", "union", "-o", str(tmp_path / "x")
    ).refused("were made for two bases", "means nothing in the other")
    freemoe("merge", str(artefact), "law/single", f"{second}:law/no", "--op", "union").refused(
        "Unknown expert 'law/no'"
    )
