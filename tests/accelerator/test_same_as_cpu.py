"""What is found on an accelerator is what is found on the CPU."""

import copy
import sys

import pytest
import torch

from benchmarks.speed.shapes import random_model
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.hookmoe.adapter import Trimmed
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.plans.compact import use_compact_experts
from freemoe.hookmoe.plans.layers import plan_of
from freemoe.hookmoe.plans.plan import uniform_plan
from freemoe.kernels import optional
from freemoe.kernels.optional import importable
from freemoe.kernels.sparse.bands import tiles_available
from freemoe.models.mask import Mask
from freemoe.models.weights import find_weights
from freemoe.tomoe.export import build_converted_model
from freemoe.tomoe.structures.masked import apply_structure
from tests.accelerator.worlds import WORKS, World, each_family, mixture, numbers
from tests.kernels.triton_cases import CASES, CLOSE, COMPILED, DTYPES, moved
from tests.tiny import tiny_model
from tests.tomoe.random_structures import random_structure

NEAR = {"rtol": 1e-3, "atol": 1e-3}


@pytest.fixture(autouse=True)
def no_fallback():
    """What is shown of a kernel is not shown of torch."""
    yield
    assert not optional.failures


def ids(device, count=12):
    return torch.arange(3, 3 + count)[None].to(device)


@each_family("llama")
@pytest.mark.parametrize("work", WORKS, ids=lambda f: f.__name__)
def test_a_build_finds_there_what_it_finds_here(work, case, accelerator):
    here, there = World(case, "cpu"), World(case, accelerator)
    expected, found = list(numbers(work(here))), list(numbers(work(there)))
    assert len(found) == len(expected) > 0
    # Switches of equal rank may fall either way.
    assert found == pytest.approx(expected, rel=0.02, abs=0.02)
    for one, other in zip(here.model.parameters(), there.model.parameters(), strict=True):
        assert torch.equal(one, other.cpu())


def test_masks_are_the_same_bits(accelerator):
    weights = find_weights(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    for share in (0.004, 0.4):
        chosen = {w.name: (torch.rand(w.size, generator=generator) < share).nonzero().flatten() for w in weights}
        here = Mask.of_indices(chosen, weights)
        there = Mask.of_indices({name: i.to(accelerator) for name, i in chosen.items()}, weights)
        for name, own in here.items():
            assert torch.equal(own.to_bools(), there[name].to_bools().cpu())
            assert torch.equal(own.indices(), there[name].indices().cpu())
            assert own.is_equal(own.to(accelerator).to("cpu"))


@pytest.mark.parametrize("band", [
    Band("magnitude", 0.1, 0.3), Band("wanda", 0.4, 0.5), Band("wanda", 0.0, 0.2, scope="layer"), Band("wanda", 0.2, 0.6, patch=3),
    Band("random", 0.5, 0.7, seed=1),
], ids=lambda band: f"{band.metric} {band.scope} {band.patch}")  # fmt: skip
def test_bands_are_the_same_bits(band, accelerator):
    def masks(device):
        # In bfloat16 many weights are equally important.
        weights = find_weights(tiny_model("llama").to(device, torch.bfloat16))
        generator = torch.Generator().manual_seed(0)
        norms = {w.tap: torch.rand(w.num_experts, w.num_columns, generator=generator) for w in weights}
        return BandRankings(weights, norms.__getitem__, [band]).mask_of_band(band)

    here, there = masks("cpu"), masks(accelerator)
    assert here.count > 0
    for name, own in here.items():
        assert torch.equal(own.to_bools(), there[name].to_bools().cpu())


def test_a_random_model_is_drawn_where_it_is_wanted(accelerator):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, same = (random_model("llama", 0, torch.bfloat16, accelerator, vocab_size=50, **sizes) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert a.device.type == torch.device(accelerator).type
        assert a.dtype == torch.bfloat16
        assert torch.equal(a, b)
    with torch.no_grad():
        assert bool(torch.isfinite(one(ids(accelerator)).logits).all())


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["gate", "static"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_model_is_the_masked_one(dtype, static, accelerator):
    dense = tiny_model("llama")
    structure = random_structure(dense, static=static)
    with apply_structure(dense, structure):
        want = dense(ids("cpu")).logits
    there = copy.deepcopy(dense).to(accelerator)
    with apply_structure(there, structure):
        torch.testing.assert_close(there(ids(accelerator)).logits.cpu(), want, **NEAR)
    new = build_converted_model(there, structure).to(dtype)
    found = new(ids(accelerator)).logits
    if dtype == torch.float32:
        torch.testing.assert_close(found.cpu(), want, **NEAR)
    # A token after the other, with a cache, is the whole text at once; in bfloat16 a near-tie may take another expert.
    first = new(ids(accelerator)[:, :6], use_cache=True)
    rest = [new(ids(accelerator)[:, n : n + 1], past_key_values=first.past_key_values).logits for n in range(6, 12)]
    once = torch.cat([first.logits, *rest], dim=1).float()
    rows = ((once - found.float()).abs().amax(-1) < (1e-3 if dtype == torch.float32 else 0.1)).float()
    assert rows.mean() > (0.99 if dtype == torch.float32 else 0.7)


@torch.no_grad()
@pytest.mark.parametrize("compact", [False, True], ids=["theirs", "compact"])
def test_a_trimmed_mixture_is_the_same(compact, accelerator):
    def logits(device):
        model = tiny_model("olmoe").to(device)
        model.set_experts_implementation("eager")
        before = model(ids(device)).logits
        hooks = new_hooks(model, {0: 4, 1: 4}, "block", "parallel")
        for hook in hooks.by_layer.values():
            hook.down.weight.fill_(0.1)
        with Trimmed(uniform_plan(plan_of(model), 1), hooks, "kept_mass").attached(model):
            if compact:
                with use_compact_experts(model):
                    found = [model(ids(device)).logits, model(ids(device, 1)).logits]
            else:
                found = [model(ids(device)).logits, model(ids(device, 1)).logits]
        assert torch.equal(model(ids(device)).logits, before)
        assert not torch.equal(found[0], before)
        return [f.cpu() for f in found]

    for here, there in zip(logits("cpu"), logits(accelerator), strict=True):
        torch.testing.assert_close(there, here, **NEAR)


def needs_triton(accelerator):
    if not importable("triton"):
        pytest.skip("triton is not installed")
    if torch.device(accelerator).type != "cuda" and not optional.INTERPRETED:
        pytest.skip("without CUDA these kernels run in the interpreter alone (tests/kernels/test_triton.py)")


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_triton_kernels_compiled(case, dtype, accelerator):
    needs_triton(accelerator)
    launch, arguments, expected = CASES[case](dtype)
    found = launch(*(moved(value, accelerator) for value in arguments)).cpu()
    assert found.dtype == dtype
    close = 10 * CLOSE[dtype] if dtype == torch.float32 else CLOSE[dtype]
    torch.testing.assert_close(found.float(), expected, rtol=close, atol=close)


@torch.no_grad()
@pytest.mark.parametrize("case", COMPILED)
def test_triton_kernels_run_on_the_second_device(case, accelerator):
    needs_triton(accelerator)
    if torch.cuda.device_count() < 2:
        pytest.skip("torch sees one accelerator")
    bare, arguments, expected = CASES[case](torch.float32)
    launch = getattr(sys.modules[bare.__module__], bare.__name__)
    found = launch(*(moved(value, "cuda:1") for value in arguments))
    assert found.device == torch.device("cuda:1")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mixed_batch_is_each_sequence_alone(dtype, accelerator):
    moe = mixture("llama", accelerator, dtype)
    weights = find_weights(moe.model)
    rows = torch.randint(3, 200, (6, 5), generator=torch.Generator().manual_seed(0)).to(accelerator)
    names = ["few", "low", "base", "low+few", "low", "few"]
    for size in (1, 5):
        alone = moe(rows[:, :size], expert=names, strategy="swap").logits.float()
        for strategy in ("fused", "scratch"):
            found = moe(rows[:, :size], expert=names, strategy=strategy).logits.float()
            close = 1e-4 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(found, alone, rtol=close, atol=close)
    # Of a band an accelerator holds the rule, where its kernel can be compiled.
    rule = sum(4 * (w.num_columns + 2 * w.num_rows) for w in weights)
    assert (moe.mixed_bytes("low") == rule) == tiles_available(weights[0].parameter)
