"""Converted models in vLLM give what their exported folder gives in transformers, whatever else is in the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vllm.test_experts import CLOSE, NEW
from tests.vllm.world import SHAPE, differences, max_difference, prompts, token_logprobs

# Case -> family, how the experts are held, whether value dimensions are the same for all tokens, whether heads are gone.
CASES: dict[str, tuple[str, str, bool, bool]] = {
    "llama": ("llama", "shared", False, False),
    "llama without heads": ("llama", "materialised", True, True),
    "mistral": ("mistral", "pseudo", False, False),
    "qwen2": ("qwen2", "shared", True, False),
    "qwen3": ("qwen3", "shared", False, False),
    "gemma": ("gemma", "materialised", False, True),
}
BATCH = [{"ids": ids, "new": NEW} for ids in prompts()]
# The second time from the cache, in another order; then scored.
STEPS = [{"batch": BATCH}, {"batch": BATCH[::-1]}, {"batch": [{**one, "score": True} for one in BATCH]}]


def write_converted(folder: Path, family: str, mode: str, static: bool, fewer_heads: bool) -> Path:
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


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    return {name: write_converted(root / name.replace(" ", "-"), *case) for name, case in CASES.items()}


@pytest.fixture(scope="session")
def said(folders: dict[str, Path], ask_each: Callable[..., list[list[Any]]]) -> dict[str, list[Any]]:
    models = [{"folder": str(folder), "steps": STEPS, "ours": True} for folder in folders.values()]
    return dict(zip(folders, ask_each("v1", models), strict=True))


def compare(folder: Path, steps: list[dict[str, Any]], answers: list[Any]) -> float:
    """Largest difference of log-probabilities, of what was written and of scored prompts."""
    from transformers import AutoModelForCausalLM

    import freemoe.tomoe.modeling  # noqa: F401  (makes transformers know the classes)

    return compare_with(AutoModelForCausalLM.from_pretrained(folder).eval(), steps, answers)


def compare_with(model: Any, steps: list[dict[str, Any]], answers: list[Any]) -> float:
    """The same for a model as it stands."""
    return max_difference(steps, answers, lambda ids, _: token_logprobs(model, ids))


@pytest.mark.parametrize("name", CASES)
def test_first_runner_answers_as_transformers(name: str, folders: dict[str, Path], said: dict[str, list[Any]]) -> None:
    differences.append(compare(folders[name], STEPS, said[name]))
    assert differences[-1] <= CLOSE
    # Whole blocks of 32 tokens, of the prompts of 40, 120, 65, 33 and 90.
    assert [one["cached"] for one in said[name][1]][::-1] == [0, 32, 96, 64, 32, 64]


def test_second_runner_answers_as_transformers(folders: dict[str, Path], ask: Callable[..., list[Any]]) -> None:
    differences.append(compare(folders["llama"], STEPS[:2], ask("v2", folders["llama"], STEPS[:2])))
    assert differences[-1] <= CLOSE


def test_a_damaged_folder_is_refused(folders: dict[str, Path], ask: Callable[..., list[Any]], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from freemoe.core.artifacts import write_manifest

    folder = shutil.copytree(folders["llama"], tmp_path / "damaged")
    (weights,) = folder.glob("*.safetensors")
    tensors = load_file(weights)
    tensors["model.layers.2.mlp.experts"][0, 0] = 100_000
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(AssertionError, match="cut short or edited"):
        ask("v1", folder, STEPS[:1])
    # Even where the manifest says that the files are the right ones.
    write_manifest(folder, {"kind": "converted", "freemoe_version": "0"})
    with pytest.raises(AssertionError, match="names neurons beyond"):
        ask("v1", folder, STEPS[:1])
