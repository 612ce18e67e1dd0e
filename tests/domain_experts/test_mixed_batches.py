"""Several experts in one batch, by every strategy: equal to one call per sequence; who has the base meanwhile."""

from dataclasses import replace

import pytest
import torch
from transformers import TextIteratorStreamer

from freemoe.core.errors import BusyError, DataError, RecipeError
from freemoe.domain_experts.expert import band_expert, switch_expert, unit_expert
from freemoe.domain_experts.hosting.several import STRATEGIES
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.rank.bands import Band, BandRankings
from freemoe.kernels.sparse import bands
from freemoe.models.mask import Mask
from freemoe.models.mixed import linear
from freemoe.models.mixed.board import MixedBoard
from freemoe.models.mixed.cost import RowLimits
from freemoe.models.weights import find_weights
from tests.domain_experts.test_mixture import bits, ids_of, unchanged
from tests.domain_experts.test_threads import in_a_thread
from tests.masks import mask_of
from tests.tiny import model_and_weights, tiny_model, tiny_tokenizer

PROMPTS = ["one two", "a longer prompt than that", "x", "the last of them"]
NAMES = ["d/0", "units", "base", "d/0+d/1"]
GREEDY = {"max_new_tokens": 4, "do_sample": False}


def mixture(family="llama", **given):
    model, weights = model_and_weights(family)
    dense = [w for w in weights if not w.is_fused]
    found = [
        switch_expert(f"d/{i}", mask_of({w.name: torch.arange(i, w.size, 9 + i) for w in dense}, weights))
        for i in range(2)
    ]
    lines = {dense[0].name: ("columns", torch.tensor([0, 7])), dense[-1].name: ("rows", torch.tensor([2]))}
    found.append(unit_expert("units", "neuron", lines, Mask()))
    return FreeMoE(model, found, None, tiny_tokenizer(), **given)


@pytest.fixture
def moe():
    return mixture()


def each_alone(call):
    return [call(ids_of(text)[0], name) for text, name in zip(PROMPTS, NAMES, strict=True)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_every_strategy_equals_one_call_per_sequence(family, side):
    moe = mixture(family)
    before = bits(moe.model)
    ids, mask = ids_of(*PROMPTS, side=side)
    logits = each_alone(lambda row, name: moe(row, expert=name).logits[0])
    texts = each_alone(lambda row, name: moe.generate(row, expert=name, **GREEDY)[0, row.shape[1] :])
    for strategy in STRATEGIES:
        found = moe(ids, attention_mask=mask, expert=NAMES, strategy=strategy).logits
        for row, wanted in enumerate(logits):
            torch.testing.assert_close(found[row][mask[row].bool()], wanted, rtol=1e-5, atol=1e-5)
        out = moe.generate(ids, attention_mask=mask, expert=NAMES, strategy=strategy, **GREEDY)
        for row, wanted in enumerate(texts):
            assert torch.equal(out[row, ids.shape[1] : ids.shape[1] + len(wanted)], wanted), strategy
    assert unchanged(moe.model, before)


@pytest.mark.parametrize("strategy", ["fused", "scratch"])
def test_a_generation_is_one_call(moe, strategy, monkeypatch):
    calls, generate = [], moe.model.generate
    monkeypatch.setattr(moe.model, "generate", lambda **given: calls.append(given) or generate(**given))
    ids, mask = ids_of(*PROMPTS)
    options = {"expert": NAMES, "strategy": strategy, "return_dict_in_generate": True, "num_beams": 2, **GREEDY}
    out = moe.generate(ids, attention_mask=mask, **options)
    assert len(calls) == 1
    alone = moe.generate(ids[:1], attention_mask=mask[:1], expert="d/0", num_beams=2, **GREEDY)
    assert torch.equal(out.sequences[:1, : alone.shape[1]], alone)


def test_what_only_one_pass_can_give(moe):
    ids, _ = ids_of(*PROMPTS)
    asked = {"labels": ids, "output_hidden_states": True, "use_cache": True}
    for strategy in ("fused", "scratch", "auto"):
        found = moe(ids, expert=NAMES, strategy=strategy, **asked)
        assert found.loss.isfinite()
        assert len(found.hidden_states) == 3
        assert found.past_key_values is not None
    for strategy in ("grouped", "swap"):
        with pytest.raises(DataError, match=r"labels, output_hidden_states needs one.*strategy='fused'"):
            moe(ids, expert=NAMES, strategy=strategy, **asked)
        for call, refused in (
            (moe, {"output_attentions": True}),
            (moe, {"return_dict": False}),
            (moe.generate, {"return_dict_in_generate": True}),
            (moe.generate, {"streamer": TextIteratorStreamer(moe.tokenizer)}),
        ):
            with pytest.raises(DataError, match=f"4 experts, and {next(iter(refused))} needs one"):
                call(ids, expert=NAMES, strategy=strategy, **refused)


def test_an_unknown_strategy(moe):
    ids, _ = ids_of(*PROMPTS)
    for call in (moe, moe.generate):
        with pytest.raises(RecipeError, match=r"'quick'.*auto, swap, grouped, scratch, fused"):
            call(ids, expert="d/0", strategy="quick")


def test_blocks_inside_each_other(moe):
    ids, _ = ids_of(*PROMPTS)
    with torch.no_grad():
        base, d0 = moe(ids).logits, moe(ids, expert="d/0").logits
        mixed = moe(ids, expert=NAMES, strategy="fused").logits
    with moe.expert("d/1"), moe.mixed("fused") as run:
        # At first, and where nothing else is said, the base.
        assert torch.equal(moe.model(ids).logits, base)
        run.assign(NAMES)
        assert torch.equal(moe.model(ids).logits, mixed)
        with moe.expert("d/0"):
            assert torch.equal(moe.model(ids).logits, d0)
            run.assign(NAMES)
            assert torch.equal(moe.model(ids).logits, d0)
        with moe.mixed("fused") as inner:
            inner.assign(["d/0"] * 4)
            torch.testing.assert_close(moe.model(ids).logits, d0, rtol=1e-5, atol=1e-5)
        assert torch.equal(moe.model(ids).logits, mixed)
        moe.set_expert("d/0")
        assert torch.equal(moe.model(ids).logits, d0)
        moe.set_expert("base")
        assert torch.equal(moe.model(ids).logits, mixed)
    assert moe.active == "base"
    assert torch.equal(moe.model(ids).logits, base)


def test_the_block_has_the_base():
    moe = mixture(threads="raise")
    ids, _ = ids_of(*PROMPTS)
    with moe.mixed(), pytest.raises(BusyError):
        in_a_thread(moe, ids)
    assert moe(ids).logits.isfinite().all()


def test_memory_is_held_from_the_first_use_on(moe):
    with moe.mixed() as run:
        run.assign(["d/0", "base"])
    assert moe.mixed_bytes("d/0") > 0
    assert moe.mixed_bytes("d/1") == moe.mixed_bytes("base") == 0
    with moe.mixed() as run:
        run.assign(["d/1", "d/0+d/1"])
    held = moe.mixed_bytes("d/1")
    moe.delete_expert("d/0")
    assert moe.mixed_bytes("d/0") == moe.mixed_bytes("d/0+d/1") == 0
    # Others that are in use need not be learned anew.
    assert moe.mixed_bytes("d/1") == held > 0


def test_a_mixture_of_experts_falls_back_or_says_why():
    moe = mixture("mixtral")
    weights = find_weights(moe.model)
    fused = next(w for w in weights if w.is_fused)
    moe._experts["inside"] = switch_expert("inside", mask_of({fused.name: torch.arange(0, fused.size, 5)}, weights))
    ids, _ = ids_of(*PROMPTS)
    names = ["inside", "d/0", "base", "inside"]
    wanted = moe(ids, expert=names, strategy="grouped").logits
    torch.testing.assert_close(moe(ids, expert=names).logits, wanted)
    for strategy in ("fused", "scratch"):
        with pytest.raises(DataError, match=r"'inside'.*cannot share a forward pass.*grouped"):
            moe(ids, expert=names, strategy=strategy)
    # Attention alone can be mixed there.
    found = moe(ids, expert=["d/0", "d/1", "base", "d/1"], strategy="fused").logits
    torch.testing.assert_close(found[1], moe(ids[1:2], expert="d/1").logits[0], rtol=1e-5, atol=1e-5)


def test_weights_that_are_not_in_memory():
    weights = find_weights(tiny_model("llama"))
    with pytest.raises(DataError, match="1 weights are not in memory"):
        MixedBoard([replace(weights[0], stored=object()), *weights[1:]]).require_mixable()


def test_texts_of_several_experts(moe):
    alone = [moe.generate_text(text, expert=name, **GREEDY) for text, name in zip(PROMPTS, NAMES, strict=True)]
    for strategy in STRATEGIES:
        assert moe.generate_text(PROMPTS, expert=NAMES, strategy=strategy, **GREEDY) == alone


def banded(bias=False):
    """Two experts of bands, one of them of MLPs only, beside those of `mixture`."""
    moe = mixture("qwen2" if bias else "llama")
    weights = find_weights(moe.model)
    norms = {w.tap: torch.rand(1, w.num_columns, generator=torch.Generator().manual_seed(5)) + 0.1 for w in weights}
    for name, band in (("low", Band("wanda", 0.0, 0.3)), ("mid", Band("magnitude", 0.25, 0.5, sublayers="mlp"))):
        ends = BandRankings(weights, norms.__getitem__).band_ends(band)
        moe._experts[name] = band_expert(name, band, ends, norms, weights)
    return moe


@pytest.mark.parametrize(
    "names", [["low", "mid", "low", "mid"], ["low", "d/0", "base", "units"], ["mid+d/0", "mid", "low", "mid"]]
)
@pytest.mark.parametrize("bias", [False, True])
def test_bands_are_found_while_weights_are_read(bias, names, monkeypatch):
    moe, called = banded(bias), []
    ids, mask = ids_of(*PROMPTS)
    alone = moe(ids, attention_mask=mask, expert=names, strategy="swap").logits
    held = []
    for kernel, most in ((False, 256), (True, 256), (True, 3)):
        # No accelerator is needed for what surrounds its kernel.
        monkeypatch.setattr(bands, "tiles_available", lambda weight, kernel=kernel: kernel)
        monkeypatch.setattr(
            bands, "tiled_products", lambda *given: called.append(1) or bands.reference_tiled_products(*given)
        )
        monkeypatch.setattr(linear, "row_limits", lambda device, most=most: RowLimits(256, 512, most))
        called.clear()
        fresh = FreeMoE(moe.model, list(moe._experts.values()), None, moe.tokenizer)
        found = fresh(ids, attention_mask=mask, expert=names, strategy="fused").logits
        torch.testing.assert_close(found[mask.bool()], alone[mask.bool()], rtol=1e-5, atol=1e-5)
        # For many rows of each the weight is masked once.
        assert bool(called) == (kernel and most == 256)
        held.append(fresh.mixed_bytes("low") + fresh.mixed_bytes("mid"))
    # The rule is all that is held of them.
    assert held[1] == held[2] < held[0]
