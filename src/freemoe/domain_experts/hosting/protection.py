"""A base that is to be converted, copied or edited: what its experts need of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from freemoe.core.errors import DataError

_EDITS = re.compile(
    "(add|convert|delete|dequantize|disable|enable|init|initialize|load|maybe|merge|post|prepare_distribute|prune|quantize|remove|replace"
    "|reset|resize|save|set|tie|unload|unmerge|untie)(_|$)"
)
"""How methods of a transformers model begin that change its weights or modules."""

_HARMLESS = re.compile(
    "(add_model_tags|(en|dis)able_input_require_grads|init_continuous_batching|load_custom_generate|set_(attn|experts)_implementation"
    "|set_use_kernels)$"
)
"""Those of them that change neither."""


def require_same_values(model: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Raise where a conversion rounds a base: experts are bound to its values, and bands are rankings of them."""
    types: dict[torch.dtype, torch.dtype] = {}
    for name, parameter in model.named_parameters():
        old = parameter.dtype
        if not parameter.is_floating_point() or parameter.is_meta:
            continue
        if old not in types:
            types[old] = fn(torch.empty(0, dtype=old, device=parameter.device)).dtype
        new = types[old]
        if new == old or torch.equal(parameter, parameter.to(new).to(old)):
            continue
        said = [str(t).removeprefix("torch.") for t in (new, old)]
        raise DataError(
            f"As {said[0]} the base's values would be rounded (the first is of {name!r}), and its experts are bound to the "
            f"values that they were chosen on. Keep it in {said[1]}; or build experts on the base in {said[0]} (freemoe build "
            f"--dtype {said[0]}); or take one expert along as a plain model: merge_and_unload(NAME).to(torch.{said[0]})."
        )


def refuse_copy(*_: Any, **__: Any) -> NoReturn:
    """What saving, copying or pickling a base does while an expert is in its weights."""
    raise DataError(
        "An expert is switched in, so a copy of the base would have its zeros. Copy inside `with moe.expert('base'):`, or after "
        "set_expert('base'); to write the expert as a plain model, use merge_and_save(NAME, FOLDER)."
    )


def method_of_base(model: Any, name: str) -> Any:
    """What a base has by a name, for a host that has nothing; a method that would edit the base refuses to be called."""
    found = getattr(model, name)
    if callable(found) and not isinstance(found, torch.nn.Module) and _EDITS.match(name) and not _HARMLESS.match(name):
        return functools.partial(_refuse_edit, name)
    return found


def _refuse_edit(name: str, *_: Any, **__: Any) -> NoReturn:
    raise DataError(
        f"{name} would edit the base, and so every expert, which is bound to the base's weights as they are. Edit the model first and "
        f"build experts on it; or take one expert along as a plain model, which has {name}: merge_and_unload(NAME)."
    )
