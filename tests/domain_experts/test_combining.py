"""Unions and intersections of experts: the masks, live, written out, refused; and scored on held-out documents."""

import pytest
import torch

from freemoe.core.errors import ArtifactError, DataError, UnknownNameError
from freemoe.domain_experts.expert import DomainExpert, switch_expert, unit_expert
from freemoe.domain_experts.hosting.combining import combine_experts, combined_mask
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.structured.units import find_units
from freemoe.models.mask import Mask
from freemoe.models.weights import find_weights
from tests.domain_experts.test_mixture import EXPERTS, bits, logits, unchanged
from tests.masks import indices_of, mask_of
from tests.tiny import model_and_weights


def places(mask):
    return {(name, int(i)) for name, where in indices_of(mask).items() for i in where}


def test_masks_join_as_sets_do(moe):
    a, b, c = (places(moe.expert_mask(n)) for n in EXPERTS)
    assert places(moe.expert_mask("law/0+law/1")) == a | b
    assert places(moe.expert_mask("law/0 & law/1")) == a & b
    assert places(moe.expert_mask("+".join(EXPERTS))) == a | b | c
    assert places(combined_mask("intersection", [moe.expert_mask(n) for n in EXPERTS])) == a & b & c
    assert moe.expert_mask("law/0+law/0").is_equal(moe.expert_mask("law/0"))
    assert a & b
    assert a - b


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("law/0+sums/al", r"Unknown expert 'sums/al'. Did you mean 'sums/all'.*stands in law/0\+sums/al"),
        ("law/0+law/1&sums/all", r"Unknown expert 'law/1&sums/all'"),
        ("x+y", r"Unknown expert 'x'.*stands in x\+y"),
    ],
)
def test_wrong_combinations_name_the_wrong_part(moe, name, message):
    with pytest.raises(UnknownNameError, match=message):
        moe.set_expert(name)


def test_a_combination_is_used_like_any_expert(moe):
    before = bits(moe.model)
    moe.add_expert("both", union=["law/0", "sums/all"])
    assert moe.experts == [*EXPERTS, "both"]
    wanted = logits(moe, expert="both")
    assert torch.equal(wanted, logits(moe, expert="law/0+sums/all"))
    with moe.expert("law/0"):
        moe.add_expert("few", intersection=["law/0", "law/1"])
        assert moe.active == "law/0"
    with moe.expert("law/0&law/1"):
        assert moe.active == "law/0&law/1"
        assert torch.equal(logits(moe), logits(moe, expert="few"))
        found = logits(moe, expert=["base", "both", "few", "law/1"])[1]
        torch.testing.assert_close(found, wanted[1], rtol=1e-5, atol=1e-5)
    assert unchanged(moe.model, before)
    said = {row["name"]: row for row in moe.expert_summary()}
    assert said["both"]["off"] == moe.expert_mask("both").count
    assert (said["both"]["accepted"], said["both"]["gain"]) == (None, None)
    assert "law/0+sums/all" in said["both"]["verdict"]
    _, used = moe.generate_text("court appeal", expert="law/0+sums/all", max_new_tokens=3, do_sample=False)
    assert used == "law/0+sums/all"


def test_combinations_that_cannot_be(moe):
    weights = find_weights(moe.model)
    left_on = int((~moe.expert_mask("law/0")[weights[0].name].to_bools()).nonzero()[0])
    moe._experts["d/else"] = switch_expert("d/else", mask_of({weights[0].name: torch.tensor([left_on])}, weights))
    for name, given, error, message in (
        ("x", {}, DataError, "give one of the two"),
        ("x", {"union": ["law/0", "law/1"], "intersection": ["law/0"]}, DataError, "give one of the two"),
        ("x", {"union": ["law/0"]}, DataError, "'x' is made of 1 experts; a union needs at least 2"),
        ("law/1", {"union": ["law/0", "law/1"]}, DataError, "an expert 'law/1' already"),
        ("x", {"union": ["law/0", "law/2"]}, UnknownNameError, "'law/2'"),
        ("x", {"intersection": ["law/0", "d/else"]}, DataError, "'law/0', 'd/else' is the base itself: no weight"),
    ):
        with pytest.raises(error, match=message):
            moe.add_expert(name, **given)
    moe._experts["d/none"] = DomainExpert("d/none")
    with pytest.raises(DataError, match="nothing is off in any"):
        moe.described("d/none+d/none")
    assert "x" not in moe.experts


def units_of(model, kind, off):
    units = find_units(model, kind)
    return units, {layer.number: torch.tensor(off) for layer in units.layers}


def test_units_stay_units():
    model, weights = model_and_weights("llama")
    units, first = units_of(model, "neuron", [0, 3, 4])
    _, second = units_of(model, "neuron", [3, 5])
    q = next(w for w in weights if w.sublayer == "attention")
    single = mask_of({q.name: torch.tensor([1, 2])}, weights)
    a = unit_expert("a", "neuron", units.line_indices(first), single)
    b = unit_expert("b", "neuron", units.line_indices(second), Mask())
    union, both = (combine_experts("x", how, [a, b], weights) for how in ("union", "intersection"))
    assert {k: v.tolist() for k, v in units.of_lines(union.lines).items()} == {key: [0, 3, 4, 5] for key in first}
    assert {k: v.tolist() for k, v in units.of_lines(both.lines).items()} == {key: [3] for key in first}
    assert (union.kind, union.unit, both.unit) == ("unit", "neuron", "neuron")
    assert places(union.mask(weights)) == places(a.mask(weights)) | places(b.mask(weights))
    assert places(both.mask(weights)) == places(a.mask(weights)) & places(b.mask(weights))
    assert list(union.switches) == [q.name]
    assert not both.switches
    # With single switches: the units of one, and what else is off.
    mixed = combine_experts("x", "union", [a, switch_expert("c", single)], weights)
    assert mixed.unit == "neuron"
    assert places(mixed.mask(weights)) == places(a.mask(weights))


def test_whole_experts_of_a_mixture_stay_so():
    model, weights = model_and_weights("mixtral")
    units, off = units_of(model, "expert", [1])
    a = unit_expert("a", "expert", units.line_indices(off), Mask())
    q = next(w for w in weights if w.sublayer == "attention")
    b = switch_expert("b", mask_of({q.name: torch.arange(50)}, weights))
    union = combine_experts("x", "union", [b, a], weights)
    assert (union.unit, places(union.mask(weights))) == ("expert", places(a.mask(weights)) | places(b.mask(weights)))
    moe = FreeMoE(model, [a, b])
    before = bits(model)
    for write in (lambda: moe.merge_and_save("a+b", "nowhere"), lambda: moe.merge_and_unload("a+b")):
        with pytest.raises(ArtifactError, match="routers do not choose"):
            write()
    assert (moe.experts, unchanged(model, before)) == (["a", "b"], True)
