"""Write a converted model as a Hugging Face folder of its own, in one of three forms that compute the same.

``shared`` holds the union of the experts' weights once, and experts as lists of rows; ``materialised`` holds a copy of
its weights for every expert; ``pseudo`` holds the dense layer and masks.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from freemoe.compat.transformers import attention_of, make_uninitialised
from freemoe.core.errors import ArtifactError, FamilyError, RecipeError
from freemoe.core.files import notify_watchers
from freemoe.models.checkpoints.saving import save_checkpoint
from freemoe.models.sublayers import DecoderSublayers, find_sublayers
from freemoe.tomoe import modeling
from freemoe.tomoe.structures.layout import union_order
from freemoe.tomoe.structures.structure import (
    LayerStructure,
    Structure,
    ValueGateTensors,
    require_structure_fits,
)

CODE = "modeling_tomoe.py"
"""The file of a folder that ``trust_remote_code`` loads; what it needs lies beside it."""

# Of a file that is written, bytes at least.
_SHARD = 1 << 28

_OURS = re.compile(r"from freemoe\.(kernels|tomoe)\.(\w+) import")


def build_converted_model(model: Any, structure: Structure, mode: str = "shared") -> Any:
    """A converted model in memory, in evaluation mode, on the dense model's device and of its type.

    Embeddings, norms and whatever else stays as it was are the dense model's own tensors; queries, keys, values, outputs
    and MLPs are copies.

    Raises:
        DataError: The structure does not fit the model.
        FamilyError: A model that cannot be converted.
        RecipeError: Another mode.
    """
    model_class, config, tensors = _plan_export(model, structure, mode)
    new = make_uninitialised(model_class, config, model.dtype, attention_of(model.config))
    new.load_state_dict({name: tensors.make_tensor(name) for name in new.state_dict()}, assign=True)
    new.tie_weights()
    new.generation_config = copy.deepcopy(model.generation_config)
    return new.to(model.device).eval()


class _ConvertedTensors:
    """The tensors of a converted model by name; a layer's are made when one of them is asked for, and forgotten then.

    ``layers``: path of a layer -> makes its tensors, by their names in the model.
    """

    def __init__(self, model: Any, layers: dict[str, Callable[[], dict[str, Tensor]]]) -> None:
        self.dense = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.layers = layers
        self._current: tuple[str, dict[str, Tensor]] = "", {}

    def make_tensor(self, name: str) -> Tensor:
        """The tensor of a name; cheapest layer by layer."""
        layer = next((path for path in self.layers if name.startswith((f"{path}.self_attn.", f"{path}.mlp."))), None)
        if layer is None:
            return self.dense[name]
        if layer != self._current[0]:
            # The one before goes first.
            self._current = "", {}
            self._current = layer, self.layers[layer]()
        return self._current[1][name]


def _plan_export(model: Any, structure: Structure, mode: str) -> tuple[Any, Any, _ConvertedTensors]:
    """Class and configuration of a converted model, and its tensors; raises as `build_converted_model`."""
    if mode not in modeling.MODES:
        raise RecipeError(f"mode is {mode!r}; allowed: {', '.join(modeling.MODES)}.")
    sublayers = find_sublayers(model)
    require_structure_fits(structure, sublayers)
    if getattr(model.config, "qk_layernorm", False):
        raise FamilyError(
            "This Phi normalises queries and keys by a LayerNorm, whose mean would change with every dropped dimension. "
            "Convert a model with qk_layernorm=false."
        )
    model_class = modeling.MODELS[model.config.model_type]
    layers = {
        layer.path: partial(_convert_layer, model, layer, own, mode)
        for layer, own in zip(sublayers, structure, strict=True)
    }
    settings = {
        "format": modeling.FORMAT,
        "mode": mode,
        "head_dim": sublayers[0].rotary.head_dim,
        # Queries and keys have fewer dimensions now, and are scaled as if they had all.
        "scale": sublayers[0].rotary.head_dim ** -0.5,
        "layers": [make()[0] for make in layers.values()],
    }
    values = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures", "auto_map")}
    config = model_class.config_class(**values, tomoe=settings)
    return (
        model_class,
        config,
        _ConvertedTensors(model, {path: lambda make=make: make()[1] for path, make in layers.items()}),
    )


def _convert_layer(
    model: nn.Module, layer: DecoderSublayers, structure: LayerStructure, mode: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One layer's entry of ``config.tomoe`` and its tensors."""
    attention_sizes, attention = _convert_attention(
        model.get_submodule(f"{layer.path}.self_attn"), layer, structure, mode
    )
    mlp_sizes, mlp = _convert_mlp(layer, structure, mode)
    tensors = {f"{layer.path}.self_attn.{k}": v for k, v in attention.items()}
    tensors |= {f"{layer.path}.mlp.{k}": v for k, v in mlp.items()}
    device = layer.q.weight.device
    # Copies, also where a view would do: what is saved shares no memory, and the dense model stays its own.
    tensors = {k: v.detach().to(device, copy=True, memory_format=torch.contiguous_format) for k, v in tensors.items()}
    return attention_sizes | mlp_sizes, tensors


def _convert_attention(
    attention: nn.Module, layer: DecoderSublayers, structure: LayerStructure, mode: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    head_dim, pairs = layer.rotary.head_dim, layer.rotary.turned // 2
    bits, static = structure.qk.cpu(), None if isinstance(structure.vo, ValueGateTensors) else structure.vo.cpu().bool()
    if mode == "pseudo":
        kept_bits, values = torch.ones_like(bits), torch.arange(head_dim)
    else:
        kept_bits, values = bits, torch.arange(head_dim) if static is None else static.nonzero().flatten()
    first, free = kept_bits[:pairs].nonzero().flatten(), kept_bits[pairs:].nonzero().flatten() + layer.rotary.turned
    turned = torch.cat([first, first + pairs])
    groups = torch.arange(layer.kv_heads) if structure.heads is None else structure.heads.cpu().nonzero().flatten()
    serving = layer.heads // layer.kv_heads
    heads = (groups[:, None] * serving + torch.arange(serving)).flatten()
    queries = torch.cat([turned, free])
    tensors = {"turned_index": turned}
    parts = (("q", layer.q, heads, queries), ("k", layer.k, groups, queries), ("v", layer.v, groups, values))
    for name, linear, which, dims in parts:
        which, dims = which.to(linear.weight.device), dims.to(linear.weight.device)
        tensors[f"{name}_proj.weight"] = linear.weight.unflatten(0, (-1, head_dim))[which][:, dims].flatten(0, 1)
        if linear.bias is not None:
            tensors[f"{name}_proj.bias"] = linear.bias.unflatten(0, (-1, head_dim))[which][:, dims].flatten()
    device = layer.o.weight.device
    rows = layer.o.weight.T.unflatten(0, (-1, head_dim))[heads.to(device)][:, values.to(device)]
    tensors["o_proj.weight"] = rows.flatten(0, 1)
    if layer.o.bias is not None:
        tensors["o_proj.bias"] = layer.o.bias
    # Norms of query and key heads, where the family has them.
    for name in ("q_norm", "k_norm"):
        if (norm := getattr(attention, name, None)) is not None:
            tensors[f"{name}.weight"] = norm.weight[queries.to(norm.weight.device)]
    if isinstance(structure.vo, ValueGateTensors):
        names = ("project", "embedding", "norm_weight", "norm_bias", "decode", "offset")
        tensors |= {f"value_gate.{name}": getattr(structure.vo, name).float() for name in names}
    if mode == "pseudo":
        tensors["query_mask"] = layer.rotary.expand_bits(bits.float()).bool()
        if static is not None:
            tensors["value_mask"] = static
    return {
        "heads": len(heads),
        "kv_heads": len(groups),
        "query_width": len(queries),
        "turned": len(turned),
        "value_width": len(values),
        "value_keep": structure.value_width,
        "gate_width": len(structure.vo.embedding) if isinstance(structure.vo, ValueGateTensors) else None,
    }, tensors


def _convert_mlp(
    layer: DecoderSublayers, structure: LayerStructure, mode: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    experts = structure.experts.cpu().bool()
    widths = structure.neuron_counts
    if mode == "shared":
        held = union_order(experts)
        members = [experts[n, held].nonzero().flatten() for n in range(len(experts))]
    elif mode == "materialised":
        # Shorter experts are filled up with other neurons, which no list names.
        fillers = [torch.cat([(row).nonzero().flatten(), (~row).nonzero().flatten()]) for row in experts]
        held = torch.cat([filler[: max(widths)] for filler in fillers])
        members = [torch.arange(width) + n * max(widths) for n, width in enumerate(widths)]
    else:
        held = torch.arange(layer.intermediate_size)
        members = [row.nonzero().flatten() for row in experts]
    index = torch.full((len(experts), max(widths)), -1, dtype=torch.int32)
    for row, rows in zip(index, members, strict=True):
        row[: len(rows)] = rows
    held = held.to(layer.down.weight.device)
    tensors = {
        "router.weight": structure.router_weight.float(),
        "router.bias": structure.router_bias.float(),
        "experts": index,
        "up": torch.stack([linear.weight[held] for linear in layer.up]),
        "down": layer.down.weight.T[held],
    }
    if layer.up[0].bias is not None:
        tensors["up_bias"] = torch.stack([linear.bias[held] for linear in layer.up])
    if layer.down.bias is not None:
        tensors["down_bias"] = layer.down.bias
    return {"neurons": len(held), "widths": widths}, tensors


def export_converted_model(
    model: Any,  # The dense model
    structure: Structure,  # What each token uses
    folder: str | Path,  # Where to write; made if it is missing
    mode: str = "shared",  # ``shared``, ``materialised`` or ``pseudo``
    tokenizer: Any = None,  # Saved beside the model if given
    resume: bool = False,  # Leave what an earlier call, for the same structure, had written before it was stopped
) -> Path:
    """Write a folder that loads without freemoe, given ``trust_remote_code=True``, and by it without that.

    config.json is written last: a folder that was cut short does not look like a model.

    Returns:
        The folder.

    Raises:
        ArtifactError: The folder holds a model already.
        DataError, FamilyError, RecipeError: As ``build_converted_model``.
    """
    folder = Path(folder)
    if resume and (folder / "config.json").exists():
        shutil.rmtree(folder / "partial", ignore_errors=True)
        return folder
    if (folder / "config.json").exists():
        raise ArtifactError(f"{str(folder)!r} holds a model already. Export to another folder, or remove it.")
    own, config, tensors = _plan_export(model, structure, mode)
    config.auto_map = {
        "AutoConfig": f"{Path(CODE).stem}.{own.config_class.__name__}",
        "AutoModelForCausalLM": f"{Path(CODE).stem}.{own.__name__}",
    }
    with torch.device("meta"):
        new = make_uninitialised(own, config, model.dtype, attention_of(model.config))
    new.tie_weights()
    new.generation_config = copy.deepcopy(model.generation_config)
    unfinished = folder / "partial"
    if not resume:
        shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True, exist_ok=True)
    dense = sum(p.numel() * p.element_size() for p in model.parameters())
    path = next(iter(tensors.layers)).rpartition(".")[0]
    # A shard is held beside the dense model.
    save_checkpoint(new, unfinished, max(_SHARD, dense // 10), values=tensors.make_tensor, layers=path, resume=resume)
    if tokenizer is not None:
        tokenizer.save_pretrained(unfinished)
    for name, text in remote_code().items():
        (unfinished / name).write_text(text, encoding="utf-8")
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
        notify_watchers("begins", f"model {path.name}")
        path.replace(folder / path.name)
    unfinished.rmdir()
    return folder


def remote_code() -> dict[str, str]:
    """The code of an exported folder, file name -> text: `modeling` and what it imports of ours, as neighbours."""
    package = Path(modeling.__file__).parents[1]
    texts: dict[str, str] = {}
    wanted = [package / "tomoe" / "modeling.py"]
    while wanted:
        path = wanted.pop()
        name = CODE if path.stem == "modeling" else path.name
        if name not in texts:
            text = path.read_text(encoding="utf-8")
            wanted += [package / room / f"{module}.py" for room, module in _OURS.findall(text)]
            texts[name] = _OURS.sub(r"from .\2 import", text)
    return texts
