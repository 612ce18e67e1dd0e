"""One forward pass of several experts: equal to one pass each, over the families; the base is untouched."""

from contextlib import contextmanager

import pytest
import torch

from freemoe.core.errors import DataError, RecipeError
from freemoe.kernels.sparse import rows as sparse
from freemoe.models.mask import Mask, TensorMask
from freemoe.models.mixed import cost, running
from freemoe.models.mixed.board import MixedBoard
from freemoe.models.switching import switched_off
from freemoe.models.weights import find_weights
from tests.masks import mask_of
from tests.tiny import DENSE, MIXTURES, tiny_model

NAMES = ["thin", "base", "lines", "band", "thin", "mixed"]
IDS = torch.randint(3, 200, (6, 5), generator=torch.Generator().manual_seed(0))
STRATEGIES = ("fused", "scratch", "auto")


def masks_of(weights):
    """A few single places, a third of everything, whole rows and columns, and all of these."""
    dense = [w for w in weights if not w.is_fused]
    thin = mask_of({w.name: torch.arange(i % 7, w.size, 41) for i, w in enumerate(dense)}, weights)
    band = mask_of({w.name: torch.arange(0, w.size, 3) for w in dense}, weights)
    lines = Mask(
        {
            w.name: TensorMask.of_lines(w.shape, axis, torch.tensor([1, 3, 4]))
            for w, axis in zip(dense, ["rows", "columns"] * len(dense), strict=False)
        }
    )
    return {"base": Mask(), "thin": thin, "band": band, "lines": lines, "mixed": lines.union(thin)}


@contextmanager
def opened(model, strategy, rules=lambda: True):
    weights = find_weights(model)
    with running.open_mixed_batch(
        MixedBoard(weights), mask_of=masks_of(weights).__getitem__, strategy=strategy, rules=rules
    ) as run:
        yield run


@torch.no_grad()
def one_by_one(model, names):
    weights = find_weights(model)
    masks, found = masks_of(weights), []
    for row, name in zip(IDS, names, strict=True):
        with switched_off(weights, masks[name]):
            found.append(model(row[None]).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("family", [*DENSE, "qwen2_moe"])
def test_a_mixed_batch_equals_its_sequences_by_themselves(family):
    model = tiny_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plain, wanted = model(IDS).logits, one_by_one(model, NAMES)
    for strategy in STRATEGIES:
        with opened(model, strategy) as run:
            assert torch.equal(model(IDS).logits, plain)
            run.assign(["base"] * len(NAMES))
            assert torch.equal(model(IDS).logits, plain)
            run.assign(NAMES)
            found = model(IDS).logits
            assert not found.requires_grad
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(found[0], plain[0], atol=1e-2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(IDS).logits, plain)
    assert not any("forward" in module.__dict__ for module in model.modules())


def outcome(model, strategy="fused"):
    with opened(model, strategy) as run:
        run.assign(NAMES)
        return model(IDS).logits


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_within_its_rounding(strategy):
    model = tiny_model("llama").to(torch.bfloat16)
    wanted = one_by_one(model, NAMES).float()
    assert (outcome(model, strategy).float() - wanted).abs().max() < 0.06 * wanted.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_types_that_have_no_loops(dtype):
    model = tiny_model("llama").to(dtype)
    close = {"rtol": 1e-2, "atol": 2e-2} if dtype == torch.float16 else {}
    torch.testing.assert_close(outcome(model), one_by_one(model, NAMES), **close)


def test_without_numba_copies_are_made(monkeypatch):
    monkeypatch.setattr(sparse, "importable", lambda package: False)
    model = tiny_model("llama")
    torch.testing.assert_close(outcome(model), one_by_one(model, NAMES), rtol=1e-5, atol=1e-5)


def test_one_cache_and_tokens_one_by_one():
    model = tiny_model("llama")
    wanted = one_by_one(model, NAMES)
    with opened(model, "fused") as run:
        run.assign(NAMES)
        cache = model(IDS[:, :3], use_cache=True).past_key_values
        for place in (3, 4):
            last = model(IDS[:, place : place + 1], past_key_values=cache, use_cache=True).logits[:, 0]
            torch.testing.assert_close(last, wanted[:, place], rtol=1e-5, atol=1e-5)


def test_rows_are_equal_parts():
    model = tiny_model("llama")
    with opened(model, "fused") as run:
        run.assign(["thin", "base", "lines", "band"])
        with pytest.raises(DataError, match="4 sequences have experts assigned, and a module is given 5 rows"):
            model(IDS[:1])
        # Two rows for each, as two beams are.
        found = model(IDS[:4].repeat_interleave(2, 0)).logits
        torch.testing.assert_close(found[::2], found[1::2])


def test_names_that_come_back_and_none():
    model = tiny_model("llama")
    plain, wanted = model(IDS).logits, {}
    with opened(model, "fused") as run:
        for turn in range(2):
            for names in (NAMES, NAMES[::-1], *([name] * 6 for name in NAMES)):
                run.assign(names)
                found = model(IDS).logits
                assert torch.equal(found, wanted.setdefault(tuple(names), found)), turn
        run.assign([])
        assert torch.equal(model(IDS).logits, plain)
        for number in range(40):
            run.assign(["thin"] * (number + 1))
        assert len(run._known) <= 32


def test_it_rests_while_another_block_rules():
    model, rules = tiny_model("llama"), [True]
    plain = model(IDS).logits
    with opened(model, "fused", lambda: rules[0]) as run:
        run.assign(NAMES)
        rules[0] = False
        assert torch.equal(model(IDS[:1]).logits, model(IDS[:1]).logits)
        assert torch.equal(model(IDS).logits, plain)
        rules[0] = True
        assert not torch.equal(model(IDS).logits, plain)


def _run(run, model):
    run.assign(NAMES)
    model(IDS[:1])


def test_after_an_error_everything_is_as_before():
    model = tiny_model("llama")
    plain = model(IDS).logits
    with pytest.raises(DataError, match="equal parts"), opened(model, "scratch") as run:
        _run(run, model)
    assert torch.equal(model(IDS).logits, plain)
    assert torch.is_grad_enabled()


def test_wrong_asks():
    model = tiny_model("llama")
    with pytest.raises(RecipeError, match=r"'grouped'.*auto, fused, scratch"), opened(model, "grouped"):
        pass
    with opened(model, "fused") as run:
        run.assign(NAMES)
        with pytest.raises(KeyError):
            run.assign(["nobody"])
        assert run.assigned_experts == tuple(NAMES)


@pytest.mark.parametrize("family", MIXTURES[:2])
def test_fused_experts_of_a_mixture_are_refused(family):
    model = tiny_model(family)
    weights = find_weights(model)
    fused = next(w for w in weights if w.is_fused)
    board = MixedBoard(weights)
    with pytest.raises(DataError, match=r"'e'.*mixture's own experts.*grouped"):
        board.get_experts(["e"], lambda name: mask_of({fused.name: torch.arange(3)}, weights))


def test_what_was_not_used_for_longest_is_forgotten():
    weights = find_weights(tiny_model("llama"))
    masks = {str(i): mask_of({weights[0].name: torch.arange(i, 900, 41)}, weights) for i in range(4)}
    asked = []
    board = MixedBoard(weights, most_bytes=3 * 200)
    assert board.held_bytes("0") == 0
    for names in ("0", "1", "0"):
        board.get_experts([names], lambda name: asked.append(name) or masks[name])
        assert 0 < board.held_bytes("0") <= 300
    board.get_experts(["2", "3"], lambda name: asked.append(name) or masks[name])
    assert [name in board for name in "123"] == [False, True, True]
    assert asked == ["0", "1", "2", "3"]


def test_one_pass_is_worth_it_for_few_rows_and_for_many():
    weights = find_weights(tiny_model("llama"))
    walks = sparse.loops_available(torch.float32)
    assert [cost.worth_mixing(weights, rows) for rows in (8, 256, 257, 511, 512)] == [walks, walks, False, False, True]
    # Weights in a type that the loops do not read are copied.
    halves = find_weights(tiny_model("llama").half())
    assert [cost.worth_mixing(halves, rows) for rows in (8, 512)] == [False, True]
