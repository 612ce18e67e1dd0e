"""Load a base model and its tokenizer, from a folder or from the hub, with errors that say what to do."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from freemoe.assets import demo_model_path, demo_moe_path
from freemoe.errors import DataError, RecipeError
from freemoe.families.load_report import require_whole

BUNDLED = "freemoe-demo"
"""The name that stands for the bundled tiny model, so that an artefact of the demo loads on any machine."""

BUNDLED_MOE = "freemoe-demo-moe"
"""The same for the bundled tiny mixture of experts."""

EXPORTED = "tomoe_"
"""How the model types of converted models begin."""

DTYPES = ("auto", "float32", "bfloat16", "float16")


def pick_device(name: str = "auto") -> torch.device:
    """The named device, or the accelerator if there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"Device {name!r} is unknown; use auto, cpu, cuda or cuda:N. ({error})") from None


def load_base(
    model: str | Path, revision: str | None = None, dtype: str = "auto", device: str = "auto"
) -> tuple[Any, Any]:
    """Load a causal LM in eval mode and its tokenizer.

    Args:
        model: Folder or hub id.
        revision: Of the hub repository.
        dtype: ``auto`` keeps the checkpoint's.
        device: ``auto`` takes the accelerator if there is one.

    Returns:
        The model, and its tokenizer or None where the folder has none.

    Raises:
        DataError: When there is no such model, it cannot be loaded, or its checkpoint lacks a tensor.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if dtype not in DTYPES:
        raise RecipeError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}.")
    model = _source(model)
    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    _register(model)
    try:
        # Wrong shapes come back with the report, which names them; refused outright, they would only be logged.
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model, revision=revision, dtype=wanted, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise DataError(f"The base model {str(model)!r} could not be loaded: {error}") from error
    base, info = loaded
    require_whole(model, info)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, revision=revision)
    except (OSError, ValueError):
        tokenizer = None
    base.to(pick_device(device))
    return base.eval(), tokenizer


def _source(model: str | Path) -> str | Path:
    """Where a base is loaded from: a bundled model's folder for its alias, a checked folder, or a hub id."""
    bundled = {BUNDLED: demo_model_path, BUNDLED_MOE: demo_moe_path}
    if str(model) in bundled:
        try:
            return bundled[str(model)]()
        except FileNotFoundError as error:
            raise DataError(f"{model!r} is not part of this installation: {error}.") from None
    path = Path(model)
    looks_local = path.is_absolute() or str(model).startswith(".") or path.exists() or str(model).count("/") > 1
    if looks_local and not (path / "config.json").is_file():
        raise DataError(
            f"{str(model)!r} is not a model folder: it has no config.json. Give a folder written by save_pretrained, or a "
            "hub id such as meta-llama/Llama-2-7b-chat-hf."
        )
    return model


def _register(model: str | Path) -> None:
    """Make transformers know the classes of a model that an export of ours wrote."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return
    try:
        model_type = str(json.loads(path.read_text(encoding="utf-8")).get("model_type"))
    except (ValueError, AttributeError):
        return  # transformers will say what is wrong with it
    if model_type.startswith(EXPORTED):
        # By name: this room stands below the one that it registers.
        importlib.import_module("freemoe.tomoe.modeling")


def load_tokenizer(model: str | Path, revision: str | None = None) -> Any:
    """Load the tokenizer alone, before the weights: prompts that do not fit are found early.

    Raises:
        DataError: When there is no such model, or it has no tokenizer; every prompt is text.
    """
    from transformers import AutoTokenizer

    source = _source(model)
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise DataError(
            f"The base model {str(model)!r} has no tokenizer that can be loaded, and prompts are text: {error} Save one "
            "beside the model with tokenizer.save_pretrained(folder)."
        ) from error
