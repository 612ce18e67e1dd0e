"""A converted model whose files do not belong together is refused."""

import pytest
import torch

import freemoe
from freemoe.core.errors import ArtifactError, DataError, FreeMoEError
from freemoe.models.checkpoints.loading import load_base
from freemoe.tomoe.export import export_converted_model
from tests.artefacts import finish_artefact, rewritten
from tests.tiny import tiny_model, tiny_tokenizer
from tests.tomoe.random_structures import random_structure


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    model, folder = tiny_model("llama"), tmp_path_factory.mktemp("converted") / "out"
    export_converted_model(model, random_structure(model), folder, mode="shared", tokenizer=tiny_tokenizer())
    return finish_artefact(folder, "converted", model)


def test_it_is_whole(converted, tmp_path):
    assert freemoe.load(rewritten(converted, tmp_path / "copy"), device="cpu").generate_text("a", max_new_tokens=1)


NAME = "model.layers.0.mlp."

TENSORS = {
    "a neuron beyond": (lambda t: t[NAME + "experts"].view(-1)[:1].fill_(10**6), "an expert names neurons beyond"),
    "a neuron before": (lambda t: t[NAME + "experts"].view(-1)[:1].fill_(-7), "an expert names neurons beyond"),
    "an expert without neurons": (
        lambda t: t[NAME + "experts"][0].fill_(-1),
        "experts have .0, .* and config.json says",
    ),
    "NaN in a router": (lambda t: t[NAME + "router.bias"][:1].fill_(float("nan")), "NaN or infinity"),
    "NaN in a neuron": (lambda t: t[NAME + "down"].view(-1)[:1].fill_(float("nan")), "NaN or infinity"),
    "a router of integers": (
        lambda t: t.update({NAME + "router.weight": t[NAME + "router.weight"].int()}),
        "as integers",
    ),
    "a router of another number": (lambda t: t.update({NAME + "router.weight": torch.zeros(9, 32)}), "9x32|size"),
    "a tensor less": (lambda t: t.pop(NAME + "down"), "damaged|lacks"),
    "another base's head": (lambda t: t.update({"lm_head.weight": torch.zeros(288, 16)}), "288x16|size"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_others(converted, tmp_path, case):
    edit, message = TENSORS[case]
    with pytest.raises(FreeMoEError, match=message):
        freemoe.load(rewritten(converted, tmp_path / "copy", model=edit), device="cpu")


CONFIG = {
    "other widths": lambda c: c["tomoe"]["layers"][0].update(widths=[1] * len(c["tomoe"]["layers"][0]["widths"])),
    "fewer experts": lambda c: c["tomoe"]["layers"][0]["widths"].pop(),
    "another mode": lambda c: c["tomoe"].update(mode="mine"),
    "a layer less": lambda c: (c["tomoe"]["layers"].pop(), c.update(num_hidden_layers=1)),
    "no layers": lambda c: c["tomoe"].pop("layers"),
    "another type": lambda c: c.update(model_type="tomoe_mistral"),
    "the dense type": lambda c: c.update(model_type="llama", architectures=["LlamaForCausalLM"]),
}


@pytest.mark.parametrize("case", CONFIG)
def test_a_config_that_is_another(converted, tmp_path, case):
    copy = rewritten(converted, tmp_path / "copy", config=CONFIG[case])
    with pytest.raises(FreeMoEError):
        freemoe.load(copy, device="cpu")


def test_weights_of_another_conversion_are_seen_by_the_checksums(converted, tmp_path):
    copy = rewritten(converted, tmp_path / "copy")
    (copy / "config.json").write_text(
        (converted / "config.json").read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1')
    )
    with pytest.raises(ArtifactError, match=r"config\.json' .* was cut short or edited"):
        freemoe.load(copy, device="cpu")


def test_a_dense_checkpoint_under_the_name_of_a_conversion(converted, tmp_path):
    copy = rewritten(converted, tmp_path / "copy")
    tiny_model("llama").save_pretrained(tmp_path / "dense")
    (tmp_path / "dense" / "model.safetensors").replace(copy / "model.safetensors")
    with pytest.raises(DataError, match="damaged"):
        load_base(copy, device="cpu")
