"""Quick decoding: the same tokens and logits as the model's own forward, and left alone wherever it does not know better."""

import copy
import time
from contextlib import nullcontext

import pytest
import torch

from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.decoding import quick
from freemoe.hookmoe.decoding.quick import quick_decoding
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.kernels.one_token import CompiledLayer
from freemoe.kernels.rows import rows_available
from freemoe.models.hooks import forward_hook
from tests.hookmoe.conftest import logits
from tests.tiny import tiny_model

needs_numba = pytest.mark.skipif(not rows_available(torch.float32), reason="numba is not installed")
KNOWN = ["mixtral", "qwen3_moe", "olmoe"]
PROMPT = torch.arange(5, 17)[None]


@pytest.fixture
def steps(monkeypatch):
    """One entry per step of the loops."""
    found = []
    own = CompiledLayer.decode_token

    def step(self, *args):
        found.append(1)
        return own(self, *args)

    monkeypatch.setattr(CompiledLayer, "decode_token", step)
    return found


def decoded(model, prompt=PROMPT, **more):
    """Eight greedy tokens, and their logits."""
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=8, max_new_tokens=8,
        return_dict_in_generate=True, output_logits=True, **more,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def forced(model, prompt, ours):
    """Logits ``(L, V)`` of a text that is given token by token."""
    cache, found = None, []
    with quick_decoding(model) if ours else nullcontext():
        for token in prompt[0]:
            out = model(input_ids=token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            found.append(out.logits[0, -1].float())
    return torch.stack(found)


def trimmed_of(model, position="parallel", scope="block", rescale="kept_mass"):
    hooks = new_hooks(model, dict.fromkeys(range(len(plan_of(model).ks)), 6), scope, position)
    for _, hook in hooks.items():
        torch.nn.init.normal_(hook.down.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return Trimmed(uniform_plan(plan_of(model), 1), hooks, rescale)


@needs_numba
@pytest.mark.parametrize(
    ("family", "position", "scope", "rescale"),
    [
        *((family, "parallel", "block", rule) for family in KNOWN for rule in ("none", "kept_mass", "renorm")),
        *(("mixtral", "pre", scope, "kept_mass") for scope in ("block", "routed")),
    ],
)
def test_known_families_decode_the_same(family, position, scope, rescale, steps):
    model = tiny_model(family, num_hidden_layers=3)
    trimmed = trimmed_of(model, position, scope, rescale)
    with trimmed.attached(model):
        want = decoded(model)
    assert not steps
    with trimmed.attached(model, quick=True):
        got = decoded(model)
    assert len(steps) >= 3 * 7
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("full", [True, False])
def test_every_family_decodes_the_same(mixture, full):
    trimmed = trimmed_of(mixture)
    with nullcontext() if full else trimmed.attached(mixture):
        want = decoded(mixture)
    with quick_decoding(mixture) if full else trimmed.attached(mixture, quick=True):
        got = decoded(mixture)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-5)


def test_all_is_as_before(mixtral):
    before = logits(mixtral)
    with quick_decoding(mixtral):
        # A prompt goes the model's own way.
        assert torch.equal(logits(mixtral), before)
        with quick_decoding(mixtral):
            decoded(mixtral)
    assert not any("forward" in vars(module) for module in mixtral.modules())
    with pytest.raises(ZeroDivisionError), quick_decoding(mixtral):
        1 / 0  # noqa: B018
    assert not any("forward" in vars(module) for module in mixtral.modules())


@needs_numba
def test_batches_gradients_and_masks_go_the_models_own_way(mixtral, steps):
    prompt = torch.stack([PROMPT[0], PROMPT[0] + 1])
    with quick_decoding(mixtral):
        decoded(mixtral, prompt)
        padded = torch.ones_like(PROMPT)
        padded[0, :2] = 0
        mixtral.generate(PROMPT, attention_mask=padded, do_sample=False, max_new_tokens=3)
        cache = mixtral(input_ids=PROMPT, use_cache=True).past_key_values
        mixtral(input_ids=PROMPT[:, :1], past_key_values=cache, use_cache=True).logits.sum().backward()
    assert not steps
    assert mixtral.model.layers[0].mlp.gate.weight.grad is not None


@needs_numba
def test_a_hook_of_somebody_else_is_called(mixtral, steps):
    seen = []
    with quick_decoding(mixtral):
        decoded(mixtral)
        before = len(steps)
        with forward_hook(mixtral.model.layers[1].mlp.gate, lambda *_: seen.append(1)):
            decoded(mixtral)
        # One layer of three is left to the model.
        assert len(steps) - before == 2 * 7
    assert len(seen) == 8


@needs_numba
def test_loops_that_compute_something_else_are_not_used(mixtral, steps, monkeypatch):
    want = decoded(mixtral)
    own = quick.layer_of

    def wrong(*args):
        layer = own(*args)
        layer.mixture.__dict__["normalise"] = False
        return layer

    monkeypatch.setattr(quick, "layer_of", wrong)
    with quick_decoding(mixtral):
        got = decoded(mixtral)
    # Each layer is tried once.
    assert len(steps) == 3 * quick.NUM_PROBES
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_input_takes_the_same_way_in_every_run(dtype, steps, monkeypatch):
    runs = []
    # However long anything takes, and whatever was asked before.
    for seconds, earlier in ((0.0, PROMPT), (1.0, PROMPT), (0.0, PROMPT.flip(1)), (0.0, PROMPT[:, :1])):
        clock = iter(seconds * n**2 for n in range(10**9))
        for name in ("process_time", "perf_counter"):
            monkeypatch.setattr(time, name, lambda clock=clock: next(clock))
        model = tiny_model("mixtral", num_hidden_layers=3).to(dtype)
        with trimmed_of(model).as_type(dtype).attached(model, quick=True):
            decoded(model, earlier)
            steps.clear()
            runs.append((decoded(model)[1], len(steps)))
    assert runs[0][1] == 3 * 7
    assert all(count == 3 * 7 and torch.equal(logits, runs[0][0]) for logits, count in runs)


@needs_numba
@pytest.mark.parametrize("family", KNOWN)
def test_in_bfloat16_the_loops_are_as_near_to_exact_as_the_model(family):
    model = tiny_model(family, num_hidden_layers=3)
    prompt = torch.randint(3, 200, (1, 24), generator=torch.Generator().manual_seed(0))
    model.to(torch.bfloat16)
    exact = copy.deepcopy(model).float()
    with torch.no_grad():
        found = [forced(m, prompt, ours) for m, ours in ((exact, False), (model, False), (model, True))]
    off = [float((logits - found[0]).abs().median()) for logits in found[1:]]
    assert 0 < off[1] < 1.2 * off[0]


@needs_numba
def test_what_was_found_once_is_not_tried_again(mixtral, steps):
    trimmed = trimmed_of(mixtral)
    counts = []
    for leaner in (True, True, False):
        before = len(steps)
        with trimmed.attached(mixtral, quick=True) if leaner else quick_decoding(mixtral):
            decoded(mixtral)
        counts.append(len(steps) - before)
    assert counts == [3 * (7 + quick.NUM_PROBES), 3 * 7, 3 * (7 + quick.NUM_PROBES)]


@needs_numba
def test_weights_put_elsewhere_are_noticed(mixtral):
    with quick_decoding(mixtral):
        decoded(mixtral)
        with torch.no_grad():
            for layer in mixtral.model.layers:
                layer.mlp.experts.gate_up_proj.data = 2 * layer.mlp.experts.gate_up_proj.data
        got = decoded(mixtral)
    torch.testing.assert_close(got[1], decoded(mixtral)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_types(mixtral, dtype):
    mixtral.to(dtype)
    want = decoded(mixtral)
    with quick_decoding(mixtral):
        got = decoded(mixtral)
    torch.testing.assert_close(got[1][:2].float(), want[1][:2].float(), rtol=0.05, atol=0.05)
