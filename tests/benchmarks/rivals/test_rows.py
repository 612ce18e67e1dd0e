"""Every row: what it says of itself is so, it changes something, and behind it the model is bit-equal."""

from dataclasses import replace

import pytest
import torch

from benchmarks.rivals.fits.prompts import in_front
from benchmarks.rivals.rival import RIVALS, Rival
from freemoe.core.errors import RecipeError, UnknownNameError
from freemoe.domain_experts.purify.batches import mean_loss
from freemoe.evals.engine.scorer import Scorer
from tests.benchmarks.rivals.tiny_terms import TERMS, given
from tests.hookmoe.conftest import logits

FAMILY = {"dense": "llama", "mixture": "mixtral"}
CASES = [(name, base) for name in RIVALS.loaded_names() for base in RIVALS.get(name).bases]


@pytest.mark.parametrize(("name", "base"), CASES)
def test_it_changes_what_it_says_and_leaves_the_model_bit_equal(name, base):
    rival = RIVALS.get(name)
    model, materials = given(FAMILY[base])
    before = {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
    names, plain = [n for n, _ in model.named_modules()], logits(model)
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    rate = rival.rates[0] if rival.rates else 0.0
    terms = replace(TERMS, share=0.25 if rival.sized else 0.0, rank=rival.rank, rate=rate)
    with rival.on(model, materials, terms) as fitted:
        inside = logits(fitted.model if fitted.model is not None else model)
        assert torch.isfinite(inside).all()
        if rival.changes in ("nothing", "prompt"):
            assert torch.equal(inside, plain)
        elif fitted.bytes:
            assert not torch.equal(inside, plain)
        if "compression" in rival.groups:
            assert fitted.share_off == pytest.approx(0.25, abs=0.06)
            assert fitted.bytes > 0
        if rival.rates:
            assert fitted.numbers > 0
            assert min(fitted.losses) < fitted.losses[0]
        assert fitted.bytes <= 2 * materials.size + materials.size // 8 + 8
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert [n for n, (p, _) in before.items() if not torch.equal(p, after[n])] == []
    assert all(after[n].requires_grad == asked and after[n].grad is None for n, (_, asked) in before.items())
    assert [n for n, _ in model.named_modules()] == names
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("name", ["lora", "full", "sparsegpt", "svd", "wanda", "wanda-lora"])
def test_an_error_inside_leaves_it_bit_equal_too(name):
    model, materials = given()
    plain = logits(model)
    with pytest.raises(KeyError, match="inside"), RIVALS.get(name).on(model, materials, TERMS):
        raise KeyError("inside")
    assert torch.equal(logits(model), plain)


@pytest.mark.parametrize("name", ["switches-learned", "lora", "dora", "full", "neurons-taylor"])
def test_the_same_seed_finds_the_same(name):
    found = []
    for _ in range(2):
        model, materials = given()
        with RIVALS.get(name).on(model, materials, TERMS) as fitted:
            found.append((logits(fitted.model if fitted.model is not None else model), list(fitted.losses)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_documents_in_front_are_context_and_what_is_scored_stays():
    stop = given()[1].gradient[:1]
    # A stopping document that is a copy of the first one in front; a model that copies has no choice but to like it.
    model, materials = given(stop=stop)
    (long,) = in_front(materials, materials.gradient[:2], stop)
    assert long.tokens == (*materials.gradient[0].tokens, *materials.gradient[1].tokens, *stop[0].tokens)
    scorer = Scorer(model, materials.tokenizer)
    assert scorer.gold_pair(long).continuation == stop[0].tokens == scorer.gold_pair(stop[0]).continuation
    short = replace(materials, length=20)
    (cut,) = in_front(short, materials.gradient[:2], stop)
    assert len(cut.tokens) == 20
    assert cut.tokens[:4] == materials.gradient[1].tokens[-4:]
    _, asked = given(kind="task")
    (question,) = in_front(asked, asked.gradient[:2], asked.stop[:1])
    assert question.prompt == "0? yes\n\n1? no\n\n" + asked.stop[0].prompt


def test_few_shot_keeps_none_where_none_helps():
    model, materials = given()
    with RIVALS.get("fewshot").on(model, materials, TERMS) as fitted:
        losses = fitted.losses
        assert losses[0] == mean_loss(model, materials.batches(materials.stop))
        best = losses.index(min(losses))
        assert fitted.facts["shots"] == (0, 1, 2, 5)[best]
        assert len(fitted.prompted(materials.stop)[0].tokens) >= len(materials.stop[0].tokens)


def test_bad_rows_and_unknown_names():
    with pytest.raises(UnknownNameError, match=r"Unknown rival 'lorra'. Did you mean 'lora'"):
        RIVALS.get("lorra")
    plain = {"name": "a", "about": "-", "paper": "-", "changes": "weights", "groups": ("adaptation",), "fit": "a:b"}
    for bad, message in (
        ({"name": "a b"}, "no spaces"),
        ({"changes": "much"}, "changes is 'much'; allowed: nothing"),
        ({"bases": ("sparse",)}, "bases is 'sparse'"),
        ({"groups": ()}, "groups is 'empty'"),
        ({"groups": ("compression",)}, "sized=True"),
    ):
        with pytest.raises(RecipeError, match=message):
            Rival(**{**plain, **bad})
    with pytest.raises(ValueError, match="registered twice"):
        RIVALS.add("lora", RIVALS.get("lora"), "")
