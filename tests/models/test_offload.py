"""Weights on disk: the same numbers as in memory, switched off and on again, in every family; the files stay as they are."""

import hashlib
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload

from freemoe.core.errors import FamilyError
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.domain_experts.rank.calibrate import calibrate
from freemoe.domain_experts.rank.random_mask import random_mask
from freemoe.models.checkpoints.fingerprint import fingerprint_model
from freemoe.models.checkpoints.loading import load_base
from freemoe.models.mask import Mask
from freemoe.models.offload import resident_bytes
from freemoe.models.switchboard import ExpertCache
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights, require_in_memory
from tests.tiny import CASES, IDS, logits, save_base, tiny_model


def on_disk(folder, case="llama"):
    """A model in memory, and the same with its decoder layers on disk; then the weights of both."""
    save_base(tiny_model(case), folder)
    models = [load_base(folder, device=device)[0] for device in ("cpu", "disk")]
    return *models, *map(find_weights, models)


def some(weights, seed=0, share=10):
    whole = Mask.of_indices({w.name: torch.arange(w.size // share) for w in weights}, weights)
    return random_mask(whole, seed)


def digests(folder):
    return [hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors"))]


@pytest.mark.parametrize("case", CASES)
def test_a_model_on_disk_is_the_one_in_memory(case, tmp_path):
    memory, disk, near, far = on_disk(tmp_path, case)
    assert all(w.parameter.is_meta and w.device == torch.device("cpu") for w in far)
    assert resident_bytes(disk) < resident_bytes(memory)
    for a, b in zip(near, far, strict=True):
        assert (a.name, a.shape, a.layout, a.tap) == (b.name, b.shape, b.layout, b.tap)
        assert torch.equal(a.read_values(), b.read_values())
    assert fingerprint_model(disk) == fingerprint_model(memory)
    before, files = logits(memory), digests(tmp_path)
    assert torch.equal(logits(disk), before)
    batch = (IDS, torch.ones_like(IDS), torch.tensor([0, 1, 0]))
    sums = [calibrate(m, w, [batch], 2) for m, w in ((memory, near), (disk, far))]
    assert all(torch.equal(sums[0].sums[tap], sums[1].sums[tap]) for tap in sums[0].sums)
    band = Band("wanda", 0.2, 0.5)
    masks = [
        BandRankings(w, lambda tap, n=n: n.input_norm(tap, 0, 2), [band]).mask_of_band(band)
        for w, n in zip((near, far), sums, strict=True)
    ]
    assert masks[0].is_equal(masks[1])
    with switched_off(near, masks[0]), switched_off(far, masks[0]):
        assert torch.equal(logits(disk), logits(memory))
        assert not torch.equal(logits(disk), before)
        assert all(torch.equal(a.read_values(), b.read_values()) for a, b in zip(near, far, strict=True))
    assert torch.equal(logits(disk), before)
    assert digests(tmp_path) == files


def test_switching_nests_and_is_undone_after_an_error(tmp_path):
    memory, disk, near, far = on_disk(tmp_path)
    first, second = some(near, 0), some(near, 1)
    before = logits(disk)
    with switched_off(far, first):
        once = logits(disk)
        with switched_off(far, second), switched_off(near, first.union(second)):
            assert torch.equal(logits(disk), logits(memory))
        with pytest.raises(FamilyError), switched_off(far, second):
            far[0].canonical_view()
        assert torch.equal(logits(disk), once)
    assert torch.equal(logits(disk), before)


def test_a_switchboard_switches_what_is_in_memory_and_what_is_not(tmp_path):
    memory, _, near, _ = on_disk(tmp_path)
    # The first layer stays in memory.
    disk, _ = load_base(tmp_path, device={"": "cpu", "model.layers.1": "disk"})
    far = find_weights(disk)
    assert {w.layer for w in far if w.stored is None} == {0}
    masks = {"one": some(near, 0), "two": some(near, 1), None: Mask()}
    board = ExpertCache(far)
    before = logits(disk)
    for name in ("one", "two"):
        board.add_expert(name, masks[name])
    for name in ("one", "two", None, "two", "one", None):
        board.activate_expert(name)
        with switched_off(near, masks[name]):
            assert torch.equal(logits(disk), logits(memory))
    assert torch.equal(logits(disk), before)
    assert FreeMoE(disk, []).generate(IDS, max_new_tokens=2).shape[1] == IDS.shape[1] + 2


def test_weights_offloaded_to_memory_by_others_are_known(tmp_path):
    memory, _, near, _ = on_disk(tmp_path)
    mask = some(near)
    with switched_off(near, mask):
        expected = logits(memory)
    before = logits(memory)
    kept = [w.read_values().clone() for w in near]
    cpu_offload(memory)
    far = find_weights(memory)
    assert all(w.stored is not None for w in far)
    with switched_off(far, mask):
        assert torch.equal(logits(memory), expected)
    assert torch.equal(logits(memory), before)
    assert all(torch.equal(w.read_values(), k) for w, k in zip(far, kept, strict=True))


def test_what_needs_weights_in_memory_says_so(tmp_path):
    *_, far = on_disk(tmp_path)
    with pytest.raises(FamilyError, match=r"needs all weights in memory, and 1 of 1 .*q_proj.*--metric wanda"):
        far[0].canonical_view()


def test_what_needs_one_device_says_which_there_are(llama):
    llama.model.layers[1].to("meta")
    weights = find_weights(llama, layers=(0, 1))
    elsewhere = replace(weights[0], module=llama.model.layers[1].self_attn.q_proj)
    with pytest.raises(FamilyError, match="--unit neuron needs all weights on one device; they lie on cpu, meta"):
        require_in_memory([weights[0], elsewhere], "--unit neuron", together=True)
