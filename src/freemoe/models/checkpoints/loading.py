"""Load a base model and its tokenizer, from a folder, a GGUF file or the hub, with errors that say what to do."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from freemoe.compat.names import quiet_loggers
from freemoe.compat.transformers import dequantise_options, make_plain, panics_as_errors, set_model_name
from freemoe.core.errors import DataError, FreeMoEError, RecipeError
from freemoe.core.registry import load_model_type
from freemoe.core.untrusted import read_json
from freemoe.hub.fetch import HubAccess
from freemoe.models.checkpoints.base_files import BaseFiles, find_base_files
from freemoe.models.checkpoints.checks.plausible import require_fillable
from freemoe.models.checkpoints.checks.values import require_sound, require_tokenizer
from freemoe.models.checkpoints.checks.whole import require_plain_files, require_whole
from freemoe.models.checkpoints.identity import PASSAGE
from freemoe.models.checkpoints.lending import provided_model
from freemoe.models.checkpoints.placement import Placement, is_one_device, pick_device, placement_arguments

log = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")


def dtype_name(dtype: Any) -> str:
    """The name of a number format: of ``torch.bfloat16``, ``"torch.bfloat16"`` or ``"bfloat16"``; None is ``auto``.

    Raises:
        RecipeError: For one in which no base is loaded.
    """
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise RecipeError(f"dtype is {name!r}; allowed: {', '.join(DTYPES)}, or torch's own (torch.bfloat16).")
    return name


def load_base(
    model: str | Path,  # Folder, path of a GGUF file, or hub id
    revision: str | None = None,  # Of the hub repository
    # As `dtype_name` reads it; ``auto`` keeps the checkpoint's, and is float32 for a GGUF, whose values others round
    dtype: Any = "auto",
    device: Placement = "auto",  # Where its weights lie; ``auto`` takes the accelerator if there is one
    access: HubAccess | None = None,  # How the hub is asked; its revision gives way to ``revision``
) -> tuple[Any, Any]:
    """Load a causal LM in eval mode and its tokenizer, None where the folder has none.

    A GGUF file is dequantised: the model is a plain one afterwards and can be saved.

    Raises:
        DataError: When there is no such model, it cannot be loaded, it does not fit, or its checkpoint lacks a tensor.
        RecipeError: For a dtype or a device that does not exist.
    """
    dtype = dtype_name(dtype)
    if (given := provided_model(model)) is not None:
        require_sound(model, given[0])
        return given
    # What is wrong with the device is said before anything is read.
    one = pick_device(device) if isinstance(device, str) and is_one_device(device) else None
    files = find_base_files(model, revision, access)
    if files.gguf is not None and dtype == "auto":
        dtype = "float32"
    base = _read_model(files, dtype, device)
    if files.gguf is not None:
        make_plain(base)
        log.info("%s: %s", model, files.gguf.describe_origin(dtype))
    require_plain_files(files, base)
    require_sound(model, base)
    try:
        tokenizer = _read_tokenizer(files)
    except Exception as error:
        if files.gguf is not None or any(files.folder.glob("tokenizer*")):
            log.warning("the tokenizer of %s cannot be loaded: %s", model, files.error_reason(error))
        tokenizer = None
    if tokenizer is not None:
        require_tokenizer(model, base, tokenizer)
    if not files.is_local:
        # So that what is saved of it names the repository, and no folder of this machine.
        set_model_name(base, tokenizer, str(model))
    if one is not None:
        base.to(one)
    if away := [p.numel() * p.element_size() for p in base.parameters() if p.is_meta]:
        log.info("%s: %d of its weights stay on disk, %.1f GiB", model, len(away), sum(away) / 2**30)
    return base.eval(), tokenizer


def _read_model(files: BaseFiles, dtype: str, device: Placement) -> Any:
    """What transformers makes of a base's files, its report read."""
    from transformers import AutoModelForCausalLM

    _register_model_type(files)
    # Wrong shapes come back with the report, which names them; refused outright, they would only be logged.
    how: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    how |= {**files.arguments, "dtype": dtype if dtype == "auto" else getattr(torch, dtype)}
    with contextlib.ExitStack() as offload:
        try:
            if files.gguf is not None:
                how |= dequantise_options()
            elif is_one_device(device):
                require_fillable(files.name, files.folder, files.headers)
            how |= placement_arguments(files, dtype, device, offload)
            # It warns of what was asked for.
            with quiet_loggers("accelerate.big_modeling"):
                loaded: Any = AutoModelForCausalLM.from_pretrained(**how)
        except FreeMoEError:
            raise
        except Exception as error:
            raise _loading_error(files, error) from error
        base, info = loaded
        require_whole(files.name, base, info)
        weakref.finalize(base, offload.pop_all().close)
    return base


def _loading_error(files: BaseFiles, error: Exception) -> DataError:
    return DataError(f"The base model {files.name!r} could not be loaded: {files.error_reason(error)}")


@panics_as_errors()
def _read_tokenizer(files: BaseFiles) -> Any:
    """The tokenizer beside a base."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(**files.arguments)
    if not set(found(PASSAGE, verbose=False)["input_ids"]) - {found.bos_token_id, found.eos_token_id}:
        raise DataError("it turns ordinary text into no tokens at all; files of it are missing (tokenizer.json).")
    return found


def _register_model_type(files: BaseFiles) -> None:
    """Make transformers know the classes of a model that an export of ours wrote."""
    path = files.folder / "config.json"
    if not path.is_file():
        return
    try:
        model_type = str(read_json(path).get("model_type"))
    except (ValueError, AttributeError):
        return  # transformers will say what is wrong with it
    load_model_type(model_type)


def load_own_base(
    manifest: Mapping[str, Any],
    base: str | Path | None,
    dtype: str = "auto",
    device: Placement = "auto",
    access: HubAccess | None = None,
) -> tuple[Any, Any]:
    """The base of an artefact with its tokenizer: the one that its manifest names, unless another place is given.

    Args:
        manifest: The artefact's.
        base: Folder, GGUF file or hub id that it is put on instead.
        dtype: Of the base.
        device: Where to load it.
        access: How the hub is asked; the revision is the manifest's, or that behind ``@`` in ``base``.

    Raises:
        DataError: As `load_base`; says what to do where the artefact names a place of another machine.
    """
    if base is not None:
        return load_base(base, None, dtype, device, access)
    try:
        return load_base(manifest["base_model_name_or_path"], manifest.get("revision"), dtype, device, access)
    except DataError as error:
        raise type(error)(
            f"{error} It is what the artefact names as its base: name another place of it (base)."
        ) from error


def load_config(model: str | Path, revision: str | None = None) -> Any:
    """A model's configuration alone: before its weights are read.

    Raises:
        DataError: When there is no such model.
    """
    if (given := provided_model(model)) is not None:
        return given[0].config
    files = find_base_files(model, revision, weights=False)
    if files.gguf is not None:
        return None
    from transformers import AutoConfig

    _register_model_type(files)
    try:
        return AutoConfig.from_pretrained(**files.arguments)
    except Exception as error:
        raise _loading_error(files, error) from error


def load_tokenizer(model: str | Path, revision: str | None = None) -> Any:
    """Load the tokenizer alone, before the weights: prompts that do not fit are found early.

    Raises:
        DataError: When there is no such model, or it has no tokenizer; every prompt is text.
    """
    if (given := provided_model(model)) is not None and given[1] is not None:
        return given[1]
    files = find_base_files(model, revision, weights=False)
    try:
        return _read_tokenizer(files)
    except Exception as error:
        hint = "" if files.gguf is not None else " Save one beside the model with tokenizer.save_pretrained(folder)."
        raise DataError(
            f"The base model {files.name!r} has no tokenizer that can be loaded, and prompts are text: "
            f"{files.error_reason(error)}{hint}"
        ) from error
