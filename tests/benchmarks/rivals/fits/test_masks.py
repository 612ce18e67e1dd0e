"""Ranked weights: the lowest of every row, and the share exactly; trained ones filled up to it."""

from dataclasses import replace

import pytest
import torch

from benchmarks.rivals.fits.masks import NORM, lowest_in_rows, purified, ranked
from freemoe.models.hooks import forward_pre_hook
from tests.benchmarks.rivals.tiny_terms import TERMS, given


def test_the_lowest_of_every_row_and_rows_take_turns():
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [0.0, 5.0, -1.0], [9.0, 8.0, 7.0]])
    off = lowest_in_rows(scores, 0.5)
    assert off.sum(1).tolist() == [2, 1, 2, 1]
    assert off.tolist() == [[False, True, True], [True, False, False], [True, False, True], [False, False, True]]
    assert int(lowest_in_rows(torch.rand(2, 64, 24), 0.01).sum()) == 2 * 15
    assert not lowest_in_rows(scores, 0.0).any()


def test_wanda_is_the_smallest_products_of_weight_and_norm_of_its_input():
    model, materials = given()
    batches = materials.batches(materials.gradient)
    weight, seen = materials.weights[0], []
    layer = model.get_submodule(weight.name.removesuffix(".weight"))
    with forward_pre_hook(layer, lambda module, args: seen.append(args[0])):
        for batch in batches:
            model(input_ids=batch.ids)
    rows = torch.cat([x[b.mask.bool()] for x, b in zip(seen, batches, strict=True)])
    scores = weight.canonical_view()[0].abs() * rows.norm(p=NORM, dim=0)
    expected = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argsort(1)[:, :8], True)
    with ranked(model, materials, TERMS, metric="wanda") as fitted:
        assert torch.equal(weight.canonical_view()[0] == 0, expected)
        assert fitted.share_off == pytest.approx(0.25)


def test_switches_are_filled_up_to_the_share_and_all_of_them_stay_off():
    model, materials = given()
    terms = replace(TERMS, share=0.3)
    with purified(model, materials, terms, method="learned") as alone:
        off = [w.canonical_view() == 0 for w in materials.weights]
    with purified(model, materials, terms, method="learned", filled_by="wanda") as filled:
        assert all((w.canonical_view()[o] == 0).all() for w, o in zip(materials.weights, off, strict=True))
        assert alone.share_off < filled.share_off == pytest.approx(0.3, abs=0.05)
        assert filled.facts["share_before_filling"] == alone.share_off
