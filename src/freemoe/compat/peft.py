"""What freemoe asks of PEFT; in 0.18 to 0.21."""

from __future__ import annotations

import warnings
from typing import Any

from freemoe.compat.names import name_of

_PACKAGE = "peft"


def with_lora_beside(model: Any, names: list[str], rank: int, *, lengths: bool = False) -> Any:
    """The model with PEFT's LoRA beside each of the named linears; scaling is 1, dropout none, nothing else is trained.

    Args:
        model: A causal LM; its own modules are changed.
        names: Paths of linears.
        rank: Of every pair.
        lengths: Train the length of every output's weights beside their direction (DoRA).
    """
    purpose = "train its rival, LoRA"
    make, wrap = name_of(_PACKAGE, "peft:LoraConfig", purpose), name_of(_PACKAGE, "peft:get_peft_model", purpose)
    config = make(
        r=rank,
        lora_alpha=rank,
        lora_dropout=0.0,
        bias="none",
        target_modules=names,
        task_type="CAUSAL_LM",
        use_dora=lengths,
    )
    with warnings.catch_warnings():
        # PEFT asks transformers for a property under its old name.
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(model, config)


def with_lora_adapters(model: Any, names: list[str], rank: int, adapters: list[str]) -> Any:
    """The model with several LoRA adapters, random ones, beside each of the named linears, in the model's own precision.

    Its forward takes ``adapter_names``, one per sequence.

    Args:
        model: A causal LM; its own modules are changed.
        names: Paths of linears.
        rank: Of every pair.
        adapters: Their names.
    """
    purpose = "measure batches of several adapters"
    make, wrap = name_of(_PACKAGE, "peft:LoraConfig", purpose), name_of(_PACKAGE, "peft:get_peft_model", purpose)
    config = make(
        r=rank, lora_alpha=rank, bias="none", target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = wrap(model, config, adapter_name=adapters[0], autocast_adapter_dtype=False)
        for adapter in adapters[1:]:
            wrapped.add_adapter(adapter, config, autocast_adapter_dtype=False)
    return wrapped


def unwrapped(model: Any) -> Any:
    """The language model itself, where PEFT has wrapped it."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model
