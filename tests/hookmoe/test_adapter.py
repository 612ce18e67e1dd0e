"""The artefact: saved, loaded and attached it is the same model bit for bit; for another base it is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.peft_utils import find_adapter_config_file

from freemoe.core.artifacts import read_manifest, write_manifest
from freemoe.core.errors import ArtifactError
from freemoe.evals.engine.answering import Answering
from freemoe.hookmoe.adapter import Trimmed, load_adapter, save_adapter
from freemoe.hookmoe.artefact import inspect_artefact
from freemoe.hookmoe.artefact_files import CONFIG, KIND, WEIGHTS
from freemoe.hookmoe.hooks.hook import new_hooks
from freemoe.hookmoe.plans.exports import write_exports
from freemoe.hookmoe.plans.layers import moe_layers, plan_of
from freemoe.hookmoe.plans.plan import LayerPlan, uniform_plan
from freemoe.models.switchboard import ExpertCache
from freemoe.models.weights import find_weights
from tests.artefacts import finish_artefact
from tests.hookmoe.conftest import logits
from tests.hookmoe.hooks.test_hook import stirred
from tests.masks import mask_of
from tests.tiny import tiny_model, tiny_tokenizer


def written(model, trimmed, folder):
    folder.mkdir()
    save_adapter(trimmed, model, folder)
    return finish_artefact(folder, KIND, model)


def trimmed_of(model, position="pre"):
    widths = {layer.number: 4 + layer.number for layer in moe_layers(model)}
    hooks = stirred(new_hooks(model, widths, "routed", position, bias=True))
    return Trimmed(uniform_plan(plan_of(model), 1), hooks)


@pytest.mark.parametrize("position", ["pre", "parallel"])
def test_saved_and_loaded_is_bit_equal(mixture, tmp_path, position):
    before, trimmed = logits(mixture), trimmed_of(mixture, position)
    with trimmed.attached(mixture):
        wanted = logits(mixture)
    loaded = load_adapter(written(mixture, trimmed, tmp_path / "a"), mixture)
    with loaded.attached(mixture):
        assert torch.equal(logits(mixture), wanted)
    assert torch.equal(logits(mixture), before)
    assert loaded.plan == trimmed.plan


def test_half_precision_hooks_keep_their_scalar_in_fp32(tmp_path):
    model = tiny_model("mixtral").to(torch.bfloat16)
    trimmed = trimmed_of(model).as_type(torch.bfloat16)
    loaded = load_adapter(written(model, trimmed, tmp_path / "a"), model)
    assert loaded.hooks is not None
    hook = loaded.hooks.items()[0][1]
    assert (hook.up.weight.dtype, hook.r.dtype) == (torch.bfloat16, torch.float32)
    with trimmed.attached(model):
        wanted = logits(model)
    with loaded.attached(model):
        assert torch.equal(logits(model), wanted)


def test_the_rule_for_router_weights_is_part_of_the_artefact(mixtral, tmp_path):
    trimmed = Trimmed(uniform_plan(plan_of(mixtral), 1), None, "kept_mass")
    with trimmed.attached(mixtral):
        wanted = logits(mixtral)
    with Trimmed(trimmed.plan).attached(mixtral):
        assert not torch.equal(logits(mixtral), wanted)
    loaded = load_adapter(written(mixtral, trimmed, tmp_path / "a"), mixtral)
    assert (loaded.hooks, loaded.plan) == (None, trimmed.plan)
    with loaded.attached(mixtral):
        assert torch.equal(logits(mixtral), wanted)


def test_the_folder_is_no_adapter_of_pefts_and_one_with_its_names_still_loads(mixtral, tmp_path):
    trimmed = trimmed_of(mixtral)
    folder = written(mixtral, trimmed, tmp_path / "a")
    assert find_adapter_config_file(folder) is None
    with pytest.raises(ValueError, match=r"Unrecognized model .*config\.json"):
        AutoModelForCausalLM.from_pretrained(folder)
    for name, older in ((CONFIG, "adapter_config.json"), (WEIGHTS, "adapter_model.safetensors")):
        (folder / name).rename(folder / older)
    said = read_manifest(folder, check=False)
    said |= {"freemoe_version": "0.1.0", "created": "2026-01-01T00:00:00+00:00"}
    write_manifest(folder, {k: v for k, v in said.items() if k not in ("format", "files", "checksum")})
    tensors = load_adapter(folder, mixtral).hook_tensors()
    assert tensors.keys() == trimmed.hook_tensors().keys()
    assert all(torch.equal(value, tensors[name]) for name, value in trimmed.hook_tensors().items())
    assert inspect_artefact(folder)["bytes"] > 0


def test_another_base_family_shape_or_kind_is_refused(mixtral, tmp_path):
    folder = written(mixtral, trimmed_of(mixtral), tmp_path / "a")
    with pytest.raises(ArtifactError, match="made for the base 'tiny'"):
        load_adapter(folder, tiny_model("mixtral", seed=1, num_hidden_layers=3))
    with pytest.raises(ArtifactError, match="family 'mixtral', and the model has 'olmoe'"):
        load_adapter(folder, tiny_model("olmoe", num_hidden_layers=3))
    with pytest.raises(ArtifactError, match="num hidden layers 3, and the model has 2"):
        load_adapter(folder, tiny_model("mixtral"))
    (folder / "hookmoe.safetensors").write_bytes(b"cut")
    with pytest.raises(ArtifactError, match="cut short or edited"):
        load_adapter(folder, mixtral)
    other = tmp_path / "b"
    other.mkdir()
    write_manifest(other, {"kind": "domain-experts"})
    with pytest.raises(ArtifactError, match="'domain-experts', not a trimmed mixture"):
        load_adapter(other, mixtral)


def test_exports_say_what_engines_need(mixtral, tmp_path):
    write_exports(tmp_path, mixtral, LayerPlan((2, 1, 1)), hooked=False)
    # A plan that differs by layer is no override.
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    write_exports(tmp_path, mixtral, LayerPlan((1, 1, 1)), hooked=True)
    assert json.loads((tmp_path / "plan.json").read_text())["top_k"] == [1, 1, 1]
    vllm = json.loads((tmp_path / "exports" / "vllm.json").read_text())
    assert vllm["hf_overrides"] == {"num_experts_per_tok": 1}
    assert "hooks need" in vllm["covers"]
    for rescale, covers in (("none", "the whole artefact"), ("kept_mass", "the plan alone, with the model's own rule")):
        write_exports(tmp_path, mixtral, LayerPlan((1, 1, 1)), hooked=False, rescale=rescale)
        assert json.loads((tmp_path / "exports" / "vllm.json").read_text())["covers"].startswith(covers)


def test_the_override_is_the_plan(mixtral, tmp_path):
    write_exports(tmp_path, mixtral, LayerPlan((1, 1, 1)), hooked=False)
    setting = json.loads((tmp_path / "exports" / "transformers.json").read_text())["from_pretrained"]
    mixtral.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **setting).eval()
    with Trimmed(LayerPlan((1, 1, 1))).attached(mixtral):
        assert torch.equal(logits(loaded), logits(mixtral))


def test_plan_hooks_and_domain_experts_together(mixture):
    """Weights inside fused experts are off, the plan cuts, hooks bend, gates are as they were; and all comes undone."""
    before = logits(mixture)
    weights = find_weights(mixture)
    gates = {layer.number: [p.detach().clone() for p in layer.gate.parameters()] for layer in moe_layers(mixture)}
    assert not {w.name for w in weights} & {f"{layer.path}.gate.weight" for layer in moe_layers(mixture)}
    board = ExpertCache(weights)
    fused = [w for w in weights if w.is_fused]
    assert fused
    board.add_expert("law", mask_of({w.name: torch.arange(0, w.size, 7) for w in fused}, fused))
    trimmed = trimmed_of(mixture)
    with trimmed.attached(mixture):
        hooked = logits(mixture)
    board.activate_expert("law")
    switched = logits(mixture)
    assert not torch.equal(switched, before)
    for weight in fused:
        assert bool((weight.canonical_view().reshape(-1)[::7] == 0).all())
    with trimmed.attached(mixture):
        both = logits(mixture)
        assert not torch.equal(both, hooked)
        board.activate_expert(None)
        assert torch.equal(logits(mixture), hooked)
        board.activate_expert("law")
        assert torch.equal(logits(mixture), both)
    assert torch.equal(logits(mixture), switched)
    for layer in moe_layers(mixture):
        for now, then in zip(layer.gate.parameters(), gates[layer.number], strict=True):
            assert torch.equal(now, then)
    board.activate_expert(None)
    assert torch.equal(logits(mixture), before)


def test_threads_take_turns_at_a_trimmed_mixture(mixtral):
    trimmed = trimmed_of(mixtral)
    opened = Answering(mixtral, tiny_tokenizer(), {"trimmed": lambda: trimmed.attached(mixtral), "base": nullcontext})
    before = logits(mixtral)
    prompts = [(prompt, way) for prompt in ("court?", "12+7=") for way in ("trimmed", "base")]

    def said(asked):
        return opened.generate_text(asked[0], expert=asked[1], max_new_tokens=4, do_sample=False)[0]

    wanted = [said(asked) for asked in prompts]
    assert wanted[0] != wanted[1]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(said, prompts * 15)) == wanted * 15
    assert torch.equal(logits(mixtral), before)
