"""A base is read to its accelerator, which may hold more than the host has left."""

import pytest
import torch

from freemoe.core.errors import DataError
from freemoe.models.checkpoints import placement
from freemoe.models.checkpoints.identity import buffers_digest
from freemoe.models.checkpoints.loading import load_base
from tests.tiny import save_base, tiny_model


@pytest.fixture
def folder(tmp_path):
    # A router with a stored buffer is among its weights.
    return save_base(tiny_model("deepseek_v3"), tmp_path)


@pytest.mark.usefixtures("pretend_accelerator")
def test_a_base_that_the_host_has_no_room_for(folder, accelerator, monkeypatch):
    here = load_base(folder, device="cpu")[0]
    with monkeypatch.context() as patched:
        patched.setattr(placement, "free_bytes", lambda device: 0 if device.type == "cpu" else 1 << 40)
        there = load_base(folder, device=accelerator)[0]
    assert {tensor.device.type for tensor in (*there.parameters(), *there.buffers())} == {accelerator}
    assert not any("forward" in module.__dict__ for module in there.modules())
    state = here.state_dict()
    assert all(torch.equal(value.cpu(), state[name]) for name, value in there.state_dict().items())
    assert buffers_digest(there) == buffers_digest(here)


@pytest.mark.usefixtures("pretend_accelerator")
def test_a_full_accelerator_is_said_before_loading(folder, accelerator, monkeypatch):
    monkeypatch.setattr(placement, "free_bytes", lambda device: 1 << 40 if device.type == "cpu" else 1000)
    with pytest.raises(DataError, match=rf"and 1,000 bytes of memory are free on {accelerator}.*--device disk"):
        load_base(folder, device=accelerator)
    # Without accelerate transformers reads it to the host first.
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    assert load_base(folder, device=accelerator)[0].device.type == accelerator
