"""What of the vLLM plugin needs no vLLM: its settings, whose tokens are whose, and masks on fused linears."""

import json
import subprocess
import sys

import pytest
import torch

from freemoe.core.errors import ArtifactError
from freemoe.serve.vllm.masks import ExpertMasks, FusedLinear, SubtractedMask, ZeroedMask
from freemoe.serve.vllm.settings import SCHEDULER, expert_names, llm_arguments, serve_command
from freemoe.serve.vllm.step import tokens_of
from tests.domain_experts.structured.artefacts import mixture_artefact, unit_artefact
from tests.tiny import tiny_model


@pytest.fixture(scope="module")
def artefact(tmp_path_factory):
    return unit_artefact(tmp_path_factory.mktemp("vllm"))


def linears(artefact):
    """Of two layers, as vLLM holds them: q, k and v one below the other, and so gate and up."""
    own = dict(tiny_model("llama").named_parameters())
    held, weights = {}, {}
    for number in (0, 1):
        for block, fused in (
            ("self_attn", {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}),
            ("mlp", {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}),
        ):
            for name, parts in fused.items():
                path = f"model.layers.{number}.{block}"
                found = [(f"{path}.{part}.weight", own[f"{path}.{part}.weight"]) for part in parts]
                held[f"{path}.{name}"] = FusedLinear([(n, len(w)) for n, w in found], found[0][1].shape[1])
                weights[f"{path}.{name}"] = torch.cat([w.detach() for _, w in found])
    return held, weights


def test_a_linear_leaves_out_what_the_expert_has_off(artefact):
    held, weights = linears(artefact)
    masks = ExpertMasks(str(artefact), str(artefact.parent / "base"), held, weights)
    torch.manual_seed(0)
    kinds = set()
    for expert in ("law/all", "law/single", "law/all+law/single", "law/free&law/all"):
        mask, parts = masks.expert_mask(expert), masks.linear_masks(expert)
        assert parts
        for name, off in parts.items():
            kinds.add(type(off))
            weight, x = weights[name], torch.randn(5, held[name].columns)
            blocks = weight.split([rows for _, rows in held[name].parts])
            zeroed = [
                block.masked_fill(mask[part].to_bools().view(block.shape), 0) if part in mask else block
                for (part, _), block in zip(held[name].parts, blocks, strict=True)
            ]
            wanted = x @ torch.cat(zeroed).t()
            torch.testing.assert_close(off.apply_mask(x, x @ weight.t(), weight, None), wanted, atol=1e-5, rtol=0)
            assert not torch.allclose(wanted, x @ weight.t(), atol=1e-3)
    assert kinds == {SubtractedMask, ZeroedMask}
    assert not masks.linear_masks("law/none")


def test_what_no_linear_holds_is_refused(artefact, tmp_path):
    held, weights = linears(artefact)
    del held["model.layers.1.mlp.down_proj"]
    with pytest.raises(ArtifactError, match=r"layers\.1\.mlp\.down_proj.*no linear"):
        ExpertMasks(str(artefact), str(artefact.parent / "base"), held, weights)
    mixture = mixture_artefact(tmp_path)
    with pytest.raises(ArtifactError, match="no linear"):
        ExpertMasks(str(mixture), str(tmp_path / "base"), held, weights)


def test_another_base_is_refused(artefact, tmp_path):
    tiny_model("llama", seed=1).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="made for the base"):
        ExpertMasks(str(artefact), str(tmp_path), *linears(artefact))


def test_tokens_are_their_requests():
    found = tokens_of(["a", "base", "a", "b"], [0, 3, 4, 4, 6])
    assert {name: tokens.tolist() for name, tokens in found.items()} == {"a": [0, 1, 2], "base": [3], "b": [4, 5]}
    assert tokens_of([], [0]) == {}


def test_settings_name_the_artefact_and_what_keeps_experts_apart(artefact):
    assert expert_names(artefact) == ["law/all", "law/free", "law/single", "law/none"]
    found = llm_arguments(artefact, "elsewhere")
    assert found["model"] == "elsewhere"
    assert found["hf_overrides"]["quantization_config"] == {"quant_method": "freemoe", "experts": str(artefact)}
    command = serve_command(artefact, None, ["--port", "1"])
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    assert command[command.index("--scheduler-cls") + 1] == SCHEDULER
    assert json.loads(command[command.index("--hf-overrides") + 1]) == llm_arguments(artefact)["hf_overrides"]
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[-2:] == ["--port", "1"]


def test_a_plain_model_is_served_as_it_is_and_an_empty_folder_refused(artefact, tmp_path):
    base = str(artefact.parent / "base")
    assert llm_arguments(base) == {"model": base}
    assert llm_arguments("owner/name") == {"model": "owner/name"}
    command = serve_command(base)
    assert command[command.index("--served-model-name") + 1] == "base"
    assert "--scheduler-cls" not in command
    with pytest.raises(ArtifactError, match="whole model"):
        llm_arguments(base, "elsewhere")
    with pytest.raises(ArtifactError, match="neither an artefact nor a model"):
        serve_command(tmp_path)


def test_registering_loads_nothing_of_ours_that_is_heavy():
    code = "import sys, freemoe.serve.vllm.plugin; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "sklearn", "scipy"} & set(done.stdout.split())
