"""One forward pass of several experts: equal to one pass each, over the families; the base is untouched."""

from contextlib import contextmanager
from unittest.mock import Mock

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
    mask = masks_of(weights).__getitem__
    with running.open_mixed_batch(MixedBoard(weights), mask_of=mask, strategy=strategy, rules=rules) as run:
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


def outcome(model, strategy="fused", ids=IDS):
    with opened(model, strategy) as run:
        run.assign(NAMES)
        return model(ids).logits


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


def test_without_numba_copies_are_made(llama, monkeypatch):
    monkeypatch.setattr(sparse, "importable", lambda package: False)
    torch.testing.assert_close(outcome(llama), one_by_one(llama, NAMES), rtol=1e-5, atol=1e-5)


def test_one_cache_and_tokens_one_by_one(llama):
    wanted = one_by_one(llama, NAMES)
    with opened(llama, "fused") as run:
        run.assign(NAMES)
        cache = llama(IDS[:, :3], use_cache=True).past_key_values
        for place in (3, 4):
            last = llama(IDS[:, place : place + 1], past_key_values=cache, use_cache=True).logits[:, 0]
            torch.testing.assert_close(last, wanted[:, place], rtol=1e-5, atol=1e-5)


def test_rows_are_equal_parts(llama):
    with opened(llama, "fused") as run:
        run.assign(["thin", "base", "lines", "band"])
        with pytest.raises(DataError, match="4 sequences have experts assigned, and a module is given 5 rows"):
            llama(IDS[:1])
        # Two rows for each, as two beams are.
        found = llama(IDS[:4].repeat_interleave(2, 0)).logits
        torch.testing.assert_close(found[::2], found[1::2])


def test_names_that_come_back_and_none(llama):
    plain, wanted = llama(IDS).logits, {}
    with opened(llama, "fused") as run:
        for turn in range(2):
            for names in (NAMES, NAMES[::-1], *([name] * 6 for name in NAMES)):
                run.assign(names)
                found = llama(IDS).logits
                assert torch.equal(found, wanted.setdefault(tuple(names), found)), turn
        run.assign([])
        assert torch.equal(llama(IDS).logits, plain)
        for number in range(40):
            run.assign(["thin"] * (number + 1))
        assert len(run._known) <= 32


def test_it_rests_while_another_block_rules(llama):
    rules, plain = [True], llama(IDS).logits
    with opened(llama, "fused", lambda: rules[0]) as run:
        run.assign(NAMES)
        rules[0] = False
        # Also a number of rows that cannot be divided among them.
        assert len(llama(IDS[:1]).logits) == 1
        assert torch.equal(llama(IDS).logits, plain)
        rules[0] = True
        assert not torch.equal(llama(IDS).logits, plain)


def test_after_an_error_everything_is_as_before(llama):
    plain = llama(IDS).logits
    with pytest.raises(DataError, match="equal parts"):
        outcome(llama, "scratch", IDS[:1])
    assert torch.equal(llama(IDS).logits, plain)
    assert torch.is_grad_enabled()


def test_wrong_asks(llama):
    with pytest.raises(RecipeError, match=r"'grouped'.*auto, fused, scratch"), opened(llama, "grouped"):
        pass
    with opened(llama, "fused") as run:
        run.assign(NAMES)
        with pytest.raises(KeyError):
            run.assign(["nobody"])
        assert run.assigned_experts == tuple(NAMES)


@pytest.mark.parametrize("family", MIXTURES[:2])
def test_fused_experts_of_a_mixture_are_refused(family):
    weights = find_weights(tiny_model(family))
    fused = next(w for w in weights if w.is_fused)
    with pytest.raises(DataError, match=r"'e'.*mixture's own experts.*grouped"):
        MixedBoard(weights).get_experts(["e"], lambda name: mask_of({fused.name: torch.arange(3)}, weights))


def test_what_was_not_used_for_longest_is_forgotten(weights):
    masks = {str(i): mask_of({weights[0].name: torch.arange(i, 900, 41)}, weights) for i in range(4)}
    ask = Mock(side_effect=masks.__getitem__)
    board = MixedBoard(weights, most_bytes=3 * 200)
    assert board.held_bytes("0") == 0
    for names in ("0", "1", "0"):
        board.get_experts([names], ask)
        assert 0 < board.held_bytes("0") <= 300
    board.get_experts(["2", "3"], ask)
    assert [name in board for name in "123"] == [False, True, True]
    assert [call.args[0] for call in ask.call_args_list] == ["0", "1", "2", "3"]


def test_one_pass_is_worth_it_for_few_rows_and_for_many(llama, weights):
    walks = sparse.loops_available(torch.float32)
    assert [cost.worth_mixing(weights, rows) for rows in (8, 256, 257, 511, 512)] == [walks, walks, False, False, True]
    # Weights in a type that the loops do not read are copied.
    llama.half()
    assert [cost.worth_mixing(weights, rows) for rows in (8, 512)] == [False, True]
