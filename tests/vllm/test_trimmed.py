"""Trimmed mixtures in vLLM give what they give in transformers, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.test_converted import STEPS, compare_with
from tests.vllm.test_experts import CLOSE
from tests.vllm.world import SHAPE, differences, prompts, token_logprobs

_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64}

# Case -> family, its configuration, experts per token of every layer, rule for router weights, place of the hooks.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int | None, ...], str, str | None]] = {
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


def write_trimmed(
    root: Path, family: str, settings: dict[str, Any], ks: tuple[int | None, ...], rescale: str, position: str | None
) -> Path:
    """Write a base into ``root/base``, and what ``freemoe trim`` would make of it into the folder that is returned."""
    from freemoe.core.artifacts import write_manifest
    from freemoe.hookmoe.adapter import Trimmed, save_adapter
    from freemoe.hookmoe.artefact_files import KIND
    from freemoe.hookmoe.hooks.hook import new_hooks
    from freemoe.hookmoe.plans.layers import moe_layers
    from freemoe.hookmoe.plans.plan import LayerPlan
    from freemoe.models.checkpoints.fingerprint import fingerprint_model
    from freemoe.models.checkpoints.identity import IDENTITY, identify_base
    from tests.tiny import tiny_model, tiny_tokenizer

    model = tiny_model(family, **{**SHAPE, **settings})
    model.save_pretrained(root / "base")
    tiny_tokenizer().save_pretrained(root / "base")
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
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("trimmed")
    return {name: write_trimmed(root / name.replace(" ", "-"), *case) for name, case in CASES.items()}


@pytest.fixture(scope="session")
def said(folders: dict[str, Path], ask_each: Callable[..., list[list[Any]]]) -> dict[str, list[Any]]:
    models = [{"folder": str(folder), "steps": STEPS, "ours": True} for folder in folders.values()]
    return dict(zip(folders, ask_each("v1", models), strict=True))


def compare(folder: Path, steps: list[dict[str, Any]], answers: list[Any]) -> float:
    """Largest difference of log-probabilities from the artefact attached to its base in transformers."""
    from freemoe.hookmoe.adapter import load_trimmed

    model, _, trimmed = load_trimmed(folder, None, "auto", "cpu")
    with trimmed.attached(model):
        return compare_with(model, steps, answers)


@pytest.mark.parametrize("name", CASES)
def test_first_runner_answers_as_transformers(name: str, folders: dict[str, Path], said: dict[str, list[Any]]) -> None:
    differences.append(compare(folders[name], STEPS, said[name]))
    assert differences[-1] <= CLOSE
    assert [one["cached"] for one in said[name][1]][::-1] == [0, 32, 96, 64, 32, 64]


def test_second_runner_answers_as_transformers(folders: dict[str, Path], ask: Callable[..., list[Any]]) -> None:
    differences.append(compare(folders["mixtral"], STEPS[:2], ask("v2", folders["mixtral"], STEPS[:2])))
    assert differences[-1] <= CLOSE


@pytest.mark.parametrize("name", CASES)
def test_the_trim_changes_far_more_than_that(name: str, folders: dict[str, Path]) -> None:
    from freemoe.hookmoe.adapter import load_trimmed

    model, _, trimmed = load_trimmed(folders[name], None, "auto", "cpu")
    whole = token_logprobs(model, prompts()[5])
    with trimmed.attached(model):
        assert float((token_logprobs(model, prompts()[5]) - whole).abs().max()) > 100 * CLOSE


def test_another_base_is_refused(
    folders: dict[str, Path], ask_each: Callable[..., list[list[Any]]], tmp_path: Path
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    base = shutil.copytree(folders["mixtral"].parent / "base", tmp_path / "base")
    (weights,) = base.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] += 0.01
    save_file(tensors, weights, metadata={"format": "pt"})
    asked = {"folder": str(folders["mixtral"]), "base": str(base), "steps": STEPS[:1], "ours": True}
    with pytest.raises(AssertionError, match="was made for the base"):
        ask_each("v1", [asked])
