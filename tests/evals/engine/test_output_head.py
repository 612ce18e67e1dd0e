"""The head on some rows at a time: losses, gradients and scores equal to all logits at once, whatever a family does."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from freemoe.evals.engine import output_head
from freemoe.evals.engine.output_head import distillation_loss, forward_to_head, summed_loss
from freemoe.evals.engine.scorer import Scorer
from tests.tiny import CASES, VOCABULARY, tiny_model, tiny_tokenizer

SIZES = {**CASES["llama"][1], "vocab_size": VOCABULARY}
SCALED = {"cohere": {"logit_scale": 0.3}, "granite": {"logits_scaling": 7.0}}
FAMILIES = ["llama", "gpt2", "opt", "gemma2", "gemma3_images", "phi", "gpt_neox", "mixtral", *SCALED]


def model_of(case, **more):
    if case not in SCALED:
        return tiny_model(case, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(case, **{**SIZES, **SCALED[case], **more})
        model = AutoModelForCausalLM.from_config(config).eval()
        for p in model.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.15)
    return model


def rows():
    """Ids, and places and targets of 13 of their 24 positions."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 250, (3, 8), generator=generator)
    at = torch.randperm(24, generator=generator)[:13].sort().values
    return ids, at, torch.randint(3, 250, (13,), generator=generator)


def slow(model, parameters):
    ids, at, targets = rows()
    logits = model(input_ids=ids).logits.flatten(0, 1)[at]
    loss = -torch.log_softmax(logits.double(), -1)[range(13), targets].sum()
    return float(loss.detach()), torch.autograd.grad(loss, parameters)


def fast(model, parameters):
    ids, at, targets = rows()
    for p in model.parameters():
        p.requires_grad_(any(p is q for q in parameters))
    loss = summed_loss(forward_to_head(model, at, input_ids=ids, use_cache=False), targets)
    return float(loss.detach()), torch.autograd.grad(loss, parameters)


def inner(model):
    """A matrix of the first layer and one of the last."""
    named = [p for n, p in model.named_parameters() if ".0." in n or ".1." in n]
    matrices = [p for p in named if p.ndim > 1]
    return [matrices[0], matrices[-1]]


def assert_same(model, parameters):
    """The loss, which is the slow way's, and so are its gradients."""
    (expected, slopes), (found, mine) = slow(model, parameters), fast(model, parameters)
    assert found == pytest.approx(expected, rel=1e-5)
    for a, b in zip(mine, slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)
    return expected


@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("case", FAMILIES)
def test_loss_and_gradients_equal_all_logits_at_once(case, chunk, monkeypatch):
    monkeypatch.setattr(output_head, "CHUNK", chunk * VOCABULARY)
    model = model_of(case)
    expected = assert_same(model, inner(model.model.language_model if case == "gemma3_images" else model))
    with torch.no_grad():
        ids, at, targets = rows()
        loss = summed_loss(forward_to_head(model, at, input_ids=ids), targets)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_distillation_is_the_divergence_whatever_the_chunk(case, chunk, monkeypatch):
    monkeypatch.setattr(output_head, "CHUNK", chunk * VOCABULARY)
    model, other = model_of(case), model_of(case, seed=1)
    ids, at, _ = rows()
    p, q = (torch.softmax(m(input_ids=ids).logits.flatten(0, 1)[at].double(), -1) for m in (other, model))
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    assert expected > 0.01
    slopes = torch.autograd.grad(expected, mine := inner(model))
    for p in model.parameters():
        p.requires_grad_(any(p is q for q in mine))
    with torch.no_grad():
        teacher = forward_to_head(other, at, input_ids=ids)
    found = distillation_loss(forward_to_head(model, at, input_ids=ids), teacher)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for a, b in zip(torch.autograd.grad(found, mine), slopes, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_distillation_of_the_teacher_itself_or_of_nothing_is_zero():
    ids, at, _ = rows()
    for places in (at, at[:0]):
        ending = forward_to_head(model_of("llama"), places, input_ids=ids)
        assert float(distillation_loss(ending, ending).detach()) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("case", ["llama", "gemma2", "phi"])
def test_a_head_that_is_trained_has_its_gradient(case, monkeypatch):
    monkeypatch.setattr(output_head, "CHUNK", 5 * VOCABULARY)
    model = model_of(case, tie_word_embeddings=case != "phi")
    assert_same(model, list(model.get_output_embeddings().parameters()))


def test_only_a_bare_linear_head_counts_as_plain():
    def plain(model):
        ids, at, _ = rows()
        return forward_to_head(model, at, input_ids=ids).plain is not None

    assert all(plain(model_of(case)) for case in ("llama", "gpt2", "gemma3_images", "phi"))
    assert not any(plain(model_of(case)) for case in ("gemma2", *SCALED))
    hooked, replaced = model_of("llama"), model_of("llama")
    hooked.lm_head.register_forward_hook(lambda module, args, output: output * 2)
    replaced.lm_head.forward = lambda x: nn.functional.linear(x, replaced.lm_head.weight) * 2
    assert not plain(hooked)
    assert not plain(replaced)


class ScaledInPlace(type(model_of("llama"))):
    def forward(self, *args, **kwargs):
        found = super().forward(*args, **kwargs)
        found.logits.mul_(2)
        return found


class HeadIsNoModule(type(model_of("llama"))):
    def forward(self, input_ids, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)
        hidden.logits = nn.functional.linear(hidden.last_hidden_state, self.lm_head.weight)
        return hidden


@pytest.mark.parametrize("kind", [ScaledInPlace, HeadIsNoModule])
def test_other_forwards_give_the_same_loss_and_gradients(kind):
    model = model_of("llama")
    model.__class__ = kind
    assert_same(model, inner(model))


class Largest(TorchDispatchMode):
    """The most elements of any tensor with a vocabulary's width, beside the head's own weight transposed."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            logits = isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (VOCABULARY,)
            if logits and tensor.shape != (SIZES["hidden_size"], VOCABULARY):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_logits_are_never_there_at_once(case, monkeypatch):
    monkeypatch.setattr(output_head, "CHUNK", 2 * VOCABULARY)
    model = model_of(case)
    with Largest() as seen:
        fast(model, inner(model))
    assert seen.elements == 2 * VOCABULARY


@pytest.mark.parametrize("case", ["llama", "gemma2"])
def test_scores_in_chunks_equal_scores_at_once(case, monkeypatch):
    def answers():
        scorer = Scorer(model_of(case), tiny_tokenizer())
        return scorer.loglikelihoods([(f"what is {i}?", f" {a}") for i in range(4) for a in ("one", "seven")])

    whole = answers()
    monkeypatch.setattr(output_head, "CHUNK", 3 * VOCABULARY)
    with Largest() as seen:
        chunked = answers()
    assert seen.elements < 5 * VOCABULARY
    for one, other in zip(chunked, whole, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
