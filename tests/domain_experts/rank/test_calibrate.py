"""The norms of one pass, against every document run alone and every module watched the slow way."""

import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn
from transformers.pytorch_utils import Conv1D

from freemoe.core.errors import DataError, FamilyError, NumericError
from freemoe.domain_experts.rank.calibrate import InputNorms, calibrate, power_sums
from freemoe.models.spec import family_of
from tests.tiny import CASES, model_and_weights

LENGTHS = (5, 9, 3, 7, 6)
LABELS = (0, 2, 0, 2, 2)  # subdomain 1 has no documents
DOCUMENTS = [torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(i)) for i, n in enumerate(LENGTHS)]
PS = (1, 2, 4, math.inf)


def batch(which, side="right", extra=0):
    length = max(len(DOCUMENTS[i]) for i in which) + extra
    ids, mask = torch.zeros(2, len(which), length, dtype=torch.long)
    for row, i in enumerate(which):
        n = len(DOCUMENTS[i])
        part = slice(0, n) if side == "right" else slice(length - n, length)
        ids[row, part], mask[row, part] = DOCUMENTS[i], 1
    return ids, mask, torch.tensor([LABELS[i] for i in which])


def some():
    """Two batches of all documents, padded on either side."""
    return [batch([0, 1, 2]), batch([3, 4], "left", 2)]


def same(a, b):
    return a.sums.keys() == b.sums.keys() and all(
        torch.equal(a.sums[t], b.sums[t]) and torch.equal(a.counts[t], b.counts[t]) for t in a.sums
    )


def assert_nearly_the_same(a, b):
    for tap in a.sums:
        assert torch.equal(a.counts[tap], b.counts[tap])
        torch.testing.assert_close(a.sums[tap], b.sums[tap], rtol=2e-4, atol=1e-6)


def one_expert(module, kind, e, x):
    """One routed expert written out: what its down projection multiplies."""
    if kind == "gpt_oss":
        out = x @ module.gate_up_proj[e] + module.gate_up_proj_bias[e]
        gate, up = out[::2].clamp(max=module.limit), out[1::2].clamp(-module.limit, module.limit)
        return (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    out = module.gate_up_proj[e] @ x
    half = len(out) // 2
    return module.act_fn(out[:half]) * out[half:]


@torch.no_grad()
def slow_inputs(model, document):
    """Every input of every linear, one document alone: {(parameter name, expert): [(columns,), ...]}."""
    seen, kind, handles = {}, family_of(model).name, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):

            def watch(module, args, name=name):
                rows = args[0].reshape(-1, args[0].shape[-1])
                seen.setdefault((f"{name}.weight", 0), []).extend(rows)

            handles.append(module.register_forward_pre_hook(watch))
        elif name.endswith("mlp.experts"):

            def route(module, args, output, name=name):
                hidden, index, weights = args
                total = torch.zeros_like(hidden)
                for t in range(len(hidden)):
                    for e, w in zip(index[t].tolist(), weights[t], strict=True):
                        inner = one_expert(module, kind, e, hidden[t])
                        seen.setdefault((f"{name}.gate_up_proj", e), []).append(hidden[t])
                        seen.setdefault((f"{name}.down_proj", e), []).append(inner)
                        down = module.down_proj[e].T if kind == "gpt_oss" else module.down_proj[e]
                        total[t] += w * (down @ inner + (module.down_proj_bias[e] if kind == "gpt_oss" else 0))
                # The slow way is right only if it ends where the module ends.
                torch.testing.assert_close(total, output.reshape(total.shape), rtol=1e-3, atol=1e-5)

            handles.append(module.register_forward_hook(route))
    model(input_ids=document[None])
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("case", CASES)
def test_norms_equal_the_slow_way(case):
    model, weights = model_and_weights(case)
    norms = calibrate(model, weights, some(), groups=3)
    slow = [{}, {}, {}]
    for document, label in zip(DOCUMENTS, LABELS, strict=True):
        for key, rows in slow_inputs(model, document).items():
            slow[label].setdefault(key, []).extend(rows)
    for weight in weights:
        for group in range(3):
            for e in range(weight.num_experts):
                rows = slow[group].get((weight.name, e), [])
                x = torch.stack(rows).double() if rows else torch.zeros(1, weight.num_columns, dtype=torch.float64)
                assert int(norms.counts[weight.tap][group, e]) == len(rows), weight.name
                for p in PS:
                    got = norms.input_norm(weight.tap, group, p)
                    assert got.shape == (weight.num_experts, weight.num_columns)
                    assert got.dtype == torch.float32
                    expected = torch.linalg.vector_norm(x, p, dim=0).float()
                    torch.testing.assert_close(got[e], expected, rtol=2e-4, atol=1e-5, msg=f"{weight.name} p={p}")
    assert not norms.input_norm(weights[0].tap, 1, 2).any()


@pytest.mark.parametrize("case", ["llama", "gpt2", "opt", "gpt_neox", "gemma3", "mixtral", "deepseek_v2"])
@pytest.mark.parametrize(("side", "extra"), [("right", 4), ("left", 0), ("left", 11)])
def test_padding_never_counts(case, side, extra):
    model, weights = model_and_weights(case)
    plain = calibrate(model, weights, [batch([i]) for i in range(5)], groups=3)
    assert_nearly_the_same(plain, calibrate(model, weights, [batch(range(5), side, extra)], groups=3))


def test_power_sums_of_some_rows():
    x = torch.randn(500, 700, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    rows = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:321].sort().values
    for chosen in (rows, rows[:1], rows[:0], None):
        exact = (x if chosen is None else x[chosen]).double().abs()
        got = power_sums(x, chosen)
        assert got.shape == (4, 700)
        for sums, p in zip(got, PS, strict=True):
            expected = (exact**p).sum(0) if p != math.inf else exact.sum(0) if not len(exact) else exact.amax(0)
            torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=0)
    assert torch.equal(x, before)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_any_experts_implementation_gives_the_same_norms(implementation):
    model, weights = model_and_weights("gpt_oss")
    usual = calibrate(model, weights, some(), groups=3)
    model.set_experts_implementation(implementation)
    assert_nearly_the_same(usual, calibrate(model, weights, some(), groups=3))


def test_norms_of_sums():
    norms = InputNorms({"tap": torch.tensor([[[[3.0]], [[9.0]], [[81.0]], [[2.0]]]], dtype=torch.float64)}, {})
    assert [norms.input_norm("tap", 0, p).item() for p in PS] == [3.0, 3.0, 3.0, 2.0]
    with pytest.raises(NumericError, match="p = 3"):
        norms.input_norm("tap", 0, 3)
    with pytest.raises(DataError, match="0 to 0 allowed"):
        norms.input_norm("tap", 1, 2)


def test_norms_travel_bit_by_bit():
    norms = calibrate(*model_and_weights("qwen2_moe"), [batch(range(5))], groups=3)
    back = InputNorms.from_tensors(load(save(norms.to_tensors())))
    assert all(len(sums) == 3 for sums in back.sums.values())
    assert same(back, norms)
    with pytest.raises(DataError, match="'x'"):
        InputNorms.from_tensors({"x": torch.zeros(1)})


def test_training_flags_and_gradients_are_as_before():
    model, weights = model_and_weights("gpt2")
    model.train()
    model.transformer.h[0].eval()
    flags, told = [m.training for m in model.modules()], []
    calibrate(model, weights, [batch([0, 1]), batch([2])], groups=3, on_batch=told.append)
    assert [m.training for m in model.modules()] == flags
    assert told == [2, 1]
    assert all(p.grad is None for p in model.parameters())


def test_bad_numbers_name_the_input_and_the_subdomain():
    model, weights = model_and_weights("llama")
    bad = int(DOCUMENTS[1][4])
    assert all(bad not in d.tolist() for i, d in enumerate(DOCUMENTS) if i != 1)
    # Those of padding do not matter.
    model.model.embed_tokens.weight.data[bad], model.model.embed_tokens.weight.data[0] = math.nan, 1e30
    with pytest.raises(NumericError, match=r"model\.layers\.0\.self_attn\.q_proj .*subdomain 2"):
        calibrate(model, weights, [batch(range(5))], groups=3)
    norms = calibrate(model, weights, [batch([0, 2, 3, 4])], groups=3)
    assert all(s.isfinite().all() for s in norms.sums.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda i, m, g: [(i, m[:, 1:], g)], r"\(B, L\)"),
        (lambda i, m, g: [(i, m, g[1:])], r"\(B,\)"),
        (lambda i, m, g: [(i, m, g + 1)], "from 1 to 3; 0 to 2 allowed"),
        (lambda i, m, g: [(i, m, g - 1)], "from -1 to 1"),
        (lambda *_: [], "no documents"),
    ],
)
def test_wrong_batches(change, message):
    with pytest.raises(DataError, match=message):
        calibrate(*model_and_weights("llama"), change(*batch(range(5))), groups=3)


def test_a_linear_that_is_computed_without_its_module():
    model, weights = model_and_weights("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: (mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x)) @ mlp.down_proj.weight.T
    with pytest.raises(FamilyError, match=r"1 inputs were never seen.*layers\.1\.mlp\.down_proj"):
        calibrate(model, weights, [batch([0])], groups=3)
