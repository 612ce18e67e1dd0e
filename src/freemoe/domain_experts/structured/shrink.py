"""Cut units that are off out of a model: a plain, smaller one of the same class, that needs no freemoe.

Rows, columns, experts and layers are left out; what stays keeps its values, so that the logits are those of the model
with the units switched off, up to the order of sums. The plain configuration has one number for all layers (one
``intermediate_size``, one ``num_key_value_heads``), so the same number of units must be left in every layer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from freemoe.core.errors import FamilyError, RecipeError
from freemoe.domain_experts.structured.units import ModelUnits, UnitSlice, UnitsOff
from freemoe.models.gates import EXPERT_COUNTS
from freemoe.models.spec import family_of, find_layers

# Names of the MLP's width in configurations; a model has one of them.
_WIDTHS = ("n_inner", "ffn_dim", "intermediate_size")


def shrink(model: Any, units: ModelUnits, off: UnitsOff, *, pad: bool = False) -> Any:
    """Build the smaller model; the one given is not touched.

    With ``pad``, layers that are left with fewer neurons or KV groups than the largest keep as many as it has, those beyond
    their own with weights at zero: equal logits, but less is saved.

    Raises:
        RecipeError: Layers are left with different numbers of units, and ``pad`` cannot help or was not asked for.
        FamilyError: The family's plain configuration cannot say what would be left.
    """
    units.require_valid(off)
    state: dict[str, Tensor] = dict(model.state_dict())
    config = copy.deepcopy(model.config)
    if units.kind == "layer":
        keep = [layer.number for layer in units.layers if layer.number not in off]
        state = _without_layers(model, state, keep)
        _say_layers(config.get_text_config(), len(units.layers), keep)
    else:
        keep = {
            layer.number: _remaining_units(layer.count, off.get(layer.number, torch.empty(0, dtype=torch.long)))
            for layer in units.layers
        }
        width = max(map(len, keep.values()))
        if min(map(len, keep.values())) < width:
            keep = _pad_layers(units, keep, width, pad)
            state = _with_zeros(state, units, off, keep)
        for layer in units.layers:
            for part in layer.parts:
                _cut_weight(state, part, part.member_indices(keep[layer.number]))
        if units.kind == "expert":
            _cut_routers(model, state, units, keep)
        _say_width(model, config.get_text_config(), units, width)
    return _build_model(model, config, state)


def _remaining_units(count: int, off: Tensor) -> Tensor:
    on = torch.ones(count, dtype=torch.bool)
    on[off.cpu()] = False
    return on.nonzero().flatten()


def _pad_layers(units: ModelUnits, keep: dict[int, Tensor], width: int, pad: bool) -> dict[int, Tensor]:
    numbers = sorted({len(k) for k in keep.values()})
    if not pad or units.kind == "expert":
        raise RecipeError(
            f"Layers are left with different numbers of units of kind {units.kind!r} ({numbers[0]} to {numbers[-1]}), and a "
            "plain configuration has one number for all layers. Build with --even"
            + (
                "."
                if units.kind == "expert"
                else ", or pad every layer to the largest (merge --shrink --pad; pad=True): that saves less."
            )
        )
    counts = {layer.number: layer.count for layer in units.layers}
    return {
        n: torch.cat([k, _remaining_units(counts[n], k)[: width - len(k)]]).sort().values if len(k) < width else k
        for n, k in keep.items()
    }


def _with_zeros(
    state: dict[str, Tensor], units: ModelUnits, off: UnitsOff, keep: dict[int, Tensor]
) -> dict[str, Tensor]:
    """The state with the weights at zero of units that are off and yet stay, to fill a layer up."""
    state = dict(state)
    for layer in units.layers:
        filling = off.get(layer.number)
        if filling is None or not (filling := filling.cpu()[torch.isin(filling.cpu(), keep[layer.number])]).numel():
            continue
        for part in layer.parts:
            axis = _index_dim(part)
            state[part.weight.name] = state[part.weight.name].index_fill(
                axis, part.member_indices(filling).to(state[part.weight.name].device), 0
            )
    return state


def _index_dim(part: UnitSlice) -> int:
    """The dimension, in memory, that a part's indices count."""
    if part.axis == "experts":
        return 0
    last = part.axis == "columns"
    if part.weight.layout.endswith("columns"):
        last = not last
    return part.weight.parameter.ndim - (1 if last else 2)


def _cut_weight(state: dict[str, Tensor], part: UnitSlice, indices: Tensor) -> None:
    """Keep these rows, columns or experts of a weight; rows take their bias with them."""
    name = part.weight.name
    state[name] = state[name].index_select(_index_dim(part), indices.to(state[name].device))
    bias = name.removesuffix("weight") + "bias" if name.endswith("weight") else f"{name}_bias"
    if part.axis != "columns" and bias in state:
        state[bias] = state[bias].index_select(0, indices.to(state[bias].device))


def _cut_routers(model: Any, state: dict[str, Tensor], units: ModelUnits, keep: dict[int, Tensor]) -> None:
    family = family_of(model)
    path, _ = find_layers(model, family)
    assert family.gate is not None
    if (getattr(model.config.get_text_config(), "n_group", None) or 1) > 1:
        raise FamilyError(
            f"The routers of {type(model).__name__} choose groups of experts first (n_group), and groups cannot lose single "
            "experts. Use another --unit."
        )
    for layer in units.layers:
        start = f"{path}.{layer.number}.{family.gate.path}."
        for key in [k for k in state if k.startswith(start)]:
            if state[key].ndim and state[key].shape[0] == layer.count:
                state[key] = state[key].index_select(0, keep[layer.number].to(state[key].device))


def _say_width(model: Any, config: Any, units: ModelUnits, num_kept: int) -> None:
    """Write the number of units that are left into the configuration."""
    if units.kind == "expert":
        for name in EXPERT_COUNTS:
            if getattr(config, name, None) == units.layers[0].count:
                setattr(config, name, num_kept)
    elif units.kind == "neuron":
        setattr(config, next(n for n in _WIDTHS if hasattr(config, n)), num_kept)
    else:
        heads, groups = config.num_attention_heads, units.layers[0].count
        # Without it the size of a head would follow from the hidden size and the number of heads.
        config.head_dim = units.layers[0].parts[-1].members.shape[1] * groups // heads
        config.num_attention_heads = heads // groups * num_kept
        if hasattr(config, "num_key_value_heads"):
            config.num_key_value_heads = num_kept


def _without_layers(model: Any, state: dict[str, Tensor], keep: Sequence[int]) -> dict[str, Tensor]:
    path, _ = find_layers(model, family_of(model))
    places = {old: new for new, old in enumerate(keep)}
    found = {}
    for key, value in state.items():
        if key.startswith(f"{path}."):
            number, _, rest = key.removeprefix(f"{path}.").partition(".")
            if int(number) not in places:
                continue
            key = f"{path}.{places[int(number)]}.{rest}"
        found[key] = value
    return found


def _say_layers(config: Any, count: int, keep: Sequence[int]) -> None:
    """Write the layers that are left into the configuration, with everything that it says layer by layer."""
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, list) and len(value) == count and name != "mlp_only_layers":
            setattr(config, name, [value[i] for i in keep])
    if getattr(config, "mlp_only_layers", None):
        config.mlp_only_layers = [new for new, old in enumerate(keep) if old in config.mlp_only_layers]
    if getattr(config, "first_k_dense_replace", None):
        config.first_k_dense_replace = sum(i < config.first_k_dense_replace for i in keep)
    config.num_hidden_layers = len(keep)


def _build_model(model: Any, config: Any, state: dict[str, Tensor]) -> Any:
    """A model of the same class with these weights."""
    try:
        with torch.random.fork_rng(devices=[]):
            small = type(model)(config).to(dtype=model.dtype, device=model.device)
    except ValueError as error:
        raise _family_error(model, str(error)) from error
    wanted = {k: tuple(v.shape) for k, v in small.state_dict().items()}
    seen = {k: tuple(v.shape) for k, v in state.items()}
    wrong = [k for k in {**wanted, **seen} if wanted.get(k) != seen.get(k)]
    if wrong:
        raise _family_error(
            model, f"{wrong[0]} would be {seen.get(wrong[0])}, and the class makes it {wanted.get(wrong[0])}"
        )
    small.load_state_dict(state)
    small.generation_config = copy.deepcopy(model.generation_config)
    return small.eval()


def _family_error(model: Any, why: str) -> FamilyError:
    return FamilyError(
        f"The configuration of {type(model).__name__} ({model.config.model_type}) cannot say what is left: {why}. The "
        "units can be switched off in this family, but not cut out; use another --unit."
    )
