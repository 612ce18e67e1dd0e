"""One expert as a plain checkpoint: the same answers without freemoe, the base untouched, nothing half written."""

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from freemoe.core.errors import ArtifactError, DataError, UnknownNameError
from freemoe.domain_experts.expert import switch_expert
from freemoe.domain_experts.hosting import saving
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.models.weights import find_weights
from tests.domain_experts.test_mixture import EXPERTS, PROMPTS, bits, ids_of, logits, unchanged
from tests.masks import indices_of, mask_of
from tests.tiny import tiny_model


@pytest.mark.parametrize("name", EXPERTS)
def test_an_expert_equals_its_merged_checkpoint(moe, name, tmp_path):
    before = bits(moe.model)
    folder = moe.merge_and_save(name, tmp_path / "merged")
    assert folder == tmp_path / "merged"
    assert unchanged(moe.model, before)
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert AutoTokenizer.from_pretrained(folder)("abc")["input_ids"] == moe.tokenizer("abc")["input_ids"]
    assert torch.equal(logits(moe, expert=name), logits(merged))
    assert not torch.equal(logits(moe, expert=name), logits(moe))
    ids, mask = ids_of(*PROMPTS)
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(moe.generate(ids, expert=name, **options), merged.generate(ids, **options))
    # Nothing but the expert's own weights differs, and those are zero.
    off = indices_of(moe.expert_mask(name))
    state = merged.state_dict()
    for weight in find_weights(moe.model):
        expected = weight.canonical_view().clone().flatten()
        expected[off.get(weight.name, torch.zeros(0).long())] = 0
        assert torch.equal(state[weight.name].flatten(), expected)
    assert unchanged(moe.model, before)
    assert not (tmp_path / "merged.partial").exists()


@pytest.mark.parametrize("case", ["llama", "gemma", "mixtral", "qwen3_moe", "gpt_oss", "gpt2"])
def test_merging_in_many_shards(case, tmp_path):
    """Dense, tied, fused and transposed weights, loaded from disk so that transformers knows their old names."""
    tiny_model(case).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    generator = torch.Generator().manual_seed(0)
    off = {w.name: (torch.rand(w.size, generator=generator) < 0.05).nonzero().flatten() for w in find_weights(base)}
    moe = FreeMoE(base, [switch_expert("d/x", mask_of(off, find_weights(base)))])
    before = bits(base)
    folder = moe.merge_and_save("d/x", tmp_path / "merged", max_shard_size="40KB")
    assert unchanged(base, before)
    assert moe.active == "base"
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids, _ = ids_of(PROMPTS[0])
    assert torch.equal(merged(ids).logits, moe(ids, expert="d/x").logits)
    assert not torch.equal(merged(ids).logits, moe(ids).logits)
    # The very weights that are off, and no others, differ.
    state = base.state_dict()
    for name, value in merged.state_dict().items():
        same = (value.view(torch.int32) == state[name].view(torch.int32)).all()
        assert bool(same) == (name not in off)


def test_merging_that_fails_leaves_nothing(moe, tmp_path, monkeypatch):
    before = bits(moe.model)

    for error, seen, message in (
        (OSError(28, "No space left on device"), ArtifactError, "The disk is full: .*merged could not be written"),
        (SafetensorError("I/O error"), ArtifactError, "could not be written: I/O error"),
        (KeyboardInterrupt("by hand"), KeyboardInterrupt, "by hand"),
    ):

        def fails(model, folder, size, error=error):
            folder.mkdir()
            (folder / "half").write_text("x")
            raise error

        monkeypatch.setattr(saving, "save_checkpoint", fails)
        with pytest.raises(seen, match=message):
            moe.merge_and_save("law/0", tmp_path / "merged")
        assert list(tmp_path.iterdir()) == []
        assert unchanged(moe.model, before)
    monkeypatch.undo()
    with pytest.raises(DataError, match="max_shard_size is '5 pages'"):
        moe.merge_and_save("law/0", tmp_path / "merged", max_shard_size="5 pages")
    assert list(tmp_path.iterdir()) == []


def test_merging_never_overwrites(moe, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "precious").write_text("x")
    with pytest.raises(ArtifactError, match="exists already"):
        moe.merge_and_save("law/0", tmp_path / "here")
    assert (tmp_path / "here" / "precious").read_text() == "x"
    with pytest.raises(UnknownNameError):
        moe.merge_and_save("law/7", tmp_path / "there")
    assert not list(tmp_path.glob("there*"))
