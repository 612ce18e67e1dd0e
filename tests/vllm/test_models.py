"""Converted models and trimmed mixtures in vLLM give what they give in transformers, whatever else is in the batch."""

import contextlib
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.vllm.test_experts import CLOSE, NEW
from tests.vllm.world import SHAPE, differences, max_difference, prompts, token_logprobs

# Case -> family, how the experts are held, whether value dimensions are the same for all tokens, whether heads are gone.
CONVERTED: dict[str, tuple[str, str, bool, bool]] = {
    "llama": ("llama", "shared", False, False),
    "llama without heads": ("llama", "materialised", True, True),
    "mistral": ("mistral", "pseudo", False, False),
    "qwen2": ("qwen2", "shared", True, False),
    "qwen3": ("qwen3", "shared", False, False),
    "gemma": ("gemma", "materialised", False, True),
}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}

# Case -> family, its configuration, experts per token of every layer, rule for router weights, place of the hooks.
TRIMMED: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...], str, str | None]] = {
    "mixtral": ("mixtral", {"intermediate_size": 64, "head_dim": 32}, (2, 1, 1, 2), "none", "pre"),
    "mixtral without hooks": ("mixtral", {"intermediate_size": 64, "head_dim": 32}, (1, 2, 1, 1), "kept_mass", None),
    "olmoe": ("olmoe", {**_EXPERTS, "intermediate_size": 64}, (4, 2, 1, 3), "renorm", "parallel"),
    "qwen3_moe": (
        "qwen3_moe",
        {**_EXPERTS, "head_dim": 32, "mlp_only_layers": [0]},
        (None, 2, 4, 1),
        "kept_mass",
        "parallel",
    ),
}
BATCH = [{"ids": ids, "new": NEW} for ids in prompts()]
# The second time from the cache, in another order; then scored.
STEPS = [{"batch": BATCH}, {"batch": BATCH[::-1]}, {"batch": [{**one, "score": True} for one in BATCH]}]


def write_converted(folder, family, mode, static, fewer_heads):
    """A folder as ``freemoe convert`` writes it, of a random structure: experts of other widths in every layer."""
    from freemoe.core.artifacts import write_manifest
    from freemoe.tomoe.export import export_converted_model
    from tests.tiny import tiny_model, tiny_tokenizer
    from tests.tomoe.random_structures import random_structure

    model = tiny_model(family, **SHAPE, head_dim=32)
    structure = random_structure(model, static=static)
    if fewer_heads:
        structure[1] = replace(structure[1], heads=torch.tensor([False, True]))
    assert len({tuple(layer.neuron_counts) for layer in structure}) == len(structure)
    export_converted_model(model, structure, folder, mode, tiny_tokenizer())
    write_manifest(folder, {"kind": "converted", "freemoe_version": "0"})
    return folder


def write_trimmed(root, family, settings, ks, rescale, position):
    """Write a base into ``root/base``, and what ``freemoe trim`` would make of it into the folder that is returned."""
    from freemoe.core.artifacts import write_manifest
    from freemoe.hookmoe.adapter import Trimmed, save_adapter
    from freemoe.hookmoe.artefact_files import KIND
    from freemoe.hookmoe.hooks.hook import new_hooks
    from freemoe.hookmoe.plans.layers import moe_layers
    from freemoe.hookmoe.plans.plan import LayerPlan
    from freemoe.models.checkpoints.fingerprint import fingerprint_model
    from freemoe.models.checkpoints.identity import IDENTITY, identify_base
    from tests.tiny import save_base, tiny_model, tiny_tokenizer

    model = tiny_model(family, **{**SHAPE, **settings})
    save_base(model, root / "base")
    hooks = None
    if position is not None:
        hooks = new_hooks(model, {layer.number: 8 for layer in moe_layers(model)[1:]}, "block", position, bias=True)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for _, hook in hooks.items():
                hook.down.weight.normal_(std=0.3, generator=generator)
    (root / "trimmed").mkdir()
    save_adapter(Trimmed(LayerPlan(ks), hooks, rescale), model, root / "trimmed")
    body = {
        "kind": KIND,
        "freemoe_version": "0",
        "revision": None,
        "plan": list(ks),
        IDENTITY: identify_base(model, tiny_tokenizer()),
    }
    base = {"base_model_name_or_path": str(root / "base"), "base_fingerprint": fingerprint_model(model)}
    write_manifest(root / "trimmed", body | base)
    return root / "trimmed"


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    places = {name: root / name.replace(" ", "-") for name in (*CONVERTED, *TRIMMED)}
    converted = {name: write_converted(places[name], *case) for name, case in CONVERTED.items()}
    return converted | {name: write_trimmed(places[name], *case) for name, case in TRIMMED.items()}


@pytest.fixture(scope="session")
def said(folders, ask):
    return dict(zip(folders, ask("v1", STEPS, *folders.values()), strict=True))


@contextlib.contextmanager
def in_transformers(folder):
    """The exported model, or the base with the trimmed artefact attached."""
    from transformers import AutoModelForCausalLM

    import freemoe.tomoe.modeling  # noqa: F401  (makes transformers know the classes)
    from freemoe.hookmoe.adapter import load_trimmed

    if (folder / "config.json").is_file():
        yield AutoModelForCausalLM.from_pretrained(folder).eval()
    else:
        model, _, trimmed = load_trimmed(folder, None, "auto", "cpu")
        with trimmed.attached(model):
            yield model


def compare(folder, steps, answers):
    """Largest difference of log-probabilities, of what was written and of scored prompts."""
    with in_transformers(folder) as model:
        return max_difference(steps, answers, lambda ids, _: token_logprobs(model, ids))


@pytest.mark.parametrize("name", [*CONVERTED, *TRIMMED])
def test_first_runner_answers_as_transformers(name, folders, said):
    differences.append(compare(folders[name], STEPS, said[name]))
    assert differences[-1] <= CLOSE
    # Whole blocks of 32 tokens, of the prompts of 40, 120, 65, 33 and 90.
    assert [one["cached"] for one in said[name][1]][::-1] == [0, 32, 96, 64, 32, 64]


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_second_runner_answers_as_transformers(name, folders, ask):
    differences.append(compare(folders[name], STEPS[:2], *ask("v2", STEPS[:2], folders[name])))
    assert differences[-1] <= CLOSE


def test_a_damaged_folder_is_refused(folders, ask, tmp_path):
    from freemoe.core.artifacts import write_manifest

    folder = shutil.copytree(folders["llama"], tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.layers.2.mlp.experts"][0, 0] = 100_000
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="cut short or edited"):
        ask("v1", STEPS[:1], folder)
    # Even where the manifest says that the files are the right ones.
    write_manifest(folder, {"kind": "converted", "freemoe_version": "0"})
    with pytest.raises(AssertionError, match="names neurons beyond"):
        ask("v1", STEPS[:1], folder)


@pytest.mark.parametrize("name", TRIMMED)
def test_the_trim_changes_far_more_than_that(name, folders):
    from freemoe.hookmoe.adapter import load_trimmed

    model, _, trimmed = load_trimmed(folders[name], None, "auto", "cpu")
    whole = token_logprobs(model, prompts()[5])
    with trimmed.attached(model):
        assert float((token_logprobs(model, prompts()[5]) - whole).abs().max()) > 100 * CLOSE


def test_another_base_is_refused(folders, ask, tmp_path):
    base = shutil.copytree(folders["mixtral"].parent / "base", tmp_path / "base")
    (weights,) = base.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="was made for the base"):
        ask("v1", STEPS[:1], folders["mixtral"], base=base)
