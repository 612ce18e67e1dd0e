"""Load a base model and its tokenizer, from a folder, a GGUF file or the hub, with errors that say what to do."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from freemoe.assets import BUNDLED, BUNDLED_MOE, demo_model_path, demo_moe_path
from freemoe.compat.names import quiet_loggers
from freemoe.compat.transformers import dequantise_options, make_plain, panics_as_errors, set_model_name
from freemoe.core.errors import DataError, FreeMoEError, HubError, RecipeError
from freemoe.core.registry import load_model_type
from freemoe.core.untrusted import read_json
from freemoe.hub.fetch import HubAccess, fetch_model
from freemoe.models.checkpoints.checks.load_report import require_whole
from freemoe.models.checkpoints.checks.plausible import require_fillable, require_plausible
from freemoe.models.checkpoints.checks.values import require_sound, require_tokenizer
from freemoe.models.checkpoints.checks.weight_files import require_plain_files
from freemoe.models.checkpoints.gguf_header import is_gguf, read_header
from freemoe.models.checkpoints.identity import PASSAGE
from freemoe.models.checkpoints.lending import provided_model
from freemoe.models.checkpoints.placement import (
    Placement,
    device_map,
    is_one_device,
    loads_straight_to,
    pick_device,
    require_memory,
)

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
    if isinstance(device, str) and is_one_device(device):
        pick_device(device)  # which says what is wrong with it, before anything is read
    where = _resolve_source(model, revision, access)
    from_gguf = "gguf_file" in where
    if from_gguf and dtype == "auto":
        dtype = "float32"
    base = _read_model(model, where, dtype, device)
    if from_gguf:
        make_plain(base)
        log.info("%s: %s", model, gguf_origin(model, dtype))
    require_plain_files(model, base, Path(model) if from_gguf else Path(where["pretrained_model_name_or_path"]))
    require_sound(model, base)
    try:
        tokenizer = _read_tokenizer(where)
    except Exception as error:
        if from_gguf or any(Path(where["pretrained_model_name_or_path"]).glob("tokenizer*")):
            log.warning("the tokenizer of %s cannot be loaded: %s", model, _error_reason(model, error))
        tokenizer = None
    if tokenizer is not None:
        require_tokenizer(model, base, tokenizer)
    if not from_gguf and _local_folder(model) is None:
        # So that what is saved of it names the repository, and no folder of this machine.
        set_model_name(base, tokenizer, str(model))
    if isinstance(device, str) and is_one_device(device):
        base.to(pick_device(device))
    if away := [p.numel() * p.element_size() for p in base.parameters() if p.is_meta]:
        log.info("%s: %d of its weights stay on disk, %.1f GiB", model, len(away), sum(away) / 2**30)
    return base.eval(), tokenizer


def _read_model(model: str | Path, where: dict[str, Any], dtype: str, device: Placement) -> Any:
    """What transformers makes of a base's files, its report read."""
    from transformers import AutoModelForCausalLM

    wanted = dtype if dtype == "auto" else getattr(torch, dtype)
    _register_model_type(where["pretrained_model_name_or_path"])
    # Wrong shapes come back with the report, which names them; refused outright, they would only be logged.
    how = {**where, "dtype": wanted, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with contextlib.ExitStack() as temporary:
        try:
            if "gguf_file" in where:
                how |= dequantise_options()
            elif is_one_device(device):
                require_fillable(model, Path(where["pretrained_model_name_or_path"]))
                require_memory(_bytes_needed(where, dtype), model, one := pick_device(str(device)))
                how |= {"device_map": {"": one}} if loads_straight_to(one) else {}
            if not is_one_device(device):
                how |= _placement_kwargs(where, wanted, device, temporary)
            # It warns of what was asked for.
            with quiet_loggers("accelerate.big_modeling"):
                loaded: Any = AutoModelForCausalLM.from_pretrained(**how)
        except FreeMoEError:
            raise
        except Exception as error:
            raise DataError(
                f"The base model {str(model)!r} could not be loaded: {_error_reason(model, error)}"
            ) from error
        base, info = loaded
        require_whole(model, base, info)
        weakref.finalize(base, temporary.pop_all().close)
    return base


@panics_as_errors()
def _read_tokenizer(where: dict[str, Any]) -> Any:
    """The tokenizer beside a base."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(**where)
    if not set(found(PASSAGE, verbose=False)["input_ids"]) - {found.bos_token_id, found.eos_token_id}:
        raise DataError("it turns ordinary text into no tokens at all; files of it are missing (tokenizer.json).")
    return found


def _placement_kwargs(
    where: dict[str, Any], dtype: Any, device: Placement, temporary: contextlib.ExitStack
) -> dict[str, Any]:
    """What transformers is told of where a base's weights lie; those that it must write anew go to a temporary folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if "gguf_file" in where:
        raise DataError(
            "A GGUF file is dequantised as a whole, so its layers cannot stay on disk or be spread over devices. Write it as a "
            "folder first (freemoe merge OUT base -o FOLDER), or use --device auto, cpu or cuda."
        )
    config = AutoConfig.from_pretrained(**where)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, dtype=config.dtype if dtype == "auto" else dtype)
    places = device_map(device, empty)
    if "disk" not in places.values():
        return {"device_map": places}
    folder = temporary.enter_context(tempfile.TemporaryDirectory(prefix="freemoe-"))
    return {"device_map": places, "offload_folder": folder}


def _bytes_needed(where: dict[str, Any], dtype: str) -> int:
    """Bytes of a local base in memory; 0 where its folder does not say."""
    folder = Path(where["pretrained_model_name_or_path"])
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if dtype == "auto" or not size:
        return size
    config = read_json(folder / "config.json")
    stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch."))
    return size * getattr(torch, dtype).itemsize // stored.itemsize


def gguf_origin(model: str | Path, dtype: str = "auto") -> str | None:
    """What a base was before it was loaded, where that is not the same: ``dequantised from GGUF Q4_1 to float32``."""
    if not is_gguf(model):
        return None
    header = read_header(model)
    note = f"dequantised from GGUF {header.stored_as} to {'float32' if dtype == 'auto' else dtype}"
    if "rope_freqs.weight" in header.types:
        note += "; its scaled rotary frequencies are not read, so text beyond the first training's context suffers"
    return note


def _resolve_source(
    model: str | Path, revision: str | None, access: HubAccess | None = None, weights: bool = True
) -> dict[str, Any]:
    """The arguments by which transformers finds a base; what is on the hub is fetched, so that they always name a folder."""
    if is_gguf(model):
        read_header(model)
        return {"pretrained_model_name_or_path": str(Path(model).parent), "gguf_file": Path(model).name}
    place = _local_folder(model)
    if place is None:
        asked = replace(access or HubAccess(), revision=revision)
        try:
            place = fetch_model(str(model), asked, weights=weights)
        except HubError as error:
            here = "" if "/" in str(model) else f"There is no folder {f'./{model}'!r} here. "
            raise HubError(f"{here}The base model {str(model)!r} could not be loaded. {error}") from error
    require_plausible(model, place, weights)
    return {"pretrained_model_name_or_path": str(place)}


def _error_reason(model: str | Path, error: Exception) -> str:
    """What transformers said; of a GGUF also the architecture, which is the usual reason."""
    if not is_gguf(model):
        return f"{type(error).__name__}: {error!s:.600}"
    said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return (
        f"{said} (a GGUF of architecture {read_header(model).architecture!r}; those that can be read are the ones that "
        "transformers dequantises. Give the model's original folder instead.)"
    )


def _local_folder(model: str | Path) -> Path | None:
    """A base's folder: a bundled model's for its alias, or a checked one; None of what is on the hub."""
    bundled = {BUNDLED: demo_model_path, BUNDLED_MOE: demo_moe_path}
    if str(model) in bundled:
        try:
            return bundled[str(model)]()
        except FileNotFoundError as error:
            raise DataError(f"{model!r} is not part of this installation: {error}.") from None
    path = Path(model)
    looks_local = path.is_absolute() or str(model).startswith(".") or path.exists() or str(model).count("/") > 1
    if not looks_local:
        return None
    if not os.path.exists(path / "config.json"):  # noqa: PTH110
        held = [str(p) for p in sorted(path.glob("*.gguf"))] if path.is_dir() else []
        hint = f" It holds a GGUF file: give its path, {held[0]}" if held else ""
        raise DataError(
            f"{str(model)!r} is not a model folder: it has no config.json. Give a folder written by save_pretrained, a GGUF "
            f"file, or a hub id such as meta-llama/Llama-2-7b-chat-hf.{hint}"
        )
    return path


def _register_model_type(model: str | Path) -> None:
    """Make transformers know the classes of a model that an export of ours wrote."""
    path = Path(model) / "config.json"
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
    where = _resolve_source(model, revision, weights=False)
    if "gguf_file" in where:
        return None
    from transformers import AutoConfig

    _register_model_type(where["pretrained_model_name_or_path"])
    try:
        return AutoConfig.from_pretrained(**where)
    except Exception as error:
        raise DataError(f"The base model {str(model)!r} could not be loaded: {_error_reason(model, error)}") from error


def load_tokenizer(model: str | Path, revision: str | None = None) -> Any:
    """Load the tokenizer alone, before the weights: prompts that do not fit are found early.

    Raises:
        DataError: When there is no such model, or it has no tokenizer; every prompt is text.
    """
    if (given := provided_model(model)) is not None and given[1] is not None:
        return given[1]
    where = _resolve_source(model, revision, weights=False)
    try:
        return _read_tokenizer(where)
    except Exception as error:
        hint = "" if is_gguf(model) else " Save one beside the model with tokenizer.save_pretrained(folder)."
        raise DataError(
            f"The base model {str(model)!r} has no tokenizer that can be loaded, and prompts are text: "
            f"{_error_reason(model, error)}{hint}"
        ) from error
