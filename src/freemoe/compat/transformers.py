"""What freemoe touches of transformers beside its documented names. All of it is in 5.0 to 5.23 unless a function says otherwise.

The copies that `tomoe` puts into exported folders may not import freemoe, and so use a few such names themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from freemoe.compat.names import attribute_of, attribute_replaced, name_of
from freemoe.core.errors import DataError

_PACKAGE = "transformers"

Gate = Callable[[Tensor], Tensor]
"""From what the experts' up projection gives to what their down projection multiplies."""


def is_conv1d(module: nn.Module | None) -> bool:
    """Whether a module is GPT-2's linear, whose weight lies by columns (``transformers.pytorch_utils.Conv1D``)."""
    kind = name_of(_PACKAGE, "transformers.pytorch_utils:Conv1D", "know on which side of a weight its inputs stand")
    return isinstance(module, kind)


def make_known_to_pipelines(kind: type) -> None:
    """Let text generation's pipeline take a class that wraps a causal LM, as it takes PEFT's, without an error in its log.

    Releases without a list for wrappers log the error; the pipeline works all the same.
    """
    base = sys.modules.get("transformers.pipelines.base")  # whoever has a pipeline has loaded it
    names = getattr(base, "SUPPORTED_PEFT_TASKS", {}).get("text-generation")
    if names is not None and kind.__name__ not in names:
        names.append(kind.__name__)


def set_model_name(model: Any, tokenizer: Any, name: str) -> None:
    """Give a model and its tokenizer, or None, another name than that of the folder they were loaded from."""
    model.name_or_path = model.config._name_or_path = name
    if tokenizer is not None:
        tokenizer.name_or_path = name


def unwrap_peft(model: Any) -> Any:
    """The language model itself, where PEFT (0.18 to 0.21) has wrapped it."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model


def reading_hooks(module: nn.Module) -> Iterator[Any]:
    """A module's hooks of accelerate (1.0 to 1.15) that read its weights while it computes, by themselves or among others.

    Each has a mapping ``weights_map`` from the names of the module's own parameters to their values, which may be
    replaced, and an ``execution_device``.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    for part in getattr(hook, "hooks", (hook,)):
        if getattr(part, "offload", False) and getattr(part, "weights_map", None) is not None:
            yield part


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Inside, a panic of the Rust code of tokenizers is an error of ours: it derives from no ``Exception``, and cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(f"tokenizers fails on its files (tokenizer.json): {error}. Copy them again.") from error


def dequantise_options() -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that have all of a GGUF file dequantised.

    Releases that have ``GgufConfig`` leave some architectures' weights packed without it; 5.16 has none and never does.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def make_plain(model: Any) -> None:
    """Forget that a dequantised model was quantised: it is not any more, and would refuse to be saved.

    Which of these marks a model bears differs from release to release.
    """
    marks = ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config"))
    for owner, name in marks:
        if hasattr(owner, name):
            delattr(owner, name)
    model.is_quantized = False


def is_quantised(model: Any) -> bool:
    """Whether a model's weights are held in a form that transformers itself turns into numbers."""
    return getattr(model, "hf_quantizer", None) is not None


def attention_of(config: Any) -> str | None:
    """Name of the function that computes attention, ``sdpa`` for one; None for a configuration that is not transformers'."""
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        return getattr(config, "_attn_implementation", None)
    return attribute_of(config, "_attn_implementation", _PACKAGE, "know how attention is computed")


def make_uninitialised(model_class: Any, config: Any, dtype: Any, attention: str | None) -> Any:
    """A model of a class whose tensors hold anything, to be filled at once."""
    purpose = "make a model without drawing weights that are replaced at once"
    no_init_weights = name_of(_PACKAGE, "transformers.initialization:no_init_weights", purpose)
    make = attribute_of(model_class, "_from_config", _PACKAGE, purpose)
    with no_init_weights():
        return make(config, dtype=dtype, attn_implementation=attention)


def no_split_modules(model: Any) -> list[str]:
    """Names of the classes whose modules must not be spread over several devices."""
    return sorted(attribute_of(model, "_no_split_modules", _PACKAGE, "know what may lie on different devices") or ())


def experts_backend(config: Any) -> str:
    """Name of the function that runs a mixture's fused experts: ``grouped_mm``, ``batched_mm``, ``eager`` or one of ours."""
    return attribute_of(config, "_experts_implementation", _PACKAGE, "know how a mixture's experts are run")


@contextmanager
def experts_run_by(model: Any, name: str, function: Callable[..., Tensor]) -> Iterator[None]:
    """While open, a mixture's fused experts are run by a function of ours, afterwards by what ran them before; it nests.

    The name stays in the list of all models' ways; the function is called with the experts' module and the arguments of its
    forward.
    """
    known = name_of(_PACKAGE, "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS", "run experts in a way of its own")
    if name not in known.valid_keys():
        known.register(name, function)
    before = experts_backend(model.config)
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def gate_of(experts: Any) -> Gate:
    """The gate of fused experts, their activation included."""
    return attribute_of(experts, "_apply_gate", _PACKAGE, "know what the experts' down projection multiplies")


def are_plain_experts(experts: Any) -> bool:
    """Whether fused experts are act(gate x) * (up x), then down, gate above up: no bias, no norm, no gate of their own."""
    wanted = {
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
        "is_transposed": False,
        "is_concatenated": True,
    }
    if any(getattr(experts, name, None) is not value for name, value in wanted.items()):
        return False
    default = name_of(
        _PACKAGE,
        "transformers.integrations.moe:_default_apply_gate",
        "know what the experts' down projection multiplies",
    )
    return getattr(gate_of(experts), "__func__", None) is default


def gate_replaced(experts: Any, gate: Gate) -> AbstractContextManager[None]:
    """While open, fused experts use another gate; it nests."""
    return attribute_replaced(vars(experts), "_apply_gate", gate)
