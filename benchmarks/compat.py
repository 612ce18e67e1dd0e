"""Private and moving names of other libraries that the benchmarks ask for, in one place, as `freemoe.compat` is the package's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from freemoe.compat.names import attribute_of, name_of, quiet_loggers


def _with_lora(model: Any, names: list[str], rank: int, purpose: str, config: dict[str, Any], **options: Any) -> Any:
    """The model's own modules wrapped, and the configuration; scaling is 1."""
    make, wrap = name_of("peft", "peft:LoraConfig", purpose), name_of("peft", "peft:get_peft_model", purpose)
    same = {"r": rank, "lora_alpha": rank, "bias": "none", "target_modules": names, "task_type": "CAUSAL_LM"}
    made = make(**same, **config)
    with warnings.catch_warnings():
        # PEFT asks transformers for a property under its old name.
        warnings.simplefilter("ignore", FutureWarning)
        return wrap(model, made, **options), made


def with_lora_beside(model: Any, names: list[str], rank: int, *, lengths: bool = False) -> Any:
    """The model itself with PEFT's LoRA (``lengths``: DoRA) beside the named linears; scaling is 1, all else frozen."""
    config = {"lora_dropout": 0.0, "use_dora": lengths}
    return _with_lora(model, names, rank, "train its rival, LoRA", config)[0]


def with_lora_adapters(model: Any, names: list[str], rank: int, adapters: list[str]) -> Any:
    """The model itself with random LoRA adapters beside the named linears; its forward takes ``adapter_names``."""
    purpose, options = "measure batches of several adapters", {"autocast_adapter_dtype": False}
    drawn = {"init_lora_weights": False}
    wrapped, config = _with_lora(model, names, rank, purpose, drawn, adapter_name=adapters[0], **options)
    for adapter in adapters[1:]:
        wrapped.add_adapter(adapter, config, **options)
    return wrapped


def own_backend(model: Any, tokenizer: Any, **options: Any) -> Any:
    """lm-eval's own scorer over a loaded model: the rival of ours."""
    backend = name_of("lm-eval", "lm_eval.models.huggingface:HFLM", "be measured beside lm-eval's own scorer")
    with quiet_loggers("lm_eval.models.huggingface"):
        return backend(pretrained=model, tokenizer=tokenizer, **options)


def answers_of(backend: Any, requests: Sequence[Any]) -> list[tuple[float, bool]]:
    """What lm-eval's own scorer answers to requests that are tokens already: log-likelihood in nats, and whether greedy."""
    score = attribute_of(backend, "_loglikelihood_tokens", "lm-eval", "measure both scorers on the same tokens")
    return score(requests, disable_tqdm=True)
