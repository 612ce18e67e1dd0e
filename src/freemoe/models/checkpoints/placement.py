"""Where a base's weights lie: on one device, on several, or on disk (``--device``).

accelerate moves a pass from device to device, and reads from disk what lies there while its module computes.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import nn

from freemoe.compat.transformers import no_split_modules
from freemoe.core.errors import DataError, RecipeError
from freemoe.core.memory import available_memory_bytes
from freemoe.core.numbers import format_bytes
from freemoe.core.untrusted import read_json
from freemoe.models.checkpoints.base_files import BaseFiles

SPLIT, DISK = "split", "disk"

Placement = str | Mapping[str, Any]
"""``auto``, ``cpu``, ``cuda``, ``cuda:N``: one device. ``split``: every accelerator, then memory, then disk. ``disk``: the
decoder layers stay in their files. ``cuda:0=20GiB,cpu=8GiB``: as much as that on each, the rest on disk. Or a mapping
from modules to devices, as transformers' ``device_map``."""

Places = dict[str, Any]
"""Module to device, as accelerate takes it."""

_ALLOWED = "auto, cpu, cuda, cuda:N, split, disk, or limits such as cuda:0=20GiB,cpu=8GiB"
_UNITS = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def pick_device(name: str = "auto") -> torch.device:
    """The named device, or the accelerator if there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RecipeError(f"Device {name!r:.80} is unknown; use {_ALLOWED}. ({error!s:.200})") from None
    here = {"cpu": 1}
    if torch.accelerator.is_available() and (kind := torch.accelerator.current_accelerator()) is not None:
        here[kind.type] = torch.accelerator.device_count()
    if device.type not in here or (device.index or 0) >= here[device.type]:
        found = ", ".join(kind if count == 1 else f"{kind}:0 to {kind}:{count - 1}" for kind, count in here.items())
        raise RecipeError(
            f"Device {name!r} is not on this machine; torch finds {found} here. Use auto, or one of them."
        )
    return device


def is_one_device(placement: Placement) -> bool:
    """Whether all of a base goes to one device."""
    return isinstance(placement, str) and placement not in (SPLIT, DISK) and "=" not in placement


def require_one_device(placement: Placement, what: str) -> None:
    """Raise unless all of a model goes to one device.

    Raises:
        RecipeError: It does not.
    """
    if not is_one_device(placement):
        raise RecipeError(
            f"{what} needs all of it on one device, and {placement!r} spreads it; use auto, cpu, cuda or cuda:N."
        )


def device_map(placement: Placement, empty: nn.Module) -> Places:
    """Every module's place, as transformers takes it.

    ``empty`` is the base without values (on the meta device), in the dtype that it will have.

    Raises:
        RecipeError: A limit that cannot be read, or a mapping that leaves a weight out or reads embeddings from disk.
        DataError: Too little memory even for the smallest pass, or accelerate is not installed.
    """
    if find_spec("accelerate") is None:
        raise DataError(
            f"--device {placement} needs accelerate, which is not installed: pip install 'freemoe[devices]'. Or use auto, cpu or "
            "cuda."
        )
    if isinstance(placement, Mapping):
        found: Places = dict(placement)
    elif placement == DISK:
        found = _layers_on_disk(empty)
    else:
        from accelerate.utils import get_balanced_memory, infer_auto_device_map

        limits, whole = None if placement == SPLIT else _parse_limits(placement), no_split_modules(empty)
        cast(Any, empty).tie_weights()
        most: Any = get_balanced_memory(empty, no_split_module_classes=whole) if limits is None else limits
        found = dict(infer_auto_device_map(empty, max_memory=most, no_split_module_classes=whole))
    sizes: Counter[str] = Counter()
    for name, parameter in empty.named_parameters():
        place = _find_place(name, found)
        if place is None:
            raise RecipeError(
                f"The device map leaves out {name!r}. Name its module, or give the rest a place with the name '': cpu."
            )
        sizes[str(place)] += parameter.nbytes
    _require_embeddings(empty, found)
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in _decoder_layers(empty).values()]
    needed = sizes["cpu"] + (max(layers, default=0) if "disk" in sizes else 0)
    free = available_memory_bytes()
    if needed > free:
        raise DataError(
            f"The smallest pass needs {format_bytes(needed)} of memory (what stays there, and one decoder layer), and {format_bytes(free)} "
            "are free. Free some, load it in another dtype (--dtype bfloat16), or let more of it stay on disk (--device disk)."
        )
    return _disjoint_places(empty, found)


def _disjoint_places(module: nn.Module, places: Places, path: str = "") -> Places:
    """The same map without a name that stands for part of what another one does, which transformers does not understand."""
    inside = f"{path}." if path else ""
    if not any(name != path and name.startswith(inside) for name in places):
        return {path: _find_place(path, places)}
    found: Places = {}
    for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
        found[inside + name] = _find_place(inside + name, places)
    for name, child in module.named_children():
        found |= _disjoint_places(child, places, inside + name)
    return found


def free_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device; the host's for a CPU."""
    if device.type != "cuda":
        return available_memory_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    # What torch holds but does not use is free to us.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def placement_arguments(
    files: BaseFiles, dtype: str, device: Placement, offload: contextlib.ExitStack
) -> dict[str, Any]:
    """What transformers is told of where a base's weights lie; those that it must write anew go to a folder until ``offload`` ends.

    Raises:
        DataError: They do not fit, or are in a GGUF file, whose layers cannot stay on disk or be spread.
        RecipeError: As `device_map`.
    """
    if files.gguf is not None:
        if is_one_device(device):
            return {}
        raise DataError(
            "A GGUF file is dequantised as a whole, so its layers cannot stay on disk or be spread over devices. Write it as a "
            "folder first (freemoe merge OUT base -o FOLDER), or use --device auto, cpu or cuda."
        )
    if is_one_device(device):
        one = pick_device(str(device))
        require_memory(files, dtype, one)
        return {"device_map": {"": one}} if _loads_straight_to(one) else {}
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(**files.arguments)
    with torch.device("meta"):
        wanted = config.dtype if dtype == "auto" else getattr(torch, dtype)
        empty = AutoModelForCausalLM.from_config(config, dtype=wanted)
    places = device_map(device, empty)
    if "disk" not in places.values():
        return {"device_map": places}
    folder = offload.enter_context(tempfile.TemporaryDirectory(prefix="freemoe-"))
    return {"device_map": places, "offload_folder": folder}


def _loads_straight_to(device: torch.device) -> bool:
    """Whether a base's files are read to a device, without all of them being in the host's memory before."""
    return device.type != "cpu" and find_spec("accelerate") is not None


def require_memory(files: BaseFiles, dtype: str, device: torch.device) -> None:
    """Raise unless a base fits into memory, before it is loaded; one whose folder does not say its size is not judged.

    Raises:
        DataError: It does not; says what would do.
    """
    size = sum(path.stat().st_size for path in files.folder.glob("*.safetensors"))
    if dtype != "auto" and size:
        config = read_json(files.folder / "config.json")
        stored = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch."))
        size = size * getattr(torch, dtype).itemsize // stored.itemsize
    holder = device if _loads_straight_to(device) else torch.device("cpu")
    free = free_bytes(holder)
    if size > free:
        where = "" if holder.type == "cpu" else f" on {holder}"
        raise DataError(
            f"The base {files.name!r} takes {format_bytes(size)} and {format_bytes(free)} of memory are free{where}. Let its layers be read from disk "
            "as they are needed (--device disk), load it in another dtype (--dtype bfloat16), or use a machine with more."
        )


def _decoder_layers(empty: Any) -> dict[str, nn.Module]:
    """What transformers says must stay whole inside the decoder, by name: its layers, those of converted models too."""
    whole, inside = no_split_modules(empty), set(empty.get_decoder().modules())
    return {n: m for n, m in empty.named_modules() if m in inside and type(m).__name__ in whole}


def _layers_on_disk(empty: nn.Module) -> Places:
    layers = list(_decoder_layers(empty))
    found: Places = dict.fromkeys(layers, "disk")
    for name, _ in empty.named_modules():
        around = not name or any(layer.startswith(f"{name}.") for layer in layers)
        if not around and _find_place(name, found) is None:
            found[name] = str(pick_device())
    return found


def _parse_limits(placement: str) -> dict[str | int, int]:
    found: dict[str | int, int] = {}
    for part in placement.split(","):
        device, _, said = (piece.strip() for piece in part.partition("="))
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B)", said, re.IGNORECASE)
        kind, _, number = device.partition(":")
        if match is None or kind not in ("cpu", "cuda") or (kind == "cuda") != number.isdigit():
            raise RecipeError(f"Device {placement!r} has the limit {part.strip()!r}; use {_ALLOWED}.")
        found[int(number) if kind == "cuda" else "cpu"] = int(float(match[1]) * _UNITS[match[2].upper()])
    return found


def _find_place(name: str, places: Mapping[str, str | int]) -> str | int | None:
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        found = places.get(".".join(parts[:end]))
        if found is not None:
            return found
    return None


def _require_embeddings(empty: Any, places: Mapping[str, str | int]) -> None:
    """Raise unless the embeddings are in memory: they say where a pass begins."""
    own = empty.get_input_embeddings().weight
    name = next(name for name, parameter in empty.named_parameters() if parameter is own)
    if _find_place(name, places) == "disk":
        raise RecipeError(
            f"The embeddings {name!r} ({format_bytes(own.numel() * own.element_size())}) would be read from disk; they must be in "
            "memory. Allow the first device at least as much, or place them there."
        )
