"""One base, many experts: the same answers as separate checkpoints, and a base that is always the base again."""

import gc
import shutil

import pytest
import torch

from freemoe.core.artifacts import MANIFEST
from freemoe.core.errors import ArtifactError, DataError, UnknownNameError
from freemoe.domain_experts.expert import DomainExpert, switch_expert
from freemoe.domain_experts.mixture import FreeMoE
from freemoe.domain_experts.route.subdomains import prompt_feature
from freemoe.models.mask import Mask
from freemoe.models.switching import switched_off
from tests.masks import mask_of
from tests.memory import bytes_beside
from tests.tiny import bits, model_and_weights, tiny_model, tiny_tokenizer, unchanged

EXPERTS = ["law/0", "law/1", "sums/all"]


def ids_of(*texts, side="left"):
    """Padded ids and their mask."""
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    found = tokenizer(list(texts), return_tensors="pt", padding=True)
    return found["input_ids"], found["attention_mask"]


PROMPTS = ["treaty judge claim 5?", "12+7*3=", "court appeal party 9?", "881+5*2="]


def logits(model, **options):
    ids, mask = ids_of(*PROMPTS)
    return model(ids, attention_mask=mask, **options).logits


@pytest.mark.parametrize("expert", [None, "base"])
def test_without_an_expert_it_is_the_base(world, moe, expert):
    ids, mask = ids_of(*PROMPTS)
    assert torch.equal(logits(moe, expert=expert), logits(world.model))
    ours = moe.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, expert=expert)
    assert torch.equal(ours, world.model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False))


def test_an_expert_with_nothing_off_is_the_base(world):
    moe = FreeMoE(world.model, [DomainExpert("d/none"), switch_expert("d/empty", Mask())])
    for name in ("d/none", "d/empty"):
        assert torch.equal(logits(moe, expert=name), logits(world.model))


def test_inputs_that_are_not_per_sequence_stay_whole(moe):
    ids, mask = ids_of(*PROMPTS[:2])
    keep = torch.tensor([ids.shape[1] - 3, ids.shape[1] - 1])  # as many positions as there are sequences
    names = ["law/0", "law/1"]
    found = moe(ids, attention_mask=mask, logits_to_keep=keep, expert=names).logits
    full = moe(ids, attention_mask=mask, expert=names).logits
    torch.testing.assert_close(found, full[:, keep], rtol=1e-4, atol=1e-5)


def test_auto_is_the_router(world, moe):
    ids, mask = ids_of(*PROMPTS)
    routes = moe.route(ids, mask)
    assert [r.domain for _, r in routes] == ["law", "sums", "law", "sums"]
    feature = torch.stack([prompt_feature(world.model, world.tokenizer.encode(p)) for p in PROMPTS])
    for (name, route), expected in zip(routes, moe.router.route(feature), strict=True):
        assert route.subdomain == expected.subdomain
        assert route.confidence == pytest.approx(expected.confidence, abs=1e-6)
        assert name == (route.subdomain if route.confidence >= moe.router.threshold else "base")
    names = [n for n, _ in routes]
    assert torch.equal(logits(moe, expert="auto"), logits(moe, expert=names))
    a = moe.generate(ids, attention_mask=mask, expert="auto", max_new_tokens=4, do_sample=False)
    b = moe.generate(ids, attention_mask=mask, expert=names, max_new_tokens=4, do_sample=False)
    assert torch.equal(a, b)


def test_special_tokens_and_active_experts_do_not_bend_the_route(moe):
    ids, mask = ids_of(PROMPTS[0])
    plain = moe.route(ids, mask)
    bos = torch.cat([torch.tensor([[1]]), ids], 1)
    assert moe.route(bos)[0][1].confidence == pytest.approx(plain[0][1].confidence, abs=1e-6)
    with moe.expert("law/0"):
        assert moe.route(ids, mask) == plain
        assert moe.active == "law/0"


def test_an_unsure_router_leaves_the_base(moe):
    object.__setattr__(moe.router, "threshold", 1.5)
    assert {name for name, _ in moe.route(*ids_of(*PROMPTS))} == {"base"}
    assert torch.equal(logits(moe, expert="auto"), logits(moe))


def test_experts_nest_and_go_back(moe):
    before = bits(moe.model)
    alone = {n: logits(moe, expert=n) for n in ["base", *EXPERTS]}
    with moe.expert("law/0") as same:
        assert same is moe
        assert moe.active == "law/0"
        assert torch.equal(logits(moe), alone["law/0"])
        with moe.expert("sums/all"):
            assert torch.equal(logits(moe), alone["sums/all"])
            assert torch.equal(logits(moe, expert="law/1"), alone["law/1"])
            with moe.expert(None):
                assert torch.equal(logits(moe), alone["base"])
            assert moe.active == "sums/all"
        assert torch.equal(logits(moe), alone["law/0"])
    assert moe.active == "base"
    assert unchanged(moe.model, before)
    moe.set_expert("law/1")
    moe.set_expert("law/1")
    assert torch.equal(logits(moe), alone["law/1"])
    moe.set_expert("law/0")
    assert torch.equal(logits(moe), alone["law/0"])
    moe.set_expert(None)
    assert unchanged(moe.model, before)


def test_an_expert_holds_its_places_and_their_values_and_no_copy():
    model, weights = model_and_weights("llama", num_hidden_layers=8)
    off = mask_of({w.name: torch.arange(0, w.size, 50) for w in weights}, weights)
    gc.collect()
    before = bytes_beside(model)
    moe = FreeMoE(model, [switch_expert("d/x", off)])
    moe.set_expert("d/x")
    assert bytes_beside(model) - before <= 2 * off.count * (4 + 4) < sum(p.nbytes for p in model.parameters()) / 4
    moe.set_expert(None)


@pytest.mark.parametrize("active", EXPERTS)
def test_masks_come_from_the_untouched_base(moe, active):
    other = FreeMoE(moe.model, list(moe._experts.values()))
    wanted = {name: moe.expert_mask(name) for name in EXPERTS}
    with other.expert(active):
        for name in EXPERTS:
            assert other.expert_mask(name).is_equal(wanted[name])
            assert other.active == active


def test_the_base_comes_back_after_errors(moe):
    before = bits(moe.model)
    ids, _ = ids_of(PROMPTS[0])
    with pytest.raises(RuntimeError, match="on purpose"), moe.expert("law/0"):
        raise RuntimeError("on purpose")
    assert unchanged(moe.model, before)
    for call in (
        lambda: moe(torch.full((1, 3), 9999), expert="law/0"),
        lambda: moe.generate(ids, expert="sums/all", nonsense=1),
        lambda: moe(ids.repeat(2, 1), expert=["law/0", "law/9"]),
    ):
        with pytest.raises((TypeError, ValueError, IndexError, KeyError)):
            call()
        assert moe.active == "base"
        assert unchanged(moe.model, before)
    moe.set_expert("law/1")
    with pytest.raises(UnknownNameError):
        moe.set_expert("law/9")
    assert moe.active == "law/1"
    moe.set_expert("base")
    assert unchanged(moe.model, before)


def test_what_no_expert_can_answer_says_why(moe):
    ids, _ = ids_of("abc")
    depends = (DataError, "depends on the prompt")
    for call, error, message in (
        (lambda: moe(ids, expert="law/00"), UnknownNameError, r"'law/00'.*Did you mean 'law/0'.*sums/all"),
        (lambda: moe.set_expert("auto"), *depends),
        (lambda: moe.expert_mask("auto"), *depends),
        (lambda: moe(ids, expert=["auto"]), *depends),
        (lambda: moe(ids, expert=EXPERTS, strategy="swap"), DataError, "3 experts are named for a batch of 1"),
        (lambda: moe(inputs_embeds=torch.zeros(1, 2, 32), expert="auto"), DataError, "input_ids"),
        (lambda: FreeMoE(moe.model, [])(ids, expert="auto"), DataError, "no router"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_text(moe):
    text, used = moe.generate_text("court appeal", expert="law/1", max_new_tokens=5, do_sample=False)
    ids, _ = ids_of("court appeal")
    out = moe.generate(ids, expert="law/1", max_new_tokens=5, do_sample=False)
    assert (text, used) == (moe.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), "law/1")
    _, used = moe.generate_text("12+4*9=", max_new_tokens=2, do_sample=False)
    assert used == "sums/all"
    assert moe.generate_text("x" * 250, expert="base", max_new_tokens=6, do_sample=False)[1] == "base"
    with pytest.raises(DataError, match=r"251 tokens; with 6 new ones .* at most 250 to fit the context of 256"):
        moe.generate_text("x" * 251, expert="base", max_new_tokens=6)
    with pytest.raises(DataError, match="0 tokens"):
        moe.generate_text("", expert="base")
    with pytest.raises(DataError, match="tokenizer"):
        FreeMoE(moe.model, []).generate_text("a", expert="base")


def test_another_base_is_refused(world, artefact):
    with pytest.raises(ArtifactError, match=r"made for the base .* fingerprint"):
        FreeMoE.from_pretrained(tiny_model("llama", seed=1), artefact)
    touched, weights = model_and_weights("llama")
    off = mask_of({weights[0].name: torch.tensor([3])}, weights)
    with switched_off(weights, off), pytest.raises(ArtifactError, match="fingerprint"):
        FreeMoE.from_pretrained(touched, artefact)
    with torch.no_grad():
        touched.lm_head.weight[0, 0] += 1e-6
    with pytest.raises(ArtifactError, match="fingerprint"):
        FreeMoE.from_pretrained(touched, artefact)
    assert FreeMoE.from_pretrained(None, artefact, device="cpu").experts == EXPERTS
    assert FreeMoE.from_pretrained(tiny_model("llama"), artefact, tokenizer=tiny_tokenizer()).tokenizer


@pytest.mark.parametrize("file", ["experts.safetensors", "router.safetensors", "result.json", MANIFEST])
def test_a_damaged_artefact_is_refused(world, artefact, tmp_path, file):
    """How it may be damaged, tests/core/test_artifacts.py shows."""
    copy = shutil.copytree(artefact, tmp_path / "copy")
    data = (copy / file).read_bytes()
    (copy / file).write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    with pytest.raises(ArtifactError, match=file):
        FreeMoE.from_pretrained(world.model, copy)


def test_training_flags_and_gradients_pass_through(moe):
    ids, _ = ids_of("abc")
    out = moe(ids, labels=ids, expert="law/0")
    assert out.loss.requires_grad
