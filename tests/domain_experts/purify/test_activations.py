"""Memory of activations: what is measured, batches cut by it, and checkpointing when it does not fit."""

import gc
import weakref

import pytest
import torch

from freemoe.core import memory
from freemoe.domain_experts.purify import activations, gradients
from freemoe.domain_experts.purify.activations import bytes_per_token, fits_in_memory, split_by_memory
from freemoe.domain_experts.purify.batches import AnswerBatch, rows_of
from freemoe.models.precision import held_in
from freemoe.models.weights import find_weights
from tests.domain_experts.purify.test_gradients import fast_gradients, layer_runs
from tests.domain_experts.purify.test_greedy import batches
from tests.tiny import model_and_weights


def batch(rows, length):
    ids = torch.arange(rows * length).reshape(rows, length) % 200 + 3
    return AnswerBatch(ids, torch.ones_like(ids), ids, torch.zeros(rows, dtype=torch.long))


def wide():
    """A model that is large enough to be measured; its decoder's weights ask for gradients."""
    model, weights = model_and_weights("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=6)
    model.requires_grad_(False)
    for weight in weights:
        weight.parameter.requires_grad_(True)
    return model


def test_what_is_measured_is_what_autograd_keeps():
    model, kept = wide(), {}
    told = bytes_per_token(model)
    mine = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        alive = model.model(input_ids=batch(3, 200).ids, use_cache=False)
    expected = sum(size for place, size in kept.items() if place not in mine) / 600
    del alive
    assert told == pytest.approx(expected, rel=0.05)
    # In the order of inputs and outputs of all matrices.
    assert activations._upper_bound_bytes(model) / 8 < told < activations._upper_bound_bytes(model)


def test_a_model_in_bfloat16_keeps_less(monkeypatch):
    monkeypatch.setattr(activations, "_SMALL", 1)
    model = wide()
    full = bytes_per_token(model)
    most, whole = int(full * 40 * 2.3), batch(6, 40)
    with held_in(model, torch.bfloat16):
        half = bytes_per_token(model)
        assert 0.4 * full < half < 0.7 * full
        assert max(len(p.ids) for p in split_by_memory(model, whole, most)) > 2
    # Each format has a measurement of its own.
    assert bytes_per_token(model) == full
    assert [len(p.ids) for p in split_by_memory(model, whole, most)] == [2, 2, 2]


@pytest.mark.parametrize(("fitting", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (4, [4, 3]), (6, [4, 3]), (7, [7])])
def test_parts_hold_every_row_once_and_fit(fitting, sizes):
    model, whole = wide(), batch(7, 40)
    most = int(bytes_per_token(model, 40) * 40 * (fitting + 0.5))
    found = list(split_by_memory(model, whole, most))
    assert [len(p.ids) for p in found] == sizes
    assert rows_of(found) == rows_of([whole])
    # A row is never cut.
    assert [len(p.ids) for p in split_by_memory(model, whole, 1)] == [1] * 7


def test_gradients_of_parts_add_up(monkeypatch):
    model, weights = model_and_weights("llama")
    rows, passes = batches(0), []
    expected, loss = fast_gradients(model, weights, rows)

    def cut(model, batch):
        for part in split_by_memory(model, batch, 1):
            passes.append(len(part.ids))
            yield part

    monkeypatch.setattr(gradients, "split_by_memory", cut)
    found, told = fast_gradients(model, weights, rows)
    assert passes == [1] * sum(len(b.ids) for b in rows)
    assert told == pytest.approx(loss, rel=1e-5)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("free", "times"), [(0, 2), (1 << 40, 1)])
def test_layers_forget_when_memory_asks_for_it(free, times, monkeypatch):
    model, weights = model_and_weights("llama")
    rows = batches(0, count=4)
    plain, loss = fast_gradients(model, weights, rows)
    monkeypatch.setattr(activations, "free_bytes", lambda device: free)
    runs = layer_runs(model, monkeypatch)
    found, same = fast_gradients(model, weights, rows, checkpointing="auto")
    assert len(runs) == times * len(rows) * len(model.model.layers)
    assert same == loss
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))


def test_forgetting_does_not_change_what_is_measured():
    models = {checkpointing: wide() for checkpointing in (False, True, "auto")}
    for checkpointing, model in models.items():
        fast_gradients(model, find_weights(model), [batch(1, 20)], checkpointing)
    (kept,) = set(map(bytes_per_token, models.values()))
    assert kept > 1000


def test_what_was_measured_is_freed():
    model, alive = wide(), []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda m, x, out: alive.append(weakref.ref(x[0])))
    with gradients.gradients_to(model, find_weights(model), lambda *_: None, checkpointing=False):
        assert bytes_per_token(model) > 1000
    handle.remove()
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_what_fits_is_half_of_what_is_free(monkeypatch):
    model = wide()
    monkeypatch.setattr(activations, "free_bytes", lambda device: int(2.01 * 300 * bytes_per_token(model)))
    assert fits_in_memory(model, 3, 100)
    assert not fits_in_memory(model, 3, 102)


def test_a_container_leaves_less_than_the_machine(tmp_path):
    assert 0 < memory.available_memory_bytes() < 1 << 50
    assert memory._left_in_container(tmp_path) == []
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("70\n")
    assert memory._left_in_container(tmp_path) == []
    (tmp_path / "memory.max").write_text("100\n")
    assert memory._left_in_container(tmp_path) == [30]


def test_a_pass_for_masks_alone_may_be_a_process_s_first():
    """As where a killed training of units goes on: what measures the model must not be measured itself."""
    model = wide()
    assert not activations.is_measured(model)
    with gradients.gradients_to(model, [], lambda *_: None, checkpointing="auto"):
        assert not any(p.requires_grad for p in model.parameters())
        model(input_ids=batch(2, 40).ids)
    assert bytes_per_token(model) == bytes_per_token(wide())
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(w.parameter) for w in find_weights(model)}
